"""Decide which requests run in a step, and commit the results. Host only; knows pages and lengths, no tensors.

A step is queued before the acceptance counts of earlier ones are known, so only bounds of a request's KV length are
known: at least `kv_len`, all committed, and at most that plus every draft of every step in flight. Pages are reserved
for the upper bound; everything else is decided when results are committed.

    waiting --admit--> running (prefilling, then decoding) --commit--> finished
       ^                  |
       +----- preempt ----+

The youngest running request is preempted first, so the oldest always makes progress. It is preempted only when no
step is in flight: a queued step goes on writing the pages its request had when it was queued, and its tokens would be
lost. Pages that the request has published stay in the cache, where it finds them when it resumes.
"""

from collections import deque
from collections.abc import Sequence

from dflash_runtime.errors import CapacityError, RequestError
from dflash_runtime.scheduling.batch import Batch, Chunk, PageAddition, StepOutput
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import DraftStep, Request


class OutOfPages(Exception):
    """The pool is empty while steps are in flight: read their results, which may free pages, before preempting."""


class Scheduler:
    """First come, first served: running requests decode in every step, and prompts share the budget of prompt rows."""

    def __init__(self, limits: Limits, pages: PagePool, cache: PrefixCache) -> None:
        self.limits = limits
        self.pages = pages
        self.cache = cache
        self.is_drafting = True
        self.num_preemptions = 0
        # Survives a call that ends in OutOfPages: the requests own the pages taken until then.
        self._additions: list[PageAddition] = []
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._free_rows = list(range(limits.max_num_requests - 1, -1, -1))
        self._generations = [0] * limits.max_num_requests

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: a prompt this model cannot take.
            CapacityError: the request would not fit an empty pool.
        """
        self._check(request)
        self._waiting.append(request)

    def schedule(self, *, is_drained: bool) -> Batch:
        """Choose what runs now, reserving its pages. An empty batch means that results must come in first.

        `is_drained` says that no step is in flight, so that a request may be preempted.

        Raises:
            OutOfPages: pages are short and steps are in flight; drain and call again.
        """
        num_preemptions = self.num_preemptions
        decode = self._plan_decode(is_drained)
        chunks = self._plan_begun(is_drained)
        admitted: list[Request] = []
        # A step that had to preempt admits no request: the pages it gained are for requests that already run.
        if self.num_preemptions == num_preemptions:
            self._plan_new(admitted, chunks)
        additions, self._additions = self._additions, []
        # A begun prompt may have taken its pages from a younger request that was to decode.
        decode = [request for request in decode if request.row is not None]
        longest = max((self._kv_upper(request) for request in decode), default=0)
        for request in decode:
            request.num_in_flight += 1
        return Batch(
            admitted=tuple(admitted),
            additions=tuple(additions),
            chunks=tuple(chunks),
            decode=tuple(decode),
            longest=longest,
            is_drafting=self.is_drafting,
        )

    def commit(self, request: Request, output: StepOutput) -> list[int]:
        """Take one step's result and return the tokens that became final.

        Results of a request that has ended, or of one that held its row before, are dropped.
        """
        if request.is_finished or request.row is None or output.generation != request.generation:
            return []
        request.num_in_flight -= 1
        if not output.token_ids:
            return []
        start = len(request.output_token_ids)
        request.commit(output.token_ids, self.limits.max_model_len)
        assert request.is_finished == output.is_done, "host and device disagree on the end of a request"
        if output.num_accepted is not None:
            step = DraftStep(start, tuple(output.draft_ids), output.num_accepted, len(output.token_ids))
            request.steps.append(step)
        self.cache.publish(request, request.kv_len)
        if request.is_finished:
            self._remove(request)
        return output.token_ids

    def abort(self) -> None:
        """Drop every request and give back what they hold."""
        self._waiting.clear()
        for request in list(self._running):
            self._remove(request)

    def check_integrity(self) -> None:
        """Assert what must hold between steps: pages, references, cache and rows."""
        self.pages.check_integrity([request.pages for request in self._running])
        self.cache.check_integrity()
        rows = [request.row for request in self._running]
        assert len(set(rows)) == len(rows)
        assert {*rows, *self._free_rows} == set(range(self.limits.max_num_requests))

    def _plan_decode(self, is_drained: bool) -> list[Request]:
        """Requests that decode in this step, their lookahead reserved."""
        decode = []
        for request in list(self._running):
            if request.row is None or not request.is_prefilled or self._surely_ends(request):
                continue
            needed = self.limits.reserved_len(request.kv_len, request.num_in_flight)
            if self._grow_or_preempt(request, needed, is_drained):
                decode.append(request)
        return decode

    def _plan_begun(self, is_drained: bool) -> list[Chunk]:
        """The next chunks of prompts that were begun in earlier steps, oldest first.

        While steps are in flight a prompt that finds no pages waits for them to free some, and so do younger ones.
        """
        chunks: list[Chunk] = []
        for request in list(self._running):
            if request.row is None or request.is_prefilled:
                continue
            end = min(request.prefill_len, request.prefilled_len + self._budget(chunks))
            needed = self.limits.reserved_len(end)
            if end == request.prefilled_len or not (is_drained or self._grow(request, needed)):
                break
            if self._grow_or_preempt(request, needed, is_drained):
                chunks.append(self._chunk(request, end))
        return chunks

    def _plan_new(self, admitted: list[Request], chunks: list[Chunk]) -> None:
        """Admit waiting requests in order, as budget, rows and pages allow.

        A page stays free for every running request, which may soon need it: admitting must not lead to preempting.
        """
        while self._waiting and self._free_rows and self._budget(chunks):
            request = self._waiting[0]
            self.cache.match(request)
            needed = self.pages.pages_for(self.limits.reserved_len(request.rows_to_prefill)) - len(request.pages)
            if needed + len(self._running) > self.pages.num_available and self._running:
                self._release_pages(request)
                return
            self._admit(self._waiting.popleft(), admitted)
            end = min(request.prefill_len, request.prefilled_len + self._budget(chunks))
            is_grown = self._grow(request, self.limits.reserved_len(end))
            assert is_grown, "an admitted request was promised its pages"
            chunks.append(self._chunk(request, end))

    def _chunk(self, request: Request, end: int) -> Chunk:
        """Count positions `[prefilled_len, end)` as prefilled: whatever is queued later runs after them.

        For the same reason their full pages are published here and not with results: prompt tokens are committed from
        the start, and a request that finds such a page reads it in a later forward. A resumed request of which every
        position is cached has an empty last chunk, after which it decodes.
        """
        chunk = Chunk(request, request.prefilled_len, end, is_last=end == request.prefill_len)
        request.prefilled_len = end
        self.cache.publish(request, end)
        if chunk.is_last and not request.output_token_ids:
            request.num_in_flight += 1  # its first token
        return chunk

    def _budget(self, chunks: Sequence[Chunk]) -> int:
        """Prompt rows this step may still prefill."""
        return max(0, self.limits.max_batched_tokens - sum(chunk.end - chunk.start for chunk in chunks))

    def _admit(self, request: Request, admitted: list[Request]) -> None:
        row = self._free_rows.pop()
        request.row = row
        request.prefill_len = request.rows_to_prefill
        if not request.num_preemptions:
            request.num_cached = request.prefilled_len
        self._generations[row] += 1
        request.generation = self._generations[row]
        self._running.append(request)
        admitted.append(request)
        self._additions.append(PageAddition(row, 0, tuple(request.pages)))

    def _grow_or_preempt(self, request: Request, num_tokens: int, is_drained: bool) -> bool:
        """Get pages for `num_tokens` tokens, preempting the youngest for them; false if that is the request itself."""
        while not self._grow(request, num_tokens):
            if not is_drained:
                raise OutOfPages
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Get pages for `num_tokens` tokens; false, with nothing taken, if the pool has too few."""
        missing = self.pages.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.pages.allocate(missing)
        if pages is None:
            return False
        assert request.row is not None
        self._additions.append(PageAddition(request.row, len(request.pages), tuple(pages)))
        request.pages += pages
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's row and pages and put it first in the queue; nothing of it is in flight."""
        assert request.num_in_flight == 0
        self._remove(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _remove(self, request: Request) -> None:
        assert request.row is not None
        self._running.remove(request)
        self._additions = [item for item in self._additions if item.row != request.row]
        self._free_rows.append(request.row)
        request.row = None
        request.num_in_flight = 0
        self._release_pages(request)

    def _release_pages(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = []
        request.page_digests = []
        request.prefilled_len = 0

    def _kv_upper(self, request: Request) -> int:
        """An upper bound on the request's true KV length once every step in flight has run."""
        upper = request.kv_len + request.num_in_flight * self.limits.num_lookahead_tokens
        return min(max(upper, request.prefilled_len), self.limits.max_model_len)

    def _surely_ends(self, request: Request) -> bool:
        """Whether the steps in flight end the request even if they accept nothing: each gives at least one token."""
        return request.num_in_flight >= request.remaining(self.limits.max_model_len)

    def _check(self, request: Request) -> None:
        where = f"prompt {request.index}"
        if not request.prompt_token_ids:
            raise RequestError(f"{where}: empty, expected at least one token")
        worst = next((token for token in request.prompt_token_ids if not 0 <= token < self.limits.vocab_size), None)
        if worst is not None:
            raise RequestError(f"{where}: token id {worst}, expected ids in [0, {self.limits.vocab_size})")
        if request.prompt_len >= self.limits.max_model_len:
            raise RequestError(
                f"{where}: {request.prompt_len} tokens, expected fewer than the model's {self.limits.max_model_len}"
            )
        longest = min(request.prompt_len + request.params.max_new_tokens, self.limits.max_model_len)
        needed = self.pages.pages_for(self.limits.reserved_len(longest))
        if needed > self.pages.num_pages - 1:
            raise CapacityError(
                f"{where}: needs {needed} KV pages of {self.pages.page_size} tokens for {longest} tokens and a "
                f"block of {self.limits.num_lookahead_tokens} more, but the pool has {self.pages.num_pages - 1}",
                hint="lower --max-new-tokens or --max-model-len, or give the KV cache more memory",
            )
