"""The step loop: schedule a batch, queue it on the device, commit results that have come back.

Synchronous, a step's results are read before the next is scheduled. Asynchronous, `max_in_flight` steps are queued
before the oldest one's results are read, so the device never waits for the host; where a long one is queued, tokens
of the steps before are committed while it runs. The scheduler does not know how many drafts the steps in flight
accept, and plans for every count they can give: pages are reserved as if all were accepted, a request that the queued
steps end in any case is left out, and nothing is preempted while a step is in flight.

A step that fails is undone: every request begins again from the tokens it has, in a pool without content, and half as
many run at a time; out of memory, with half as many rows. One that fails alone, and again, ends with the error,
and the others go on. So a batch that does not fit the memory is cut until it does, and a request that cannot be run is
found by itself.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import randbits

import torch

from dflash_runtime.device.memory import is_out_of_memory
from dflash_runtime.device.results import PendingForward
from dflash_runtime.device.runner import Runner
from dflash_runtime.errors import CapacityError, DFlashError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request, derive_seed
from dflash_runtime.scheduling.scheduler import OutOfPages, Scheduler
from dflash_runtime.transfers import HandoffPlan, Transfers

logger = logging.getLogger(__name__)

NUM_GOOD_STEPS = 200
"""Steps without a failure after which the load that was shed is doubled: each attempt may cost a prefill of all."""

LONG_ROWS = 256
"""Rows of a step that keeps the device busy while the host reads what came before: an H200 some 9 ms and more."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens of a request that became final; none where it only ended."""

    request: Request
    token_ids: list[int]


class Engine:
    """Takes requests and steps until none is left. `max_in_flight` 0 is the synchronous loop.

    `seed` is what the seeds of requests without one are made from; None takes another in every engine.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, max_in_flight: int = 0, seed: int | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.max_in_flight = max_in_flight
        self.transfers: Transfers | None = None  # of the call that runs, where it hands off or goes on from hand-offs
        self.failure: DFlashError | None = None  # why nothing runs any more
        self._in_flight: deque[PendingForward] = deque()
        self._touched: dict[Request, None] = {}  # may have tokens, or an end, that nobody has heard of
        self._is_whole = True  # host and device agree; false while a step is under way
        self._num_failures = 0  # since a token was last committed
        self._num_good_steps = 0  # since the last failure
        self._seed = randbits(63) if seed is None else seed
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.check` for what is refused.

        Raises:
            DFlashError: the device failed before, and the engine is closed.
        """
        if self.failure is not None:
            raise self.failure
        self._mend()
        self.scheduler.add(request)
        if request.params.seed is None:
            request.seed = derive_seed(self._seed, self._num_added)
        self._num_added += 1

    def step(self) -> list[Committed]:
        """Queue one step, commit the results that are due, and return what was committed.

        With nothing to queue, commit the oldest results. A failed step is undone: see `RequestOutput.error` for the
        request that ends with it. Raises only a failed assertion, and signals such as Ctrl-C that are no `Exception`;
        the next step goes on from the committed tokens.
        """
        with self._undoing_failures():
            self._advance_transfers()
            batch = self._schedule()
            if batch.is_empty:
                self._commit_oldest()
            elif (pending := self.runner.submit(batch)) is not None:
                self._in_flight.append(pending)
            self._begin_loading(batch)
            while self._is_due:
                self._commit_oldest()
            self._count_good_step()
        return self.deliver()

    def run(self, requests: Sequence[Request]) -> Iterator[Committed]:
        """Queue requests that were checked and step until they have ended. Leaving early drops those that have not.

        When a step raises, what ended in it is yielded before.
        """
        own = dict.fromkeys(requests)
        try:
            for request in requests:
                self.add(request)
            while own and self.scheduler.has_work:
                try:
                    committed = self.step()
                except BaseException:
                    yield from self._end_of(own, self.deliver())
                    raise
                yield from self._end_of(own, committed)
        finally:
            self.abort(list(own))

    def open_transfers(self, plan: HandoffPlan | None, fingerprint: Fingerprint) -> None:
        """Let requests be handed off, or go on from hand-offs, until `close_transfers`."""
        self.transfers = Transfers(plan, fingerprint, self.runner, self.scheduler) if plan is not None else None

    def close_transfers(self) -> None:
        """Forget hand-offs that are under way."""
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None

    def deliver(self) -> list[Committed]:
        """Tokens that were committed and not handed out yet, and requests that ended."""
        committed = []
        sending: dict[Request, None] = {}
        for request in self._touched:
            if request.is_sending:
                sending[request] = None  # it has ended when its KV is handed off, or could not be
                continue
            token_ids = request.output_token_ids[request.num_delivered :]
            if token_ids or request.is_finished:
                request.num_delivered += len(token_ids)
                committed.append(Committed(request, token_ids))
        self._touched = sending
        return committed

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """Drop requests, by default all, and forget the steps in flight once none is left."""
        self._mend()
        self._is_whole = False
        self.scheduler.abort(requests)
        self._is_whole = True
        if not self.scheduler.has_work:
            self._in_flight.clear()
            self._num_failures = 0
            self.scheduler.load.restore()

    def _end_of(self, own: dict[Request, None], committed: list[Committed]) -> Iterator[Committed]:
        """Those of a call's own requests, which leave `own` when they have ended."""
        for item in committed:
            if item.request in own:
                if item.request.is_finished:
                    del own[item.request]
                yield item

    @property
    def _is_due(self) -> bool:
        """Whether to wait for the oldest results: as many steps are queued as may be, or a long one right behind it.

        That one keeps the device busy meanwhile. So tokens need not wait until it is through, and a request that has
        ended takes part in one step more instead of two.
        """
        queue = self._in_flight
        return len(queue) > self.max_in_flight or (len(queue) > 1 and queue[1].num_rows >= LONG_ROWS)

    def _commit_oldest(self) -> None:
        """Wait for the results of the oldest forward in flight, if there is one, and make its tokens final."""
        if not self._in_flight:
            if self.transfers is not None:
                self.transfers.wait()
            return
        pending = self._in_flight.popleft()
        outputs = pending.read()
        for chunk in pending.chunks:
            self.scheduler.finish_chunk(chunk)
            if chunk.is_last and self.transfers is not None:
                self.transfers.keep(chunk.request)
        for request, output in outputs:
            self._touched[request] = None
            if self.scheduler.commit(request, output):
                self._num_failures = 0
            if request.is_sending and self.transfers is not None:
                self.transfers.send(request)

    def _advance_transfers(self) -> None:
        """Switch on requests whose KV has arrived, and end requests whose KV has left."""
        if self.transfers is not None:
            self._touched |= dict.fromkeys(self.transfers.advance())

    def _begin_loading(self, batch: Batch) -> None:
        if self.transfers is not None:
            self.transfers.begin(batch.loads)

    def _schedule(self) -> Batch:
        try:
            return self.scheduler.schedule(is_drained=not self._in_flight)
        except OutOfPages:
            return Batch()  # nothing to queue: the oldest results are committed instead, which may free pages

    @contextmanager
    def _undoing_failures(self) -> Iterator[None]:
        """Run a step that is undone if it fails: the request it is about ends, or the next step tries less."""
        self._mend()
        self._is_whole = False
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self._recover(error)
        self._is_whole = True

    def _count_good_step(self) -> None:
        """Raise the load again after enough steps without a failure."""
        self._num_good_steps += 1
        if self._num_good_steps % NUM_GOOD_STEPS == 0:
            self.scheduler.load.add()

    def _mend(self) -> None:
        """After a step that was broken off: forget what it left on the device and in the books."""
        if not self._is_whole:
            self._in_flight.clear()
            self.scheduler.restart()
            self._is_whole = True

    def _recover(self, error: Exception) -> None:
        """After a step that failed: end the request it is about, or try again with less."""
        suspects = self.scheduler.num_running or 1
        self._mend()
        self._num_failures += 1
        self._num_good_steps = 0
        reason = _explain(error)
        if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
            self.failure = DFlashError(f"this LLM is closed: {reason.message}", hint="load the pair in a new process")
            self._fail(self.scheduler.live, reason)
        elif not self.scheduler.has_work:
            logger.warning("a step failed when nothing was left to do: %s", reason.message)
        elif suspects == 1 and self._num_failures > 1 and not self._can_shed(error):
            self._fail(self.scheduler.live[:1], reason)
            self._num_failures = 0
            self.scheduler.load.restore()
        else:
            self.scheduler.load.shed(suspects, with_rows=is_out_of_memory(error))
            logger.warning(
                "a step failed (%s); trying again with %d requests and %d rows at a time",
                reason.message, self.scheduler.load.max_running, self.scheduler.load.max_batched_tokens,
            )  # fmt: skip
        if isinstance(reason, CapacityError) and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _can_shed(self, error: Exception) -> bool:
        """Whether a request that runs alone may yet fit the memory, with fewer rows a step."""
        scheduler = self.scheduler
        return is_out_of_memory(error) and scheduler.load.max_batched_tokens > scheduler.limits.num_lookahead_tokens

    def _fail(self, requests: Sequence[Request], reason: DFlashError) -> None:
        for request in requests:
            self._touched[request] = None
            logger.error("prompt %d failed: %s", request.index + 1, reason.message)
            self.scheduler.fail(request, reason)


def _explain(error: Exception) -> DFlashError:
    """What a step raised, as an error with an exit code."""
    if isinstance(error, DFlashError):
        return error
    text = str(error).strip().split("\n")[0]
    if is_out_of_memory(error):
        return CapacityError(f"out of memory: {text}", hint="lower --max-num-requests or --max-batched-tokens")
    return DFlashError(f"{type(error).__name__}: {text}")
