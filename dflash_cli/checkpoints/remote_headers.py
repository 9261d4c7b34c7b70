"""A checkpoint on the hub, read by its JSON and safetensors headers alone, a range of bytes at a time.

One request lists the files and names the commit of the revision; after that only `*.json` files that are asked for and
the headers of `*.safetensors` files are fetched. Weights are never downloaded here.
"""

import json
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash_cli.checkpoints.hub import explained
from dflash_runtime.checkpoint.files import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    Checkpoint,
    TensorInfo,
    find_orphans,
    read_header,
)
from dflash_runtime.checkpoint.strict_json import MAX_JSON_BYTES, parse_json
from dflash_runtime.errors import CheckpointError, TensorMismatch, UnsupportedError

FIRST_BYTES = 128 * 1024
"""Bytes of a safetensors file that are fetched first: enough for the header of nearly any draft or target shard."""

MAX_SHARDS = 1000
MAX_LISTING_BYTES = 16_000_000
TIMEOUT_S = 30.0
WORKERS = 8


@dataclass(slots=True)
class Traffic:
    """How much was fetched from the hub, for a line on the screen."""

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
    """A repository at one commit, with the names of its files."""

    repo: str
    commit: str
    files: frozenset[str]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def path(self) -> Path:
        """Stands in messages where a local checkpoint has its directory."""
        return Path(f"{self.repo}@{self.commit[:12]}")

    def fetch(self, name: str, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes [begin, end) of a file, fewer where it is shorter, and the file's whole size.

        Raises:
            CheckpointNotFound: whatever the hub says no with.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, name, revision=self.commit)
        with explained(self.repo, self.commit), _get(url, begin, end) as response:
            data = _read(response, end - begin)
            self.traffic.num_requests += 1
            self.traffic.num_bytes += len(data)
            return data, _whole_size(response, len(data))


class RemoteCheckpoint(Checkpoint):
    """Config and headers of a repository on the hub. Tensors cannot be loaded from it.

    Raises:
        CheckpointError: as `Checkpoint`; CheckpointNotFound: the hub says no.
    """

    def __init__(self, repo: RemoteRepo) -> None:
        self.path = repo.path
        self.repo = repo
        if "config.json" not in repo.files:
            raise CheckpointError("not found, expected a checkpoint's config", path=self.config_path)
        self.config = self._read_json("config.json")
        self._tensors: dict[str, TensorInfo] | None = None

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor, by name, from the headers of every shard."""
        if self._tensors is None:
            self._tensors = self._read_headers()
        return self._tensors

    def load_many(self, names: list[str], device: str = "cpu") -> Iterator[Any]:
        """Refused: only headers were fetched."""
        raise UnsupportedError(f"{self.path}: only headers were read, not the weights of {len(names)} tensors")

    def read_optional_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file beside the config, or None where there is none."""
        return self._read_json(name) if name in self.repo.files else None

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        data, size = self.repo.fetch(name, 0, MAX_JSON_BYTES)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{size} bytes, expected at most {MAX_JSON_BYTES}", path=path)
        return parse_json(data, path)

    def _read_headers(self) -> dict[str, TensorInfo]:
        weight_map = self._weight_map()
        shards = sorted(set(weight_map.values())) if weight_map is not None else self._loose_files()
        if len(shards) > MAX_SHARDS:
            raise CheckpointError(
                f"{len(shards)} shards, expected at most {MAX_SHARDS} to read them one request each",
                path=self.path / INDEX_FILE,
                hint="download the checkpoint and pass its directory",
            )
        with ThreadPoolExecutor(WORKERS) as pool:
            headers = dict(zip(shards, pool.map(self._read_header, shards), strict=True))
        if weight_map is not None:
            missing = [f"{name} (in {shard})" for name, shard in weight_map.items() if name not in headers[shard]]
            orphans = find_orphans(weight_map, headers)
            if missing or orphans:
                raise TensorMismatch(missing=missing, unexpected=orphans, path=self.path / INDEX_FILE)
        return {name: info for header in headers.values() for name, info in header.items()}

    def _weight_map(self) -> dict[str, str] | None:
        """Tensor -> shard from the index, None where there is no index."""
        index = self.read_optional_json(INDEX_FILE)
        if index is None:
            return None
        found = index.get("weight_map")
        path = self.path / INDEX_FILE
        if not isinstance(found, dict) or not found:
            raise CheckpointError("weight_map: missing, expected a map from tensor to file", path=path)
        for shard in found.values():
            if not isinstance(shard, str) or shard not in self.repo.files or "/" in shard:
                raise CheckpointError(f"names {shard!r}, which is not there", path=path)
        return found

    def _loose_files(self) -> list[str]:
        files = sorted(name for name in self.repo.files if name.endswith(".safetensors") and "/" not in name)
        if not files:
            raise CheckpointError("no *.safetensors file, expected the weights beside config.json", path=self.path)
        return [SINGLE_FILE] if SINGLE_FILE in files else files

    def _read_header(self, name: str) -> dict[str, TensorInfo]:
        """Parse the header of one file, through a sparse stand-in of the file's size that holds nothing else."""
        data, size = self.repo.fetch(name, 0, FIRST_BYTES)
        self.repo.traffic.whole_bytes += size
        if len(data) >= 8:
            (length,) = struct.unpack("<Q", data[:8])
            if len(data) < 8 + length <= 8 + MAX_HEADER_BYTES and 8 + length <= size:
                data += self.repo.fetch(name, len(data), 8 + length)[0]
        with tempfile.TemporaryDirectory(prefix="dflash-header-") as directory:
            stand_in = Path(directory) / "header"
            with stand_in.open("wb") as stream:
                stream.write(data)
                stream.truncate(size)
            try:
                infos = read_header(stand_in)
            except CheckpointError as error:
                message = error.message.removeprefix(f"{stand_in}: ")
                raise CheckpointError(message, path=self.path / name, hint=error.hint) from error
        return {key: replace(info, file=self.path / name) for key, info in infos.items()}


def list_repo(reference: str) -> RemoteRepo:
    """List the files of `org/repo[@revision]` at the commit that the revision names.

    Raises:
        CheckpointNotFound: gated, missing, a wrong revision, or nobody answers.
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
    traffic.num_bytes += len(data)
    info = parse_json(data, Path(url))
    siblings = info.get("siblings")
    names = [item.get("rfilename") for item in siblings if isinstance(item, dict)] if isinstance(siblings, list) else []
    commit = info.get("sha")
    if not isinstance(commit, str):
        raise CheckpointError(f"the hub names no commit: {json.dumps(info)[:80]}", path=url)
    return RemoteRepo(repo, commit, frozenset(name for name in names if isinstance(name, str)), traffic)


@contextmanager
def _get(url: str, begin: int | None = None, end: int | None = None) -> Iterator[Any]:
    """A streamed answer, checked; the hub's own client follows redirects and holds the token."""
    utils = _hub_utils()

    headers = dict(utils.build_hf_headers())
    if begin is not None and end is not None:
        # A range is of the bytes as they are stored, so they must not be packed for the way.
        headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        if response.status_code >= 400:
            response.read()
        utils.hf_raise_for_status(response)
        if begin and response.status_code != 206:
            raise CheckpointError("the server does not support requests for a range of bytes", path=url)
        yield response


def _hub_utils() -> Any:
    """huggingface_hub.utils, whose documented functions are not all re-exported by name for a type checker."""
    from huggingface_hub import utils

    return utils


def _read(response: Any, limit: int) -> bytes:
    """The answer, cut at a limit, so that a server that ignores the range cannot send a whole file."""
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) >= limit:
            break
    return bytes(data[:limit])


def _whole_size(response: Any, received: int) -> int:
    """The file's size: after the slash of Content-Range, or all that was sent."""
    total = str(response.headers.get("Content-Range", "")).rpartition("/")[2]
    if total.isdigit():
        return int(total)
    length = str(response.headers.get("Content-Length", ""))
    return int(length) if length.isdigit() else received
