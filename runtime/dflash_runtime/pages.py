"""The pool of KV pages. Knows page numbers only; page 0 is never given out, so that 0 can mean "none"."""

from dflash_runtime.errors import CapacityError


class PagePool:
    """Pages 1 .. num_pages - 1 of `page_size` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise CapacityError(f"{num_pages} KV pages, expected at least 2 (page 0 is never used)")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether an empty pool would be enough."""
        return self.pages_for(num_tokens) < self.num_pages

    def can_allocate(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= self.num_free

    def allocate(self, num_tokens: int) -> list[int]:
        """Take the pages for `num_tokens` tokens; the caller has asked `can_allocate`."""
        assert self.can_allocate(num_tokens)
        return [self._free.pop() for _ in range(self.pages_for(num_tokens))]

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        assert not set(pages) & set(self._free)
        self._free += pages
