"""Pages of prompts kept on disk over runs: a file a page, named by the digest of its text and pair.

What a run has prefilled, a later one finds and loads as the beginning of a hand-off, in place of running it again. A
page's digest follows that of the page before it and at first the pair's fingerprint, so that a name says all that the
rows depend on. Files appear whole or not at all; any of them may be removed at any time.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_runtime.errors import CapacityError, InvalidHandoff, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.payload_bytes import checksum
from dflash_runtime.scheduling.prefix_cache import page_digests
from dflash_runtime.scheduling.request import Request, SamplingParams
from dflash_runtime.whole_files import written_whole

CHECKSUMS = "crc32"
"""In a file's metadata: the checksum of each tensor, as JSON."""

NUM_THREADS = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The first pages of a prompt that are in the store."""

    request: Request
    digests: tuple[str, ...]


class PrefixStore:
    """The pages of one pair in a folder. As a connector it only loads; `keep` is its way in."""

    name = "prefix store"
    takes_device = False

    def __init__(self, folder: Path, fingerprint: Fingerprint, page_size: int) -> None:
        self.folder = folder / fingerprint.digest
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefix-store")
        self._found: dict[str, StoredPrefix] = {}

    def find(self, key: str, request: Request) -> int:
        """How many rows of a request's prompt are here, whole pages and never the last token; `load` gives them."""
        digests = self._digests(request, (request.prompt_len - 1) // self._page_size)
        num_found = next((at for at, digest in enumerate(digests) if not self._path(digest).exists()), len(digests))
        self._found[key] = StoredPrefix(request, digests[:num_found])
        return num_found * self._page_size

    def first_missing(self, request: Request) -> tuple[int, int]:
        """The pages `[first, end)` of a prompt that are full and not here."""
        digests = self._digests(request, request.prompt_len // self._page_size)
        first = next((at for at, digest in enumerate(digests) if not self._path(digest).exists()), len(digests))
        return first, len(digests)

    def keep(self, request: Request, first: int, tensors: Mapping[str, Tensor]) -> "Future[None]":
        """Write pages of a prompt from `first` on, [P, L, 2, page_size, W]; a store that cannot grow says so once."""
        num_pages = len(next(iter(tensors.values())))
        digests = self._digests(request, first + num_pages)[first:]
        return self._pool.submit(self._write_all, digests, tensors)

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`: the beginning of the prompt for which `find` was asked under this key."""
        return self._pool.submit(self._read_all, key, self._found.pop(key))

    def save(self, handoff: Handoff) -> "Future[None]":
        """Refused: `keep` is the way in.

        Raises:
            UsageError: always.
        """
        raise UsageError("a prefix store keeps prompts, and nothing is handed off to it")

    def refuse(self, key: str, reason: str) -> None:
        """See `Connector.refuse`; nobody waits here."""

    def is_wanted(self, key: str) -> bool:
        """See `Connector.is_wanted`."""
        return False

    def close(self) -> None:
        """See `Connector.close`; what is being written is written to its end."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _digests(self, request: Request, num_pages: int) -> tuple[str, ...]:
        salt = bytes.fromhex(self._fingerprint.digest)
        found = page_digests(request, num_pages, self._page_size, salt)
        return tuple(digest.hex() for digest in found[:num_pages])

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def _read_all(self, key: str, prefix: StoredPrefix) -> Handoff:
        """As many pages as can be read, from the first on."""
        pages: list[dict[str, Tensor]] = []
        for digest in prefix.digests:
            page = self._read(digest)
            if page is None:
                break
            pages.append(page)
        if not pages:
            raise InvalidHandoff("no page of it is there any more", path=self.folder)
        tensors = {name: torch.stack([page[name] for page in pages]) for name in pages[0]}
        return Handoff(
            key=key,
            fingerprint=self._fingerprint,
            prompt_token_ids=prefix.request.prompt_token_ids,
            output_token_ids=(),
            params=SamplingParams(),
            seed=0,
            num_rows=dict.fromkeys(tensors, len(pages) * self._page_size),
            tensors=tensors,
        )

    def _read(self, digest: str) -> dict[str, Tensor] | None:
        """The tensors of a page, [L, 2, page_size, W]; one that is damaged is removed, and then is not there."""
        path = self._path(digest)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                sums = json.loads((file.metadata() or {}).get(CHECKSUMS, "{}"))
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            _discard(path, str(error))
            return None
        wrong = [name for name, tensor in tensors.items() if sums.get(name) != checksum(tensor)]
        if wrong:
            _discard(path, f"{wrong[0]} is damaged")
        return None if wrong else tensors

    def _write_all(self, digests: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Write pages.

        Raises:
            CapacityError: one cannot be written, as on a full disk.
        """
        for index, digest in enumerate(digests):
            path = self._path(digest)
            if not path.exists():
                self._write(path, {name: tensor[index].contiguous() for name, tensor in tensors.items()})

    def _write(self, path: Path, page: dict[str, Tensor]) -> None:
        sums = {name: checksum(tensor) for name, tensor in page.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as partial:
                save_file(page, partial, metadata={CHECKSUMS: json.dumps(sums)})
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CapacityError(f"{path}: prompt not kept: {reason}") from error


def _discard(path: Path, reason: str) -> None:
    """Remove a page that nobody can use, so that it is written anew."""
    logger.warning("%s: removed from the prefix store: %s", path, reason)
    path.unlink(missing_ok=True)
