"""The prefix cache: full KV pages of committed tokens, found by their tokens.

A page's digest covers its tokens and the digest of the page before it. So equal digests mean equal texts from the first
token on. Target KV and draft context KV share page numbers, so a hit brings both and nothing is recomputed. At most
`len(tokens) - 1` tokens are matched, because the last token must run: its logits give the first anchor.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.request import Request


class PrefixCache:
    """The pages of one pair by digest. With `is_enabled` false it finds and publishes nothing."""

    def __init__(self, pool: PagePool, *, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Forget every page."""
        self._pages.clear()
        self._digests.clear()

    def match(self, request: Request) -> None:
        """Give a request the cached pages of the longest prefix of its tokens."""
        if not self._is_open_to(request):
            return
        size = self._pool.page_size
        for column in range((request.total_len - 1) // size):
            page = self._pages.get(self._digest(request, column))
            if page is None:
                break
            request.pages.append(page)
        self._pool.share(request.pages)
        request.num_published = len(request.pages)
        request.prefilled_len = request.num_published * size

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish the full pages within a request's first `num_tokens` rows of true KV.

        If the cache already has a page with the same text, the request's own page stays unpublished: published pages
        are never replaced.
        """
        if not self._is_open_to(request):
            return
        num_full = num_tokens // self._pool.page_size
        for column in range(request.num_published, num_full):
            digest = self._digest(request, column)
            if digest not in self._pages:
                page = request.pages[column]
                self._pool.publish(page)
                self._pages[digest] = page
                self._digests[page] = digest
        request.num_published = max(request.num_published, num_full)

    def will_publish(self, running: Iterable[Request], waiting: Request, num_tokens: int) -> bool:
        """Whether a running request will soon publish `num_tokens` more tokens of this prefix than the cache holds."""
        size = self._pool.page_size
        column = waiting.num_published + max(1, num_tokens // size) - 1
        if not self._is_open_to(waiting) or (column + 1) * size >= waiting.total_len:
            return False
        able = (
            item
            for item in running
            if item.num_published <= column < item.prefill_len // size and not (item.is_loading or item.is_private)
        )
        return any(self._digest(item, column) == self._digest(waiting, column) for item in able)

    def check_integrity(self) -> None:
        """Assert that both maps agree and name published pages only."""
        assert {page: digest for digest, page in self._pages.items()} == self._digests
        assert all(self._pool.is_published(page) for page in self._digests)

    def _is_open_to(self, request: Request) -> bool:
        return self.is_enabled and not request.is_private

    def _digest(self, request: Request, column: int) -> bytes:
        return page_digests(request, column + 1, self._pool.page_size)[column]

    def _forget(self, page: int) -> None:
        digest = self._digests.pop(page)
        del self._pages[digest]


def page_digests(request: Request, num_pages: int, page_size: int) -> list[bytes]:
    """Digests of a request's pages, at least of the first `num_pages`. A text only grows, so each is computed once."""
    digests = request.page_digests
    for start in range(len(digests) * page_size, num_pages * page_size, page_size):
        digests.append(page_digest(digests[-1] if digests else b"", request.token_slice(start, start + page_size)))
    return digests


def page_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a page, 16 bytes, from its tokens and the digest of the page before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=before, digest_size=16).digest()
