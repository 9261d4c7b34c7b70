"""Read the JSON files and safetensors headers of a checkpoint on the hub, without its weights.

One request lists the files and names the commit of the revision. Further requests fetch JSON files and the beginnings
of `*.safetensors` files as ranges of bytes.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash_cli.checkpoints.hub import MISREAD, NotFromAHub, explained
from dflash_cli.checkpoints.slow_answers import ANSWER_S, too_slow
from dflash_runtime.checkpoint.stored.adapters import instead_of_model
from dflash_runtime.checkpoint.stored.files import INDEX_FILE, Checkpoint, TensorCut
from dflash_runtime.checkpoint.stored.gguf import SUFFIX
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo, parse_header
from dflash_runtime.checkpoint.stored.strict_json import MAX_JSON_BYTES, parse_json, too_large_json
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.phrases import plural

FIRST_BYTES = 128 * 1024
"""Bytes of a safetensors file that are fetched first. The header of nearly any draft or target shard is shorter."""

MAX_SHARDS = 1000
MAX_LISTING_BYTES = 16_000_000
COMMIT = re.compile(r"[0-9A-Za-z._-]{1,64}")
SIZE = re.compile(r"[0-9]{1,18}", re.ASCII)
TIMEOUT_S = 30.0
WORKERS = 8

REFUSAL_BYTES = 16 * 1024
"""The most bytes of a refusal's body that are read."""


@dataclass(slots=True)
class Traffic:
    """The number of requests to the hub, and the bytes that they fetched."""

    num_requests: int = 0
    num_bytes: int = 0
    whole_bytes: int = 0

    @property
    def text(self) -> str:
        """`read 212,345 of 16,381,516,904 bytes in 4 requests (headers and JSON only)`."""
        whole = f" of {self.whole_bytes:,}" if self.whole_bytes > self.num_bytes else ""
        return f"read {self.num_bytes:,}{whole} bytes in {self.num_requests} requests (headers and JSON only)"


@dataclass(frozen=True, slots=True)
class RemoteRepo:
    """A repository on the hub at one commit, with the names of its files."""

    repo: str
    commit: str
    files: frozenset[str]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def path(self) -> Path:
        """`org/repo@0123456789ab`, which messages show instead of a directory."""
        return Path(f"{self.repo}@{self.commit[:12]}")

    def fetch(self, name: str, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes [begin, end) of a file, or fewer if the file is shorter, and the size of the file.

        Raises:
            CheckpointNotFound: see `hub.explained`.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, name, revision=self.commit)
        with explained(self.repo, self.commit), _get(url, begin, end) as response:
            data = _read(response, end - begin)
            self.traffic.num_requests += 1
            self.traffic.num_bytes += len(data)
            return data, _whole_size(response, len(data))


class RemoteCheckpoint(Checkpoint):
    """Config and headers of a repository on the hub. Its tensors cannot be loaded.

    Raises:
        CheckpointError: see `Checkpoint`.
        CheckpointNotFound: see `hub.explained`.
    """

    def __init__(self, repo: RemoteRepo) -> None:
        self.path = repo.path
        self.repo = repo
        if "config.json" not in repo.files:
            has_gguf = any(name.endswith(SUFFIX) for name in repo.files)
            hint = f"the repository has GGUF files: dflash pull {repo.repo}" if has_gguf else None
            raise CheckpointError(
                "not found, expected a checkpoint's config", id="config-missing", path=self.config_path,
                hint=instead_of_model(repo.files) or hint,
            )  # fmt: skip
        self.config = self._read_json("config.json")
        self._tensors: dict[str, TensorInfo] | None = None
        self._metadata: dict[str, str] = {}
        self._optional: dict[str, dict[str, Any]] = {}

    @property
    def file_names(self) -> frozenset[str]:
        return frozenset(name for name in self.repo.files if "/" not in name)

    def read_headers(self, names: Sequence[str]) -> Iterable[dict[str, TensorInfo]]:
        if len(names) > MAX_SHARDS:
            raise CheckpointError(
                f"{len(names)} shards, expected at most {MAX_SHARDS} to read them one request each",
                id="too-many-shards",
                path=self.path / INDEX_FILE,
                found=len(names),
                expected=f"at most {MAX_SHARDS} shards",
                hint="download the checkpoint and pass its directory",
            )
        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(self._read_header, names))

    def load_many(
        self, names: list[str], device: str = "cpu", cuts: Mapping[str, TensorCut] | None = None
    ) -> Iterator[Any]:
        """Refuse to load tensors, because only headers are fetched."""
        raise UnsupportedError(
            f"only headers were read, not the weights of {plural(len(names), 'tensor')}",
            id="weights-not-fetched",
            path=self.path,
        )

    def read_optional_json(self, name: str) -> dict[str, Any] | None:
        if name in self.repo.files and name not in self._optional:
            self._optional[name] = self._read_json(name)
        return self._optional.get(name)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        data, size = self.repo.fetch(name, 0, MAX_JSON_BYTES)
        if size > MAX_JSON_BYTES:
            raise too_large_json(size, path)
        return parse_json(data, path, is_config=name == self.config_path.name)

    def _read_header(self, name: str) -> dict[str, TensorInfo]:
        """Parse the header of one file. A second request fetches the rest of a long header."""
        data, size = self.repo.fetch(name, 0, FIRST_BYTES)
        self.repo.traffic.whole_bytes += size
        position = 0

        def read(count: int) -> bytes:
            nonlocal data, position
            begin, position = position, position + count
            if len(data) < position <= size:
                data += self.repo.fetch(name, len(data), position)[0]
            return data[begin:position]

        return parse_header(read, size, self.path / name, self._metadata)


def list_repo(reference: str) -> RemoteRepo:
    """List the files of `org/repo[@revision]` at the commit of the revision.

    Raises:
        CheckpointNotFound: see `hub.explained`.
    """
    from huggingface_hub import HfApi

    repo, _, revision = reference.partition("@")
    with explained(repo):
        _hub_utils().validate_repo_id(repo)
    url = f"{HfApi().endpoint}/api/models/{quote(repo)}"
    if revision:
        url += f"/revision/{quote(revision, safe='')}"
    traffic = Traffic(num_requests=1)
    with explained(repo, revision or None), _get(url) as response:
        data = _read(response, MAX_LISTING_BYTES)
        _refuse_other_pages(data)
    traffic.num_bytes += len(data)
    return parse_listing(data, repo, url, traffic)


def parse_listing(data: bytes, repo: str, url: str, traffic: Traffic) -> RemoteRepo:
    """The repository that the hub's answer describes.

    Raises:
        CheckpointError: the answer is not JSON, or names no commit.
    """
    info = parse_json(data, Path(url))
    siblings = info.get("siblings")
    names = [item.get("rfilename") for item in siblings if isinstance(item, dict)] if isinstance(siblings, list) else []
    commit = info.get("sha")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"the hub names no commit: {json.dumps(info)[:80]}", id="hub-without-commit", path=url, field="sha"
        )
    return RemoteRepo(repo, commit, frozenset(name for name in names if isinstance(name, str)), traffic)


def _refuse_other_pages(data: bytes) -> None:
    try:
        parse_json(data, Path())
    except CheckpointError as error:
        raise NotFromAHub(error.message) from error


@contextmanager
def _get(url: str, begin: int | None = None, end: int | None = None) -> Iterator[Any]:
    """A streamed answer without an HTTP error. The hub's own client follows redirects and has the token."""
    utils = _hub_utils()
    headers = dict(utils.build_hf_headers())
    if begin is not None and end is not None:
        # A compressed answer would contain other bytes than the range of the stored file.
        headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        if response.status_code >= 400:
            _raise_refusal(response)
        if str(response.headers.get("Content-Type", "")).startswith("text/html"):
            raise NotFromAHub("an HTML page")
        if begin and response.status_code != 206:
            raise CheckpointError(
                "the server does not support requests for a range of bytes", id="hub-without-ranges", path=url
            )
        yield response


def _raise_refusal(response: Any) -> None:
    """Raise the library's error for a refusal, with the beginning of its body if the library reads such a body."""
    body = next(response.iter_bytes(REFUSAL_BYTES), b"")
    kept = [
        item for item in response.headers.raw
        if not item[0].lower().startswith(b"content-") or item[0].lower() == b"content-type"
    ]  # fmt: skip

    def raise_with(content: bytes) -> None:
        made = type(response)(response.status_code, headers=kept, content=content, request=response.request)
        _hub_utils().hf_raise_for_status(made)

    with suppress(*MISREAD):
        raise_with(body)
    raise_with(b"")


def _hub_utils() -> Any:
    """huggingface_hub.utils, untyped: type checkers do not find all of its documented functions."""
    from huggingface_hub import utils

    return utils


def _read(response: Any, limit: int) -> bytes:
    """The first `limit` bytes of an answer. A server that ignores the range would send the whole file.

    Raises:
        HubUnreachable: the answer takes too long.
    """
    data, until = bytearray(), time.monotonic() + ANSWER_S
    for chunk in response.iter_bytes():
        data += chunk
        if time.monotonic() > until:
            raise too_slow(response.url)
        if len(data) >= limit:
            break
    return bytes(data[:limit])


def _whole_size(response: Any, received: int) -> int:
    """The size of a file: the number after the slash of Content-Range, else Content-Length, else `received`."""
    total = str(response.headers.get("Content-Range", "")).rpartition("/")[2]
    length = str(response.headers.get("Content-Length", ""))
    return next((int(text) for text in (total, length) if SIZE.fullmatch(text)), received)
