"""Predict from the expected lengths of requests whether the pool has room for one more. Host only."""

from collections.abc import Sequence

from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.request import Request

FIRST_SHARE = 0.25
"""The first estimate of the share of its allowed tokens that a request uses, before any request has ended."""

LOWEST_SHARE = 1 / 16

SHARE_WEIGHT = 1 / 8
"""Weight of the request that ended last. The expected share is an exponential moving average."""


class ExpectedRoom:
    """Predicts whether the pool can hold one more request, learning from requests that ended.

    Admitting too many requests leads to preemption, and then to prefilling the same rows again.
    """

    def __init__(self, limits: Limits, pages: PagePool) -> None:
        self.limits = limits
        self.pages = pages
        self.share = FIRST_SHARE
        self._slack = limits.num_lookahead_tokens + pages.page_size
        self._longest = 0  # tokens that the longest live request may reach
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what `has_room` has computed about running requests. Until the next call they only get more."""
        self._num_counted = 0
        self._growth = 0  # pages that the counted requests get if each reaches its limit

    def expect(self, request: Request, *, is_alone: bool) -> None:
        """Take a new request into account. `is_alone` means that no other request is live."""
        tokens = request.total_len + request.remaining(self.limits.max_model_len)
        self._longest = max(tokens, 0 if is_alone else self._longest)

    def has_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether the pool has the pages that a waiting request and the running requests are expected to need.

        Each running request may need one page at once. Then each grows by one token at a time until it ends and frees
        its pages, so the pool is fullest just before a request ends. The check covers the end of every request.

        A request without pages counts as holding the pages that its `refusal` found.
        """
        size, last = self.pages.page_size, request.refusal
        available = self.pages.num_available - (last.num_idle if last is not None and not request.pages else 0)
        needed = self.pages.pages_for(self.limits.reserved_len(request.rows_to_prefill)) - _num_held(request)
        if needed + len(running) > available:
            return False
        longest = self._longest + self.limits.num_lookahead_tokens + size
        if (len(running) + 1) * longest <= (self.pages.num_pages - 1) * size:
            return True  # all fit at their longest: a quick answer with thousands of requests
        if self._growth_of_all(request, running) <= available:
            return True  # all fit if each grows to its own limit
        alive = sorted((*running, request), key=self._expected_left, reverse=True)
        freed = sum(_num_held(item) * size - item.num_cached for item in alive)
        grown = fullest = 0  # tokens; the last page of a request is half full on average
        for count, item in enumerate(alive, start=1):
            held = _num_held(item) * size
            freed -= held - item.num_cached
            grown += item.total_len + self.limits.num_lookahead_tokens - held
            fullest = max(fullest, grown + count * (self._expected_left(item) + size // 2) - freed)
        return fullest <= available * size

    def _growth_of_all(self, request: Request, running: Sequence[Request]) -> int:
        """The most pages that all these requests may still get. Looks at each running request once per step."""
        for item in running[self._num_counted :]:
            self._growth += self._growth_of(item)
        self._num_counted = len(running)
        return self._growth + self._growth_of(request)

    def _growth_of(self, request: Request) -> int:
        """The most pages that a request may still get."""
        longest = min(len(request.prompt_token_ids) + request.params.max_new_tokens, self.limits.max_model_len)
        return self.pages.pages_for(longest + self._slack) - _num_held(request)

    def learn(self, request: Request) -> None:
        """Update the expected share with the share that an ended request has used."""
        num_used = len(request.output_token_ids)
        share = num_used / (num_used + request.remaining(self.limits.max_model_len))
        self.share += (max(share, LOWEST_SHARE) - self.share) * SHARE_WEIGHT

    def expect_more(self) -> None:
        """Double the expected share after pages ran out: requests get longer than expected."""
        self.share = min(1.0, 2 * self.share)

    def _expected_left(self, request: Request) -> int:
        """Tokens that a request is still expected to generate."""
        return int(self.share * request.remaining(self.limits.max_model_len))


def _num_held(request: Request) -> int:
    return len(request.pages) or (request.refusal.num_found if request.refusal is not None else 0)
