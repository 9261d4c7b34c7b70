"""Decide which requests run in a step, and commit the results. Host only: knows pages and lengths, no tensors.

The scheduler queues a step before it knows how many drafts earlier steps accepted. So it knows only bounds of a
request's KV length: at least `kv_len`, which is committed, and at most `kv_len` plus every draft of every step in
flight. It reserves pages for the upper bound. Everything else is decided when results are committed.

    waiting --admit--> running (prefilling, then decoding) --commit--> finished
       ^                  |
       +----- preempt ----+

The youngest running request is preempted first, so the oldest always makes progress. Preemption happens only when no
step is in flight, because a queued step still writes the pages of its requests, and its tokens would be lost. The
preempted request finds its published pages in the cache when it resumes.

Admission gives a prompt the pages of all its rows, however many steps its prefill takes, so a begun prefill never waits
for pages. A page is published only after the results of the step that filled it are committed. So after a failed step
every published page still matches its digest.

A request that loads a hand-off has a row and pages but runs in no step until `finish_loading`. Then it continues as if
it had found those rows in the cache. A request that is handed off keeps its pages until `finish_sending`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dflash_runtime.errors import NON_FINITE, CheckpointError, DFlashError
from dflash_runtime.scheduling.admission import check_request
from dflash_runtime.scheduling.batch import Batch, Chunk, PageAddition, StepOutput
from dflash_runtime.scheduling.expected_room import ExpectedRoom
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.lookup import look_up
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import DraftStep, FinishReason, Refusal, Request
from dflash_runtime.scheduling.row_budget import RowBudget
from dflash_runtime.scheduling.row_shares import RowShares
from dflash_runtime.scheduling.step_load import StepLoad
from dflash_runtime.scheduling.text_index import TextIndex, padded
from dflash_runtime.scheduling.width import FixedWidth, WidthPolicy, width_of


class OutOfPages(Exception):
    """Pages ran out while steps are in flight. Read their results, which may free pages, before preempting."""


class Scheduler:
    """First come, first served: running requests decode in every step, and prompts share the prompt rows of a step."""

    def __init__(
        self,
        limits: Limits,
        pages: PagePool,
        cache: PrefixCache,
        width_policy: WidthPolicy | None = None,
        make_index: Callable[[], TextIndex] | None = None,
        row_budget: RowBudget | None = None,
        explain_non_finite: Callable[[Request, str], DFlashError | None] = lambda request, where: None,
    ) -> None:
        """With `make_index`, a lookup drafts; then no step may be scheduled while another one is in flight.

        `explain_non_finite` returns the cause of logits that are not finite, if it is known: of a request, and where.
        """
        self.limits = limits
        self.pages = pages
        self.cache = cache
        self.width_policy = width_policy or FixedWidth()
        self._make_index = make_index
        self.row_budget = row_budget
        self._explain_non_finite = explain_non_finite
        self.num_preemptions = 0
        self.load = StepLoad(limits)
        self.room = ExpectedRoom(limits, pages)
        self._live: dict[Request, None] = {}  # requests that have not ended, in order of arrival
        # Kept when `schedule` raises OutOfPages: the pages taken before that belong to their requests.
        self._additions: list[PageAddition] = []
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._loaded: list[Request] = []  # hand-offs loaded; the next step switches these requests on
        self._sending: dict[Request, None] = {}
        self._free_rows = list(range(limits.max_num_requests - 1, -1, -1))
        self._generations = [0] * limits.max_num_requests

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def live(self) -> tuple[Request, ...]:
        """Every request that has not ended, in order of arrival."""
        return tuple(self._live)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `check` raises."""
        self.check(request)
        self.room.expect(request, is_alone=not self._live)
        self.cache.expect(request)
        self._live[request] = None
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuse a request that can never run; see `check_request`."""
        check_request(request, self.limits, self.pages)

    def schedule(self, *, is_drained: bool) -> Batch:
        """Choose the next batch and reserve its pages. An empty batch means that results must be committed first.

        `is_drained` means that no step is in flight, so a request may be preempted.

        Raises:
            OutOfPages: pages ran out while steps are in flight. Commit their results and call again.
        """
        num_preemptions = self.num_preemptions
        decode = self._plan_decode(is_drained)
        looked_up = self._look_up(decode)
        verify_width = width_of(decode, self.width_policy, self.limits.num_block_rows, looked_up)
        mean_width = self.row_budget.choose(decode, verify_width) if self.row_budget is not None else 0
        tree_rows = self.limits.tree_rows(verify_width)
        num_rows = tree_rows or mean_width or verify_width
        # A step that preempts admits no request: the freed pages are for requests that already run.
        admitted, chunks = self._plan_prompts(len(decode), num_rows, may_admit=self.num_preemptions == num_preemptions)
        additions, self._additions = self._additions, []
        longest = max((self._kv_upper(request) for request in decode), default=0)
        for request in decode:
            request.num_in_flight += 1
        return Batch(
            admitted=tuple(admitted),
            additions=tuple(additions),
            chunks=tuple(chunks),
            decode=tuple(decode),
            longest=longest,
            verify_width=verify_width,
            mean_width=mean_width,
            loads=tuple(request for request in admitted if request.is_loading),
            looked_up=looked_up,
            tree_rows=tree_rows,
        )

    def commit(self, request: Request, output: StepOutput) -> list[int]:
        """Commit one step's result for a request, and return the committed tokens.

        Results of an ended request, or of an earlier request in the same row, are dropped.
        """
        if request.is_finished or request.row is None or output.generation != request.generation:
            return []
        request.num_in_flight -= 1
        if not output.is_finite:
            return self._end_not_finite(request, output)
        if not output.token_ids:
            return []
        start = len(request.output_token_ids)
        request.commit(output.token_ids, self.limits.max_model_len)
        assert request.is_finished == output.is_done, "host and device disagree on the end of a request"
        request.likely = output.confidences
        draft_ids = output.draft_ids
        if self._make_index is not None:  # the width of a step depends on other requests, and a trace must not
            draft_ids = padded(draft_ids, self.limits.num_draft_tokens)
        draft_ids = draft_ids[: request.params.max_drafts]
        if output.num_accepted is not None and draft_ids:
            confidences = output.confidences[: len(draft_ids)]
            request.steps.append(
                DraftStep(start, tuple(draft_ids), output.num_accepted, len(output.token_ids), confidences)
            )
            self.width_policy.observe(len(draft_ids), output.num_accepted)
        self.cache.publish(request, request.kv_len)
        if request.is_finished:
            if request.send_key is not None:
                self._keep_pages(request)
            else:
                self.room.learn(request)
                self._end(request)
        return output.token_ids

    def finish_chunk(self, chunk: Chunk) -> None:
        """Publish the pages that a chunk filled, after its step has run."""
        request = chunk.request
        if request.row is not None and request.generation == chunk.generation:
            self.cache.publish(request, chunk.end)
            for keep in chunk.keeps:
                del request.keeping[keep.position]
                self.cache.keep(request, keep)

    def finish_loading(
        self,
        request: Request,
        output_token_ids: Sequence[int],
        num_rows: int,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Continue a request from a loaded hand-off: its `num_rows` rows are in the request's pages.

        With a `finish_reason`, the request ended before it was handed off, and ends here too.
        """
        assert request.is_loading
        request.load_key = None
        request.output_token_ids = list(output_token_ids)
        if finish_reason is not None:
            request.finish_reason = finish_reason
            self._end(request)
            return
        request.num_loaded = max(0, num_rows - request.prefilled_len)
        request.prefilled_len += request.num_loaded
        request.prefill_len = request.rows_to_prefill
        self._loaded.append(request)

    def give_up_loading(self, request: Request) -> None:
        """Prefill a request here, since its hand-off did not arrive."""
        request.load_key = None
        request.is_loading = False

    def finish_sending(self, request: Request) -> None:
        """Release the pages of a request after its hand-off."""
        if request in self._sending:
            self._end(request)

    def fail(self, request: Request, error: DFlashError) -> None:
        """End a request with an error. It keeps its tokens."""
        request.fail(error)
        self._end(request)

    def abort(self, requests: Iterable[Request] | None = None) -> None:
        """Drop requests, by default all, and release their rows and pages. Ended requests are ignored.

        Steps in flight still write the released pages, but they run before any step of the pages' next owner.
        """
        for request in self.live if requests is None else requests:
            if request in self._live:
                self._end(request)

    def restart(self) -> None:
        """Restart every request that has not ended from its committed tokens, with an empty cache and pool.

        Called after a failed step, which may have left any page or list half changed.
        """
        self._additions = []
        self._running = []
        self._loaded = []
        self._free_rows = list(range(self.limits.max_num_requests - 1, -1, -1))
        self.cache.clear()
        self.pages.clear()
        self._live = {request: None for request in self._live if not request.is_finished or request.is_sending}
        for request in self._live:
            request.num_preemptions += request.row is not None
            request.row = None
            request.num_in_flight = 0
            request.is_loading = False
            request.keeping, request.spare = {}, None
            request.forget_pages()
        self._waiting = deque(request for request in self._live if not request.is_sending)

    def check_integrity(self) -> None:
        """Assert that pages, references, cache and rows are consistent, as they must be between steps."""
        self.pages.check_integrity([request.pages for request in (*self._running, *self._sending)])
        self.cache.check_integrity(self._running)
        rows = [request.row for request in self._running]
        assert len(set(rows)) == len(rows)
        assert {*rows, *self._free_rows} == set(range(self.limits.max_num_requests))
        assert {*self._running, *self._waiting, *self._sending} == set(self._live)

    def _plan_decode(self, is_drained: bool) -> list[Request]:
        """Requests that decode in this step, with pages reserved for their lookahead."""
        decode = []
        for request in list(self._running):
            if request.row is None or not request.is_prefilled or request.surely_ends(self.limits.max_model_len):
                continue
            needed = self.limits.reserved_len(request.kv_len, request.num_in_flight)
            if self._grow_or_preempt(request, needed, is_drained):
                decode.append(request)
        return decode

    def _look_up(self, decode: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
        """The draft tokens of each request from a lookup; empty without one."""
        if self._make_index is None:
            return ()
        return tuple(look_up(request, self._make_index, self.limits.num_draft_tokens) for request in decode)

    def _plan_prompts(self, num_decoding: int, num_rows: int, *, may_admit: bool) -> tuple[list[Request], list[Chunk]]:
        """Requests to admit and chunks to prefill in this step. `RowShares` divides the rows."""
        begun = [request for request in self._running if not (request.is_prefilled or request.is_loading)]
        num_prompts = len(begun) + min(len(self._waiting), len(self._free_rows))
        shares = RowShares(self.load.prompt_rows(num_decoding, num_rows, num_prompts))
        first, last = shares.order(begun)
        for request in first:
            shares.give(request)
        for request in self._loaded:
            request.is_loading = False
            shares.give(request)
        self._loaded = []
        admitted = self._admit_waiting(shares) if may_admit else []
        for request in last:
            shares.give(request)
        chunks = [self._chunk(request, share) for request, share in shares.settle().items()]
        return admitted, chunks

    def _admit_waiting(self, shares: RowShares) -> list[Request]:
        """Admit waiting requests in order, while prompt rows, rows of the state and pages for whole prompts are left.

        A request waits while a running request prefills the same prefix, so that it can share that request's pages.
        """
        admitted: list[Request] = []
        passed_over: list[Request] = []
        self.room.begin_step()
        while self._waiting and self._free_rows and shares.num_left:
            if len(self._running) + len(passed_over) >= self.load.max_running:
                break
            request = self._waiting[0]
            if not self.cache.awaits(request):
                if not self._find_room(request):
                    break
                if self.cache.will_publish(self._running, request):
                    self._release_pages(request)
            self._waiting.popleft()
            if request.awaited is not None:
                passed_over.append(request)
                continue
            self._admit(request)
            admitted.append(request)
            if request.load_len is not None and request.load_len <= request.prefilled_len:
                request.load_key = None  # the cache already has every row of the hand-off
            is_loading = request.load_key is not None
            num_tokens = request.prefill_len
            needed = self.limits.loading_len(num_tokens) if is_loading else self.limits.reserved_len(num_tokens)
            is_grown = self._grow(request, needed)
            assert is_grown, "an admitted request was promised its pages"
            request.is_loading = is_loading
            if not is_loading:
                shares.give(request)
        self._waiting.extendleft(reversed(passed_over))
        return admitted

    def _find_room(self, request: Request) -> bool:
        """Give a waiting request its cached pages if the pool has room for it.

        After a refusal, its pages are looked up again only if there may be room.
        """
        is_alone = not (self._running or self._sending)
        last = request.refusal
        if not is_alone and last is not None and not self.cache.finds_more(request, last.num_found):
            if last.num_freed != self.pages.num_freed:  # the idle pages may have changed: none is the best case
                request.refusal = replace(last, num_idle=0, num_freed=self.pages.num_freed)
            if not self.room.has_room(request, self._running):
                return False
        num_available = self.pages.num_available
        request.refusal = None
        self.cache.match(request)
        if is_alone or self.room.has_room(request, self._running):
            return True
        num_found, num_idle = request.num_shared, num_available - self.pages.num_available
        self._release_pages(request)
        request.refusal = Refusal(num_found, num_idle, self.pages.num_freed)
        return False

    def _chunk(self, request: Request, num_rows: int) -> Chunk:
        """The request's next chunk, `num_rows` positions. They count as prefilled, because later steps run after it.

        If the cache has every position of a resumed request, its last chunk is empty and only switches it on.
        """
        end = request.prefilled_len + num_rows
        is_last = end == request.prefill_len
        keeps = self.cache.take_slots(request, end)
        chunk = Chunk(request, request.prefilled_len, end, is_last, request.generation, keeps)
        request.prefilled_len = end
        if chunk.is_last and not request.output_token_ids:
            request.num_in_flight += 1  # its first token
        return chunk

    def _admit(self, request: Request) -> None:
        row = self._free_rows.pop()
        request.row = row
        request.prefill_len = request.rows_to_prefill
        if not request.num_preemptions:
            request.num_cached = request.prefilled_len
        self._generations[row] += 1
        request.generation = self._generations[row]
        self.cache.enter_row(request)
        self._running.append(request)
        if request.pages:
            self._additions.append(PageAddition(row, 0, self.pages.run_ending_with(request.pages[-1])))

    def _grow_or_preempt(self, request: Request, num_tokens: int, is_drained: bool) -> bool:
        """Get pages for `num_tokens` tokens, preempting the youngest requests. False if `request` itself was preempted.

        Raises:
            OutOfPages: pages ran out while steps are in flight.
        """
        while not self._grow(request, num_tokens):
            if not is_drained:
                raise OutOfPages
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Get pages for `num_tokens` tokens. False, with no page taken, if the pool has too few."""
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
        """Take a request's row and pages, and put the request first in the queue. It has no step in flight."""
        assert request.num_in_flight == 0
        self._remove(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.room.expect_more()
        self._waiting.appendleft(request)

    def _remove(self, request: Request) -> None:
        self._leave_row(request)
        self._release_pages(request)

    def _leave_row(self, request: Request) -> None:
        assert request.row is not None
        self.cache.leave_row(request)
        self._running.remove(request)
        request.is_loading = False
        if request in self._loaded:
            self._loaded.remove(request)
        self._additions = [item for item in self._additions if item.row != request.row]
        self._free_rows.append(request.row)
        request.row = None
        request.num_in_flight = 0

    def _keep_pages(self, request: Request) -> None:
        """Let an ended request hold its pages until they are handed off."""
        self._leave_row(request)
        request.is_sending = True
        self._sending[request] = None

    def _end(self, request: Request) -> None:
        """Remove a waiting, running or sending request from the scheduler."""
        del self._live[request]
        self.cache.forget(request)
        if request in self._sending:
            request.is_sending = False
            del self._sending[request]
            self._release_pages(request)
        elif request.row is not None:
            self._remove(request)
        elif request in self._waiting:  # an interrupted `add` has not put it there
            self._waiting.remove(request)

    def _end_not_finite(self, request: Request, output: StepOutput) -> list[int]:
        """Commit the tokens before the non-finite logits, and end the request with an error."""
        if output.token_ids:
            request.commit(output.token_ids, self.limits.max_model_len)
        where = f"the target gave non-finite logits at position {request.total_len}"
        unknown = CheckpointError(f"{where}: its weights have NaN, or are too large", id=NON_FINITE)
        self.fail(request, self._explain_non_finite(request, where) or unknown)
        return output.token_ids

    def _release_pages(self, request: Request) -> None:
        self.pages.release(request.pages, request.num_shared)
        request.forget_pages()

    def _kv_upper(self, request: Request) -> int:
        """An upper bound on the request's true KV length after all steps in flight."""
        upper = request.kv_len + request.num_in_flight * self.limits.num_lookahead_tokens
        return min(max(upper, request.prefilled_len), self.limits.max_model_len)
