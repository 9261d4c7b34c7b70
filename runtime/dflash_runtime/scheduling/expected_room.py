"""Whether the pool has room for one more request, by how long requests are expected to get. Host only."""

from collections.abc import Sequence

from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.request import Request

FIRST_SHARE = 0.25
"""Share of the tokens it is allowed that a request is expected to use, before any has ended."""

LOWEST_SHARE = 1 / 16

SHARE_WEIGHT = 1 / 8
"""How much of the expected share each request that ends replaces by its own."""


class ExpectedRoom:
    """The pool's pages beside those that requests are expected to need, as learnt from requests that ended.

    Admitting more than that would only lead to preempting, and then to prefilling the same rows again.
    """

    def __init__(self, limits: Limits, pages: PagePool) -> None:
        self.limits = limits
        self.pages = pages
        self.share = FIRST_SHARE
        self._longest = 0  # tokens of the longest text that any live request may become

    def expect(self, request: Request, *, is_alone: bool) -> None:
        """Note a request that came; `is_alone` where no other is live."""
        tokens = request.total_len + request.remaining(self.limits.max_model_len)
        self._longest = max(tokens, 0 if is_alone else self._longest)

    def has_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether the pool has the pages that a waiting request and those that run are expected to need.

        One that runs may need a page at once; later each is as long as it is now and the time that has passed, until it
        ends and frees its pages, so the pool is fullest just before one of them ends.
        """
        size = self.pages.page_size
        needed = self.pages.pages_for(self.limits.reserved_len(request.rows_to_prefill)) - len(request.pages)
        if needed + len(running) > self.pages.num_available:
            return False
        longest = self._longest + self.limits.num_lookahead_tokens + size
        if (len(running) + 1) * longest <= (self.pages.num_pages - 1) * size:
            return True  # for all at their longest, which is quickly said of thousands
        alive = sorted((*running, request), key=self._expected_left, reverse=True)
        freed = sum(len(item.pages) * size - item.num_cached for item in alive)
        grown = fullest = 0  # tokens; the last page of each is half full on average
        for count, item in enumerate(alive, start=1):
            held = len(item.pages) * size
            freed -= held - item.num_cached
            grown += item.total_len + self.limits.num_lookahead_tokens - held
            fullest = max(fullest, grown + count * (self._expected_left(item) + size // 2) - freed)
        return fullest <= self.pages.num_available * size

    def learn(self, request: Request) -> None:
        """Expect of the others what a request that ended by itself has used of the tokens it was allowed."""
        num_used = len(request.output_token_ids)
        share = num_used / (num_used + request.remaining(self.limits.max_model_len))
        self.share += (max(share, LOWEST_SHARE) - self.share) * SHARE_WEIGHT

    def expect_more(self) -> None:
        """Pages were short: requests get longer than was expected."""
        self.share = min(1.0, 2 * self.share)

    def _expected_left(self, request: Request) -> int:
        """Tokens a request is expected to generate yet."""
        return int(self.share * request.remaining(self.limits.max_model_len))
