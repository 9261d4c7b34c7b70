"""The pool of KV pages: pages that requests hold, and pages kept for the prefix cache. Knows page numbers only.

A page is in exactly one of three states:

    free      no request holds it, and its content is not needed
    held      `references > 0`, published or not
    idle      published and held by no request; reused when no page is free, longest idle first

Page 0 is never handed out, so 0 means "no page" in a page table.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from dflash_runtime.errors import CapacityError


class PagePool:
    """Pages 1 to num_pages - 1 of `page_size` tokens each. `on_evict` is called with an idle page before its reuse.

    Raises:
        CapacityError: fewer than two pages.
    """

    def __init__(self, num_pages: int, page_size: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_pages < 2:
            raise CapacityError(
                id="too-few-kv-pages", field="num_pages", found=num_pages, expected="at least 2 (page 0 is not used)"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict = on_evict
        self.clear()

    def clear(self) -> None:
        """Make every page free, held or not."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        # In the order they became idle. Popping the first item of a plain dict walks over every item popped before.
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
        """Take pages, or take none and return None when there are not enough."""
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
        """Give pages back, last first, so that the end of a cached text is evicted before its beginning."""
        for page in reversed(pages):
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._published:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that every page is in one state, and that references match `held`, the page lists of all requests."""
        expected = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), "a request holds a page twice"
            for page in pages:
                expected[page] += 1
        assert self._references == expected, "references do not match the requests"
        free, idle = set(self._free), set(self._idle)
        busy = {page for page in range(self.num_pages) if expected[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(idle) + len(busy) == len(free | idle | busy), "a page is in two states"
        assert free | idle | busy == set(range(1, self.num_pages)), "a page has no state, or page 0 has one"
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
