"""Full pages of committed tokens, found again by what they hold.

A page's digest covers its tokens and the digest of the page before it, so that equal digests mean equal texts from the
first token on. Target KV and draft context KV share page numbers, so a hit brings both; nothing is recomputed. At most
`len(tokens) - 1` tokens are matched: the last one is always run, which gives the first draft a fresh anchor.
"""

import hashlib
from array import array
from collections.abc import Sequence

from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.request import Request

ROOT = b""


class PrefixCache:
    """Digest -> page. With `is_enabled` false nothing is ever found or published."""

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
        """Give a request the longest run of cached pages its tokens begin with."""
        if not self.is_enabled:
            return
        size = self._pool.page_size
        tokens = request.token_ids
        digest = ROOT
        for start in range(0, len(tokens) - size, size):
            digest = page_digest(digest, tokens[start : start + size])
            page = self._pages.get(digest)
            if page is None:
                break
            request.pages.append(page)
            request.page_digests.append(digest)
        self._pool.share(request.pages)
        request.prefilled_len = len(request.pages) * size

    def publish(self, request: Request, num_tokens: int) -> None:
        """Enter a request's full pages below `num_tokens` rows of true KV.

        A page whose text is in the cache already stays the request's own: published pages are never replaced.
        """
        if not self.is_enabled:
            return
        size = self._pool.page_size
        tokens = request.token_ids
        for column in range(len(request.page_digests), num_tokens // size):
            before = request.page_digests[-1] if request.page_digests else ROOT
            digest = page_digest(before, tokens[column * size : (column + 1) * size])
            request.page_digests.append(digest)
            if digest not in self._pages:
                page = request.pages[column]
                self._pool.publish(page)
                self._pages[digest] = page
                self._digests[page] = digest

    def check_integrity(self) -> None:
        """Assert that both maps agree and name published pages only."""
        assert {page: digest for digest, page in self._pages.items()} == self._digests
        assert all(self._pool.is_published(page) for page in self._digests)

    def _forget(self, page: int) -> None:
        digest = self._digests.pop(page)
        del self._pages[digest]


def page_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a page from its tokens and the digest of the page before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=before, digest_size=16).digest()
