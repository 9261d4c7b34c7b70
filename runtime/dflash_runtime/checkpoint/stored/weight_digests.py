"""The digest of a model's weights. It covers the name, dtype, shape and every byte of each tensor.

Files are read in parallel, in threads of their own, and the digests of their tensors are remembered in the user's cache
folder. A file counts as the same while its path, size, inode and both its times in nanoseconds stay the same. The
digest does not depend on how files hold the tensors. Stored KV pages name it, so its values never change. Needs no
torch.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.strict_json import loads, read_bytes
from dflash_runtime.documents import from_json
from dflash_runtime.errors import CheckpointError, DFlashError, unreadable
from dflash_runtime.read_files import reading
from dflash_runtime.whole_files import written_whole

CHUNK_BYTES = 8 * 2**20
"""A tensor is hashed in chunks of this size, so that several threads share a large tensor."""

MAX_THREADS = 16

SETTLED_NS = 2 * 10**9
"""A file that changed less than this long before it was read is not remembered: its times may not show a change."""

MAX_REMEMBERED = 512
"""The most files whose digests are remembered. The digests of one file take about 100 bytes per tensor."""

Range = tuple[int, int]
"""Bytes [begin, end) of a file."""

RANGE, DIGEST = re.compile(r"([0-9]{1,19})-([0-9]{1,19})"), re.compile(r"[0-9a-f]{32}")
"""The forms of remembered ranges and digests. Other entries are ignored."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The facts by which a file is recognised. Any write changes `ctime_ns`."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> "FileIdentity":
        """The identity of a file, after following links.

        Raises:
            OSError: the file cannot be read.
        """
        path = file.resolve()
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class WeightDigest:
    """The digest of the named tensors of a checkpoint, by default of all. It is computed once, when first needed.

    `begin` computes it in the background. The files must stay as they were when this object was made.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
        tensors = checkpoint.tensors
        self._tensors = {name: tensors[name] for name in (tensors if names is None else names)}
        self._files = {file: _identify(file) for file in {info.file for info in self._tensors.values()}}
        self._future: Future[str] | None = None
        self._lock = threading.Lock()

    def begin(self) -> "Future[str]":
        """Begin to compute the digest, unless it has begun before."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                threading.Thread(target=self._fill, args=(self._future,), name="weight-digest", daemon=True).start()
            return self._future

    @property
    def value(self) -> str:
        """32 digits. Waits until they are computed.

        Raises:
            CheckpointError: a file has changed since this object was made.
            FileUnreadable, CapacityError: a file cannot be read.
        """
        return self.begin().result()

    def _fill(self, future: "Future[str]") -> None:
        try:
            future.set_result(self._compute())
        except BaseException as error:
            future.set_exception(error)

    def _compute(self) -> str:
        found = {file: self._digests_of(file) for file in self._files}
        hashed = hashlib.sha256()
        for name, info in sorted(self._tensors.items()):
            facts = [name, info.dtype, list(info.shape), found[info.file][info.begin, info.end]]
            hashed.update(json.dumps(facts).encode())
        return hashed.hexdigest()[:32]

    def _digests_of(self, file: Path) -> Mapping[Range, str]:
        """The digests of a file's tensors: remembered ones if the file is the same, otherwise new ones."""
        identity = self._files[file]
        known = dict(recall(identity))
        missing = {(info.begin, info.end) for info in self._tensors.values() if info.file == file} - known.keys()
        if missing:
            began_ns = time.time_ns()
            known |= hash_ranges(file, sorted(missing))
            is_settled = began_ns - max(identity.mtime_ns, identity.ctime_ns) > SETTLED_NS
            if is_settled and _identify(file) == identity:
                remember(identity, known)
        if _identify(file) != identity:
            raise CheckpointError(
                "the file changed after it was opened", id="weights-changed", path=file, hint="load the pair again"
            )
        return known


def hash_ranges(file: Path, ranges: Sequence[Range]) -> dict[Range, str]:
    """The digest of each range of a file: the SHA-256 of the SHA-256s of its chunks. Reads in parallel.

    Raises:
        CheckpointError: the file ends early.
        FileUnreadable, CapacityError: it cannot be read.
    """
    jobs = list(_jobs(ranges))
    parts: dict[tuple[Range, int], bytes] = {}
    errors: list[BaseException] = []
    pending, lock = iter(jobs), threading.Lock()

    def work() -> None:
        try:
            with reading(file) as stream:
                room = memoryview(bytearray(CHUNK_BYTES))
                while True:
                    with lock:
                        job = None if errors else next(pending, None)
                    if job is None:
                        return
                    for whole, begin in job:
                        stream.seek(begin)
                        parts[whole, begin] = _hash_chunk(stream, room[: min(CHUNK_BYTES, whole[1] - begin)], file)
        except BaseException as error:
            errors.append(error)

    num_threads = min(MAX_THREADS, os.cpu_count() or 1, len(jobs))
    threads = [threading.Thread(target=work, name="weight-digest", daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {
        whole: hashlib.sha256(b"".join(parts[whole, begin] for begin in _chunks(whole))).hexdigest()[:32]
        for whole in ranges
    }


def _jobs(ranges: Sequence[Range]) -> Iterator[list[tuple[Range, int]]]:
    """Chunks in lists of about `CHUNK_BYTES` together, each chunk as its range and its begin."""
    job: list[tuple[Range, int]] = []
    size = 0
    for whole in ranges:
        for begin in _chunks(whole):
            job.append((whole, begin))
            size += min(CHUNK_BYTES, whole[1] - begin)
            if size >= CHUNK_BYTES:
                yield job
                job, size = [], 0
    if job:
        yield job


def _chunks(whole: Range) -> range:
    return range(whole[0], whole[1], CHUNK_BYTES)


def _hash_chunk(stream: Any, room: memoryview, file: Path) -> bytes:
    filled = 0
    while filled < len(room):
        count = stream.readinto(room[filled:])
        if not count:
            raise CheckpointError("the file ends early", id="source-shrank", path=file)
        filled += count
    return hashlib.sha256(room).digest()


def _identify(file: Path) -> FileIdentity:
    try:
        return FileIdentity.of(file)
    except OSError as error:
        raise unreadable(file, error) from error


def memory_folder() -> Path:
    """The folder with the remembered digests."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash" / "digests"


def _memory_file(identity: FileIdentity) -> Path:
    key = hashlib.sha256(json.dumps([*astuple(identity), CHUNK_BYTES]).encode()).hexdigest()[:32]
    return memory_folder() / f"{key}.json"


def recall(identity: FileIdentity) -> Mapping[Range, str]:
    """The remembered digests of a file's ranges. Empty if none are known."""
    try:
        file = _memory_file(identity)
        entries = from_json(dict[str, str], loads(read_bytes(file)))
        found = [(RANGE.fullmatch(key), DIGEST.fullmatch(digest)) for key, digest in entries.items()]
        return {
            (int(key[1]), int(key[2])): digest[0] for key, digest in found if key is not None and digest is not None
        }
    except (OSError, ValueError, RuntimeError, DFlashError):  # RuntimeError: without a home folder
        return {}


def remember(identity: FileIdentity, digests: Mapping[Range, str]) -> None:
    """Remember the digests of a file's ranges, if the cache folder can be written."""
    with suppress(OSError, RuntimeError):
        file = _memory_file(identity)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_whole(file) as partial:
            partial.write_text(json.dumps({f"{begin}-{end}": digest for (begin, end), digest in digests.items()}))
        files = sorted(file.parent.iterdir(), key=lambda item: item.stat().st_mtime_ns)
        for old in files[:-MAX_REMEMBERED]:
            old.unlink(missing_ok=True)
