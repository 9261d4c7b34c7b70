"""The prefix store: KV pages of prompts kept on disk between runs, one file per page.

A run stores the pages of the prompts it prefilled. A later run loads them as a hand-off with the first rows of a prompt
instead of computing them again. A file is named by the page's digest, which covers the digest of the page before it
and, for the first page, the pair's fingerprint. So the name covers everything that the rows depend on. Files appear
complete or not at all, and any of them may be removed at any time.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import InvalidConfig, InvalidHandoff
from dflash_runtime.kv_transfer.connector import LoadingConnector
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.payload_bytes import checksum
from dflash_runtime.kv_transfer.transfer_outputs import transfer_output
from dflash_runtime.scheduling.prefix_cache import page_digests
from dflash_runtime.scheduling.request import Request, SamplingParams

CHECKSUMS = "crc32"
"""Key in a file's metadata. Its value has the checksum of each tensor, as JSON."""

NUM_THREADS = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A request, and the digests of the first pages of its prompt that are in the store."""

    request: Request
    digests: tuple[str, ...]


class PrefixStore(LoadingConnector):
    """The stored pages of one pair in a folder. As a connector it only loads. `keep` stores pages."""

    name = "prefix-store"
    id_of_refusal = "prefix-store-only-loads"

    def __init__(self, folder: Path, fingerprint: Fingerprint, page_size: int) -> None:
        super().__init__(NUM_THREADS)
        self.folder = folder / fingerprint.digest
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._found: dict[str, StoredPrefix] = {}

    def find(self, key: str, request: Request) -> int:
        """How many rows of a request's prompt are stored: whole pages, without the last token. `load` returns them."""
        digests = self._digests(request, (request.prompt_len - 1) // self._page_size)
        num_found = next((at for at, digest in enumerate(digests) if not self._path(digest).exists()), len(digests))
        self._found[key] = StoredPrefix(request, digests[:num_found])
        return num_found * self._page_size

    def first_missing(self, request: Request) -> tuple[int, int]:
        """The full pages `[first, end)` of a prompt that are not stored."""
        digests = self._digests(request, request.prompt_len // self._page_size)
        first = next((at for at, digest in enumerate(digests) if not self._path(digest).exists()), len(digests))
        return first, len(digests)

    def keep(self, request: Request, first: int, tensors: Mapping[str, Tensor]) -> "Future[None]":
        """Write pages of a prompt from page `first` on, [P, L, 2, page_size, W].

        The future raises CapacityError if a page cannot be written.
        """
        num_pages = len(next(iter(tensors.values())))
        digests = self._digests(request, first + num_pages)[first:]
        return self._pool.submit(self._write_all, digests, tensors)

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`: the stored rows of the prompt that `find` looked up with this key."""
        return self._pool.submit(self._read_all, key, self._found.pop(key))

    def _digests(self, request: Request, num_pages: int) -> tuple[str, ...]:
        salt = bytes.fromhex(self._fingerprint.digest)
        found = page_digests(request, num_pages, self._page_size, salt)
        return tuple(digest.hex() for digest in found[:num_pages])

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def _read_all(self, key: str, prefix: StoredPrefix) -> Handoff:
        """The first pages of a prompt, up to the first page that cannot be read.

        Raises:
            InvalidHandoff: the first page cannot be read.
        """
        pages: list[dict[str, Tensor]] = []
        for digest in prefix.digests:
            page = self._read_page(digest)
            if page is None:
                break
            pages.append(page)
        if not pages:
            raise InvalidHandoff("its pages were removed or damaged", id="no-stored-page", path=self.folder)
        tensors = {name: torch.stack([page[name] for page in pages]) for name in pages[0]}
        return Handoff(
            key=key,
            fingerprint=self._fingerprint.fields,
            prompt_token_ids=prefix.request.prompt_token_ids,
            output_token_ids=(),
            params=SamplingParams(),
            seed=0,
            num_rows=dict.fromkeys(tensors, len(pages) * self._page_size),
            tensors=tensors,
        )

    def _read_page(self, digest: str) -> dict[str, Tensor] | None:
        """The tensors of a page, [L, 2, page_size, W], or None if it is missing or damaged. Removes a damaged page."""
        path = self._path(digest)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                sums = from_json(dict[str, int], json.loads((file.metadata() or {}).get(CHECKSUMS, "{}")))
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError, InvalidConfig) as error:
            _discard(path, str(error))
            return None
        wrong = [name for name, tensor in tensors.items() if sums.get(name) != checksum(tensor)]
        if wrong:
            _discard(path, f"{wrong[0]} is damaged")
        return None if wrong else tensors

    def _write_all(self, digests: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Write the pages that are not stored yet.

        Raises:
            CapacityError: a page cannot be written, for example because the disk is full.
        """
        for index, digest in enumerate(digests):
            path = self._path(digest)
            if not path.exists():
                _write_page(path, {name: tensor[index].contiguous() for name, tensor in tensors.items()})


def _write_page(path: Path, page: dict[str, Tensor]) -> None:
    sums = {name: checksum(tensor) for name, tensor in page.items()}
    with transfer_output(path, "KV page", id="page-not-written") as partial:
        save_file(page, partial, metadata={CHECKSUMS: json.dumps(to_json(sums))})


def _discard(path: Path, reason: str) -> None:
    """Remove an unusable page, so that it is written again."""
    logger.warning("%s: removed from the prefix store: %s", path, reason)
    path.unlink(missing_ok=True)
