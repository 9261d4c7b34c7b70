"""The pool of KV pages: pages that requests hold, and pages kept for the prefix cache. Knows page numbers only.

A page is in exactly one of three states:

    free      no request holds it, and its content is not needed
    held      `references > 0`, published or not
    idle      published and held by no request; reused when no page is free, longest idle first

Page 0 is never handed out, so 0 means "no page" in a page table.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash_runtime.errors import CapacityError


@dataclass(slots=True)
class SharedRun:
    """The published pages of a text's beginning, with one reference to each page for all requests that share them."""

    pages: tuple[int, ...]
    num_holders: int = 1


class PagePool:
    """Pages 1 to num_pages - 1 of `page_size` tokens each. `on_evict` is called with an idle page before its reuse.

    `num_freed` counts the releases of pages that nobody holds any more.

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
        self.num_freed = 0
        self.clear()

    def clear(self) -> None:
        """Make every page free, held or not."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        # In the order they became idle. Popping the first item of a plain dict walks over every item popped before.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * self.num_pages
        self._published: set[int] = set()
        self._runs: dict[int, SharedRun] = {}  # by their last page
        self.num_freed += 1

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
        free = self._free
        if num_pages > len(free) + len(self._idle):
            return None
        pages = free[: -num_pages - 1 : -1]
        del free[len(free) - len(pages) :]
        pages += [self._evict() for _ in range(num_pages - len(pages))]
        for page in pages:
            self._references[page] = 1
        return pages

    def run_ending_with(self, page: int | None) -> tuple[int, ...]:
        """The shared pages of a text's beginning that end with this page; empty if no request shares them."""
        run = None if page is None else self._runs.get(page)
        return () if run is None else run.pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold the published pages of a text's beginning. Further requests with the same pages cost nothing per page.

        A published page belongs to one text, and its page stays the same while it is held. So the last page of a run
        tells all its pages.
        """
        run = self._runs.get(pages[-1]) if pages else None
        if run is not None:
            assert len(run.pages) == len(pages)
            run.num_holders += 1
        elif pages:
            self._runs[pages[-1]] = SharedRun(tuple(pages))
            for page in pages:
                assert page in self._published
                self._idle.pop(page, None)
                self._references[page] += 1

    def publish(self, page: int) -> None:
        """Mark a held page's content as final."""
        assert self._references[page] > 0
        self._published.add(page)

    def release(self, pages: Sequence[int], num_shared: int = 0) -> None:
        """Give pages back, last first, so that the end of a cached text is evicted before its beginning.

        The first `num_shared` of them were held by `share`.
        """
        self._drop(pages[num_shared:] if num_shared else pages)
        if num_shared:
            run = self._runs[pages[num_shared - 1]]
            run.num_holders -= 1
            if not run.num_holders:
                del self._runs[run.pages[-1]]
                self._drop(run.pages)

    def _drop(self, pages: Sequence[int]) -> None:
        """Remove a reference of each page."""
        for page in reversed(pages):
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page] == 0:
                self.num_freed += 1
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
        found = list(self._references)
        for run in self._runs.values():
            for page in run.pages:
                found[page] += run.num_holders - 1
        assert found == expected, "references do not match the requests"
        free, idle = set(self._free), set(self._idle)
        busy = {page for page in range(self.num_pages) if expected[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(idle) + len(busy) == len(free | idle | busy), "a page is in two states"
        assert free | idle | busy == set(range(1, self.num_pages)), "a page has no state, or page 0 has one"
        assert idle <= self._published, "an idle page is not published"
        assert not free & self._published, "a free page is published"
        unshared = {page for page in busy if expected[page] > 1 and page not in self._published}
        assert not unshared, "an unpublished page is held twice"

    def _evict(self) -> int:
        """Take the page that has been idle longest."""
        page, _ = self._idle.popitem(last=False)
        self._published.discard(page)
        if self.on_evict is not None:
            self.on_evict(page)
        return page
