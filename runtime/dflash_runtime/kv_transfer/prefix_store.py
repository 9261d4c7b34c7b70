"""The prefix store: KV pages of prompts kept on disk between runs, one file per page.

A run stores the pages of the prompts it prefilled. A later run loads them as a hand-off with the first rows of a prompt
instead of computing them again. A page's digest covers its tokens and the digest of the page before it. So equal
digests mean equal texts. The folder of a pair is named by its fingerprint; `stored_pages.py` has the files.

Writing never delays a step. Pages that wait to be written take at most `UNDER_WAY_BYTES` of host memory. If the
bytes are used up, more pages wait as long as their requests hold them. The store skips pages that are freed earlier.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from dflash_runtime.errors import InvalidHandoff
from dflash_runtime.kv_transfer.connector import LoadingConnector
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import Handoff, TensorSpec
from dflash_runtime.kv_transfer.stored_pages import StoredPages
from dflash_runtime.scheduling.prefix_cache import page_digest
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams

NUM_THREADS = 4

UNDER_WAY_BYTES = 2**29
"""The most bytes of pages that wait to be written."""

PORTION_BYTES = 2**26
"""The most bytes of one request that are copied at a time, rounded to whole pages."""


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A request, and the digests of the first pages of its prompt that are in the store."""

    request: Request
    digests: tuple[str, ...]


class PrefixStore(LoadingConnector):
    """The stored pages of one pair in a folder. As a connector it only loads. `keep` stores pages.

    `find_fingerprint` may take seconds, because it waits for the digests of the weights. Lookups belong to a call:
    `begin_call` forgets earlier ones.
    """

    name = "prefix-store"
    id_of_refusal = "prefix-store-only-loads"

    def __init__(
        self,
        folder: Path,
        find_fingerprint: Callable[[], Fingerprint],
        page_size: int,
        specs: Mapping[str, TensorSpec],
        max_bytes: int,
    ) -> None:
        super().__init__(NUM_THREADS)
        self._folder = folder
        self._find_fingerprint = find_fingerprint
        self._page_size = page_size
        self._specs = specs
        self._max_bytes = max_bytes
        self._page_bytes = sum(spec.num_bytes for spec in specs.values())
        self._found: dict[str, StoredPrefix] = {}
        self._numbers = count()
        self._num_waiting = 0  # pages to be written
        self._lock = threading.Lock()
        self._tidying = threading.Lock()

    def begin_call(self, num_prompts: int) -> tuple[str, ...]:
        """Prepare the lookups of a call -> its keys. The first call waits for the fingerprint and lists the folder."""
        self._found = {}
        self._pages.list_files()
        return tuple(str(next(self._numbers)) for _ in range(num_prompts))

    def find(self, key: str, request: Request) -> int:
        """How many rows of a request's prompt are stored: whole pages, without the last token. `load` returns them."""
        most = (request.prompt_len - 1) // self._page_size
        num_found = next((at for at in range(most) if self._digest(request, at) not in self._pages), most)
        self._found[key] = StoredPrefix(request, tuple(self._digest(request, at) for at in range(num_found)))
        return num_found * self._page_size

    def first_missing(self, request: Request) -> tuple[int, int]:
        """The full pages `[first, end)` of a prompt that are not stored."""
        end = request.prompt_len // self._page_size
        return next((at for at in range(end) if self._digest(request, at) not in self._pages), end), end

    def room(self, num_copied: int) -> int:
        """How many pages may be copied for `keep` now, while `num_copied` pages are copied. At least 1 if idle."""
        num_under_way = self._num_waiting + num_copied
        most = min(PORTION_BYTES, UNDER_WAY_BYTES - num_under_way * self._page_bytes)
        return max(most // self._page_bytes, int(not num_under_way))

    def keep(self, request: Request, first: int, tensors: Mapping[str, Tensor]) -> "Future[None]":
        """Write pages of a prompt from page `first` on, [P, L, 2, page_size, W].

        The future raises CapacityError if a page cannot be written.
        """
        num_pages = len(next(iter(tensors.values())))
        digests = tuple(self._digest(request, first + at) for at in range(num_pages))
        self._wait_for(num_pages)
        future = self._pool.submit(self._write_all, digests, first, tensors)
        future.add_done_callback(lambda _: self._wait_for(-num_pages))
        return future

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`: the stored rows of the prompt that `find` looked up with this key."""
        return self._pool.submit(self._read_all, key, self._found.pop(key))

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        return self._find_fingerprint()

    @cached_property
    def _pages(self) -> StoredPages:
        pages = StoredPages(self._folder, self._fingerprint.digest, self._specs, self._max_bytes)
        threading.Thread(target=pages.tidy, name="prefix-store", daemon=True).start()  # slow on a network disk
        return pages

    def _digest(self, request: Request, column: int) -> str:
        return page_digest(request, column, self._page_size).hex()

    def _wait_for(self, num_pages: int) -> None:
        with self._lock:
            self._num_waiting += num_pages

    def _read_all(self, key: str, prefix: StoredPrefix) -> Handoff:
        """The first pages of a prompt, up to the first page that cannot be read.

        Raises:
            InvalidHandoff: the first page cannot be read.
        """
        pages: list[dict[str, Tensor]] = []
        for digest in prefix.digests:
            page = self._pages.read(digest)
            if page is None:
                break
            pages.append(page)
        if not pages:
            raise InvalidHandoff("its pages were removed or damaged", id="no-stored-page", path=self._pages.folder)
        self._pages.mark_used(prefix.digests[: len(pages)])
        tensors = {name: torch.stack([page[name] for page in pages]) for name in self._specs}
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

    def _write_all(self, digests: tuple[str, ...], first: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a text's pages from number `first` on, unless they are stored.

        Raises:
            CapacityError: a page cannot be written, for example because the disk is full.
        """
        for index, digest in enumerate(digests):
            self._pages.write(digest, {name: tensor[index] for name, tensor in tensors.items()})
        self._pages.mark_used(digests, first)
        while self._pages.is_untidy and self._tidying.acquire(blocking=False):
            try:
                self._pages.tidy()
            finally:
                self._tidying.release()
