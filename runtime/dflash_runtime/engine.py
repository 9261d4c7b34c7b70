"""The step loop: schedule a batch, queue it on the device, commit the results of earlier steps.

The synchronous loop reads the results of a step before it schedules the next one. The asynchronous loop queues
`max_in_flight` steps before it reads the results of the oldest one, so the device never waits for the host. While a
long step runs, the loop commits the tokens of earlier steps. The scheduler does not know how many drafts the steps in
flight accept, so it plans for every count. It reserves pages as if all drafts were accepted. It leaves out a request
that the queued steps surely end. It preempts requests only while no step is in flight.

After a failed step, all requests restart from their committed tokens in an empty pool, and half as many run at a time.
If memory ran out, steps also get half as many rows. A request that fails twice while it runs alone ends with the error;
the other requests continue. So a batch shrinks until it fits the memory or until the failing request runs alone.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from secrets import randbits
from threading import RLock
from typing import NamedTuple

import torch

from dflash_runtime.device.capacity.memory import is_out_of_memory
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.storage.results import PendingForward
from dflash_runtime.errors import CapacityError, DFlashError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.ranks.interruptions import deferred_interrupt
from dflash_runtime.ranks.witness import Witness
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import derive_seed
from dflash_runtime.scheduling.scheduler import OutOfPages, Scheduler
from dflash_runtime.transfers import HandoffPlan, Transfers

logger = logging.getLogger(__name__)

NUM_GOOD_STEPS = 200
"""Good steps in a row before a reduced load is doubled. A wrong attempt costs a prefill of all requests."""

LONG_ROWS = 256
"""The fewest rows of a long step: it takes an H200 at least 9 ms, in which the host can read earlier results."""


@dataclass(frozen=True, slots=True)
class Committed:
    """New tokens of a request. The list is empty if the request only ended."""

    request: Request
    token_ids: list[int]


class StopAt(NamedTuple):
    """A step after which all ranks drop the requests of a run, by the numbers of runs and of steps begun so far."""

    run: int
    step: int


class Engine:
    """Runs requests in steps. `max_in_flight` 0 is the synchronous loop.

    `run` and `abort` hold `lock` while they change anything, so that another thread may abort the requests of a run.
    A request without a seed gets a seed derived from the engine's `seed`. With None the engine draws its `seed`.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, max_in_flight: int = 0, seed: int | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.max_in_flight = max_in_flight
        self.transfers: Transfers | None = None  # of the running call, if it uses hand-offs
        self.failure: DFlashError | None = None  # why the engine is closed
        self.lock = RLock()
        self.ranks = runner.ranks
        self.witness = Witness(self.ranks)
        self.num_steps = 0  # since the engine was made; equal on all ranks
        self.num_runs = 0
        self.stop_at: StopAt | None = None  # set by rank 0, on all other ranks
        self.agree_on_stop: Callable[[StopAt], None] | None = None  # sets `stop_at` of all other ranks; on rank 0
        self._in_flight: deque[PendingForward] = deque()
        self._touched: dict[Request, None] = {}  # may have undelivered tokens or have ended
        self.is_whole = True  # host and device agree; False during a step
        self._num_failures = 0  # since the last committed token
        self._num_good_steps = 0  # since the last failure
        self._seed = randbits(63) if seed is None else seed
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Queue a request that `Scheduler.check` accepts.

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

        Without work to queue, commit the oldest results. A failed step is undone, and the next step continues from the
        committed tokens. Only failed assertions and exceptions such as Ctrl-C are raised.
        """
        with self._undoing_failures():
            self.num_steps += 1
            self._advance_transfers()
            batch = self._schedule()
            self.witness.see_batch(batch)
            if batch.is_empty:
                self._commit_oldest()
            elif (pending := self.runner.submit(batch)) is not None:
                self._in_flight.append(pending)
            self._begin_loading(batch)
            while self._is_due:
                self._commit_oldest()
            self._count_good_step()
        return self.deliver()

    def run(
        self, requests: Sequence[Request], is_open: Callable[[], bool] = lambda: True
    ) -> Generator[Committed, None, None]:
        """Queue checked requests and step until they have ended. Closing the generator drops unfinished requests.

        If a step raises, the requests that ended in it are yielded first. The run also ends when `is_open` returns
        False; then the other thread that made it so drops the requests. All ranks drop requests after the same step.
        """
        own = dict.fromkeys(requests)
        try:
            with self.lock:
                self.num_runs += 1
                for request in requests if is_open() else ():
                    self.add(request)
            while own and self.stop_at != (self.num_runs, self.num_steps):
                try:
                    with self.lock:
                        if not (is_open() and self.scheduler.has_work):
                            break
                        committed = self.step()
                except BaseException:
                    yield from self._end_of(own, self.deliver())
                    raise
                yield from self._end_of(own, committed)
            if is_open():
                self.witness.compare()
        finally:
            if own and self.agree_on_stop is not None:
                self._stop_together(self.agree_on_stop)
            self.abort(list(own))

    def open_transfers(self, plan: HandoffPlan | None, fingerprint: Fingerprint) -> None:
        """Let requests be handed off, or continue from hand-offs, until `close_transfers`."""
        self.transfers = Transfers(plan, fingerprint, self.runner, self.scheduler) if plan is not None else None

    def close_transfers(self) -> None:
        """Forget unfinished hand-offs. An interrupted wait for a store forgets them too."""
        transfers, self.transfers = self.transfers, None
        if transfers is not None:
            transfers.close()

    def deliver(self) -> list[Committed]:
        """Committed tokens that were not delivered yet, and requests that ended."""
        committed = []
        sending: dict[Request, None] = {}
        for request in self._touched:
            if request.is_sending:
                sending[request] = None  # it ends when its hand-off succeeds or fails
                continue
            token_ids = request.output_token_ids[request.num_delivered :]
            if token_ids or request.is_finished:
                request.num_delivered += len(token_ids)
                committed.append(Committed(request, token_ids))
        self._touched = sending
        return committed

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """Drop requests, by default all. When no request is left, also forget the steps in flight."""
        with self.lock:
            self._mend()
            self.is_whole = False
            self.scheduler.abort(requests)
            self.is_whole = True
            if not self.scheduler.has_work:
                self._in_flight.clear()
                self._num_failures = 0
                self.scheduler.load.restore()

    def _stop_together(self, agree: Callable[["StopAt"], None]) -> None:
        """Tell the other ranks to end the run after a step that none of them has reached, and run to that step.

        A rank queues at most `max_in_flight` + 1 steps before it waits for a step of this rank, and commits as many
        older steps before.
        """
        if self.failure is None and self.is_whole:
            stop_at = self.num_steps + 2 * self.max_in_flight + 4
            try:
                with self.lock:
                    agree(StopAt(self.num_runs, stop_at))
                    while self.scheduler.has_work and self.num_steps < stop_at:
                        self.step()
                    self.witness.compare()
            except DFlashError as error:  # the next call raises it
                self.failure = error

    def _end_of(self, own: dict[Request, None], committed: list[Committed]) -> Iterator[Committed]:
        """Yield the tokens of a call's own requests, and remove ended requests from `own`."""
        for item in committed:
            if item.request in own:
                if item.request.is_finished:
                    del own[item.request]
                yield item

    @property
    def _is_due(self) -> bool:
        """Whether to wait for the oldest results: enough steps are queued, or a long step follows the oldest one.

        While a request with a grammar runs, no step is queued before the results of the last one are read.

        The long step keeps the device busy, so the host can commit tokens before it ends. A request that has ended then
        runs in one more step instead of two.
        """
        queue = self._in_flight
        grammars = self.runner.grammars
        limit = 0 if grammars.is_used and grammars.are_of(self.scheduler.live) else self.max_in_flight
        return len(queue) > limit or (len(queue) > 1 and queue[1].num_rows >= LONG_ROWS)

    def _commit_oldest(self) -> None:
        """Wait for the results of the oldest step in flight, if there is one, and commit its tokens."""
        if not self._in_flight:
            if self.transfers is not None:
                self.transfers.wait()
            return
        pending = self._in_flight.popleft()
        outputs = pending.read(self.ranks)
        for chunk in pending.chunks:
            self.scheduler.finish_chunk(chunk)
            if chunk.is_last and self.transfers is not None:
                self.transfers.keep(chunk.request)
        for request, output in outputs:
            if request.finish_reason is not None:
                continue  # it ended in an earlier step
            self._touched[request] = None
            self.witness.see_tokens(request, output.token_ids)
            if self.scheduler.commit(request, output):
                self._num_failures = 0
            if request.is_sending and self.transfers is not None:
                self.transfers.send(request)

    def _advance_transfers(self) -> None:
        """Switch on loaded requests, and end requests that were handed off."""
        if self.transfers is not None:
            self._touched |= dict.fromkeys(self.transfers.advance())

    def _begin_loading(self, batch: Batch) -> None:
        if self.transfers is not None:
            self.transfers.begin(batch.loads)

    def _schedule(self) -> Batch:
        try:
            return self.scheduler.schedule(is_drained=not self._in_flight)
        except OutOfPages:
            return Batch()  # the oldest results are committed instead, which may free pages

    @contextmanager
    def _undoing_failures(self) -> Iterator[None]:
        """Run a step, and undo it if it fails: either one request ends with the error, or the load is reduced.

        Several ranks cannot undo a step that only one of them has left, so the engine is closed.
        """
        self._mend()
        self.is_whole = False
        try:
            with deferred_interrupt() if self.ranks.size > 1 else nullcontext():
                yield
                self.is_whole = True
        except AssertionError:
            raise
        except Exception as error:
            if self.ranks.size > 1:
                self.failure = _explain(error)
                raise self.failure from error
            self._recover(error)
        self.is_whole = True

    def _count_good_step(self) -> None:
        """Raise the load again after enough steps without a failure."""
        self._num_good_steps += 1
        if self._num_good_steps % NUM_GOOD_STEPS == 0:
            self.scheduler.load.add()

    def _mend(self) -> None:
        """Restart all requests from their tokens if the last step was interrupted."""
        if not self.is_whole:
            self._in_flight.clear()
            self.scheduler.restart()
            self.is_whole = True

    def _recover(self, error: Exception) -> None:
        """After a failed step, end the request that failed alone, or reduce the load."""
        suspects = self.scheduler.num_running or 1
        self._mend()
        self._num_failures += 1
        self._num_good_steps = 0
        reason = _explain(error)
        if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
            message = f"this LLM is closed because the GPU failed: {reason.message}"
            self.failure = DFlashError(message, id="llm-closed", hint="load the pair in a new process")
            self._fail(self.scheduler.live, reason)
        elif not self.scheduler.has_work:
            logger.warning("a step without requests failed: %s", reason.message)
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
        """Whether a request that runs alone may fit the memory with fewer rows per step."""
        scheduler = self.scheduler
        return is_out_of_memory(error) and scheduler.load.max_batched_tokens > scheduler.limits.num_lookahead_tokens

    def _fail(self, requests: Sequence[Request], reason: DFlashError) -> None:
        for request in requests:
            self._touched[request] = None
            logger.error("prompt %d failed: %s", request.index + 1, reason.message)
            self.scheduler.fail(request, reason)


def _explain(error: Exception) -> DFlashError:
    """The exception of a step as an error with an exit code."""
    if isinstance(error, DFlashError):
        return error
    text = str(error).strip().split("\n")[0]
    if is_out_of_memory(error):
        hint = "lower --concurrency or --max-batched-tokens"
        return CapacityError(f"out of memory: {text}", id="out-of-memory", hint=hint)
    return DFlashError(f"{type(error).__name__}: {text}", id="step-failed")
