"""The files of a prefix store: one per KV page, in a folder per pair, named by the page's digest.

A page's metadata names the page, the pair's fingerprint and the checksum of each tensor. A file that does not fit its
name, its pair or its checksums is removed. Files appear complete or not at all, and any of them may be removed at any
time. The folder is listed once, so a lookup does not ask the disk; a listed page that is gone counts as missing.

All pairs of a store share one limit. When pages exceed it, the pages that were used least recently are removed, of a
text its last page first.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.payload_bytes import checksum
from dflash_runtime.kv_transfer.transfer_outputs import transfer_output

METADATA = "page"
"""Key in a file's metadata. Its value is a `PageFacts`, as JSON."""

SUFFIX = ".safetensors"
PAIR = re.compile(r"[0-9a-f]{32}")
PAGE = re.compile(r"[0-9a-f]{32}\.safetensors")
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.safetensors\.(tmp|old)-[0-9a-f]+")
"""Names of a store's folders and files. Nothing else in the folder is counted or removed."""

PARTIAL_SECONDS = 2.0
"""A partial file that nobody wrote to for this long belongs to a process that was killed. A process that lives fails to
store this page."""

LIST_SECONDS = 60.0
"""Time after which a call lists the folder again, for the pages that other processes have stored."""

COUNT_SHARE = 16
"""The sizes of all pages are counted again after this process has written 1/COUNT_SHARE of the limit."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageFacts:
    """The facts that bind a file to its name and its pair: digests of the page and the fingerprint, checksums."""

    digest: str
    fingerprint: str
    crc32: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page on disk, of any pair of the store."""

    path: Path
    size: int
    used_ns: int


class StoredPages:
    """The stored pages of one pair. `specs` are the tensors of a page. `max_bytes` limits the pages of all pairs."""

    def __init__(self, root: Path, fingerprint: str, specs: Mapping[str, TensorSpec], max_bytes: int) -> None:
        self.root = root
        self.folder = root / fingerprint
        self._fingerprint = fingerprint
        self._specs = specs
        self._max_bytes = max_bytes
        self._known: set[str] = set()
        self._listed_at = -LIST_SECONDS
        self._num_bytes = 0  # of all pages, when they were counted
        self._num_written = 0  # bytes since then
        self._lock = threading.Lock()

    def __contains__(self, digest: str) -> bool:
        """Whether a page was listed or written, and not removed by this process."""
        return digest in self._known

    def list_files(self) -> None:
        """List the folder, if that was long ago."""
        if time.monotonic() - self._listed_at >= LIST_SECONDS:
            self._listed_at = time.monotonic()
            self._known |= {name.removesuffix(SUFFIX) for name in _names(self.folder) if PAGE.fullmatch(name)}

    def read(self, digest: str) -> dict[str, Tensor] | None:
        """The tensors of a page, [L, 2, page_size, W], or None if it is missing. Removes a file that does not fit."""
        path = self._path(digest)
        if not path.is_file():
            self._known.discard(digest)
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts = from_json(PageFacts, loads((file.metadata() or {}).get(METADATA, "{}")))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            problem = self._problem(digest, facts, tensors)
        except (SafetensorError, RuntimeError, OSError, ValueError, InvalidConfig) as error:
            problem = str(error)
        if problem is None:
            return tensors
        logger.warning("%s: removed from the prefix store: %s", path, problem)
        self._remove(path)
        return None

    def write(self, digest: str, page: Mapping[str, Tensor]) -> None:
        """Store a page, unless it is stored.

        Raises:
            CapacityError: it cannot be written, for example because the disk is full.
        """
        path = self._path(digest)
        if not path.is_file():
            tensors = {name: tensor.contiguous() for name, tensor in page.items()}
            facts = PageFacts(digest, self._fingerprint, {name: checksum(item) for name, item in tensors.items()})
            with transfer_output(path, "KV page", id="page-not-written") as partial:
                save_file(tensors, partial, metadata={METADATA: json.dumps(to_json(facts))})
            with self._lock:
                self._num_written += sum(tensor.nbytes for tensor in tensors.values())
        self._known.add(digest)

    def mark_used(self, digests: Sequence[str], first: int = 0) -> None:
        """Note that a text's pages from number `first` on were used now. Later pages count as older, by 1 ms each."""
        now_ns = time.time_ns()
        for column, digest in enumerate(digests, start=first):
            with suppress(OSError):
                os.utime(self._path(digest), ns=(now_ns - column * 10**6,) * 2)

    def tidy(self) -> None:
        """Remove partial files of killed processes, and pages beyond the limit. Reads the sizes of all pages."""
        num_written = self._num_written
        files = sorted(self._page_files(), key=lambda file: file.used_ns)
        total, most = sum(file.size for file in files), self._max_bytes
        if total > most:
            for file in files:
                if total <= most - most // COUNT_SHARE:
                    break
                self._remove(file.path)
                total -= file.size
        with self._lock:
            self._num_bytes, self._num_written = total, self._num_written - num_written

    @property
    def is_untidy(self) -> bool:
        """Whether pages may exceed the limit, so that `tidy` should run."""
        has_news = self._num_written > self._max_bytes // COUNT_SHARE
        return has_news or self._num_bytes + self._num_written > self._max_bytes

    def _problem(self, digest: str, facts: PageFacts, tensors: Mapping[str, Tensor]) -> str | None:
        """Why a file is not this page of this pair. None if it is."""
        if (facts.digest, facts.fingerprint) != (digest, self._fingerprint):
            return "it is another page"
        if tensors.keys() != self._specs.keys():
            return f"it has the tensors {', '.join(sorted(tensors)) or 'of no model'}"
        for name, tensor in tensors.items():
            spec = self._specs[name]
            if (tensor.dtype, tuple(tensor.shape)) != (spec.torch_dtype, spec.shape):
                return f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec.torch_dtype} {list(spec.shape)}"
            if facts.crc32.get(name) != checksum(tensor):
                return f"{name} is damaged"
        return None

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}{SUFFIX}"

    def _remove(self, path: Path) -> None:
        if path.parent == self.folder:
            self._known.discard(path.name.removesuffix(SUFFIX))
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # only if it is empty

    def _page_files(self) -> Iterator[PageFile]:
        """The pages of all pairs. Removes partial files on the way."""
        folders = [self.root / name for name in _names(self.root) if PAIR.fullmatch(name)]
        folders += [folder / name for folder in folders for name in _names(folder) if re.fullmatch("[0-9a-f]{2}", name)]
        for folder in folders:
            for name in _names(folder):
                path = folder / name
                with suppress(OSError):
                    if PAGE.fullmatch(name):
                        stat = path.stat()
                        yield PageFile(path, stat.st_size, stat.st_mtime_ns)
                    elif PARTIAL.fullmatch(name) and time.time() - path.stat().st_mtime > PARTIAL_SECONDS:
                        path.unlink()


def _names(folder: Path) -> Iterable[str]:
    """The names in a folder; none if it cannot be read."""
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return ()
