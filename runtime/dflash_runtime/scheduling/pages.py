"""The pool of KV pages: which ones requests hold, and which are kept for their content. Knows page numbers only.

A page is in exactly one place:

    free      held by no request, and its content is not wanted
    held      `references > 0`; published or not
    idle      published, held by nobody; handed out again when the free ones run out, longest idle first

Page 0 is never given out, so that 0 can mean "none" in a page table.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from dflash_runtime.errors import CapacityError


class PagePool:
    """Pages 1 .. num_pages - 1 of `page_size` tokens each. `on_evict` hears of an idle page that is reused."""

    def __init__(self, num_pages: int, page_size: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_pages < 2:
            raise CapacityError(f"{num_pages} KV pages, expected at least 2 (page 0 is never used)")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict = on_evict
        self.clear()

    def clear(self) -> None:
        """Make every page free, whoever holds it and whatever it holds."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        # In the order they became idle. A plain dict would be walked past all that was ever taken from its front.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * self.num_pages
        self._published: set[int] = set()

    @property
    def num_available(self) -> int:
        """Pages that can be allocated without preempting a request."""
        return len(self._free) + len(self._idle)

    def is_published(self, page: int) -> bool:
        """Whether a page's content is final and may be shared."""
        return page in self._published

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take pages, or None where there are not enough; then nothing is taken."""
        if num_pages > self.num_available:
            return None
        return [self._take() for _ in range(num_pages)]

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to published pages."""
        for page in pages:
            assert page in self._published
            self._idle.pop(page, None)
            self._references[page] += 1

    def publish(self, page: int) -> None:
        """Mark a held page's content as final."""
        assert self._references[page] > 0
        self._published.add(page)

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back, last first, so that of a cached text the end is evicted before the beginning."""
        for page in reversed(pages):
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._published:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that every page is in one place and that references are those of `held`, a page list a request."""
        expected = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), "a request holds a page twice"
            for page in pages:
                expected[page] += 1
        assert self._references == expected, "references do not match the requests"
        free, idle = set(self._free), set(self._idle)
        busy = {page for page in range(self.num_pages) if expected[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(idle) + len(busy) == len(free | idle | busy), "a page is in two places"
        assert free | idle | busy == set(range(1, self.num_pages)), "a page is nowhere, or page 0 is somewhere"
        assert idle <= self._published, "an idle page is not published"
        assert not free & self._published, "a free page is published"
        unshared = {page for page in busy if expected[page] > 1 and page not in self._published}
        assert not unshared, "an unpublished page is held twice"

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._published.discard(page)
            if self.on_evict is not None:
                self.on_evict(page)
        self._references[page] = 1
        return page
