"""The processes of ranks 1 and up, seen from rank 0: start them, send them calls, notice their end, and end them."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from secrets import randbits

import torch

from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint
from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
from dflash_runtime.device.setup.settings import device_of
from dflash_runtime.device.setup.splitting import check_split
from dflash_runtime.engine import StopAt
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import DFlashError, PeerUnreachable
from dflash_runtime.line_process import ENDING_S, LineProcess
from dflash_runtime.rank_messages import (
    DraftSpec,
    Joining,
    Message,
    RankFailure,
    RankSpec,
    Stop,
    Stopping,
    from_line,
    to_line,
)
from dflash_runtime.ranks.exchanges import join, leave, open_store
from dflash_runtime.ranks.rank_group import ENDED, Ranks, current_event

MODULE = "dflash_runtime.rank_main"

START_S = 600.0
"""Seconds until all processes must have imported torch and read the headers of the pair."""

FIRST_S = 1.0
"""Seconds that a process which ended without a reason waits for the reason of another one."""

SETTLE_S = 10.0
"""Seconds that queued steps may take before the processes end anyway."""

STUCK_S = 20.0
"""Seconds after which this process ends if it does not notice that another rank has ended: its GPU waits for ever."""

logger = logging.getLogger(__name__)


class RankProcesses:
    """The processes of all ranks but this one, which is rank 0. `ranks` is the group that all have joined.

    `on_close` gets functions that free captured steps, which must not outlive the group.

    Raises:
        UnsupportedError, UsageError: see `check_split`.
        DFlashError: a process cannot start, or cannot read the pair.
    """

    def __init__(self, target: TargetSource, draft: DraftLike | None, config: EngineConfig) -> None:
        check_split(target, config)
        size = config.tensor_parallel_size
        self.config = config if config.seed is not None else replace(config, seed=randbits(63))
        self._loss: DFlashError | None = None
        self._is_lost, self.is_closing = threading.Event(), False
        self._watch: threading.Timer | None = None
        self._lock = threading.Lock()
        self.on_close: list[Callable[[], object]] = []
        self._device, store = device_of(config.device, 0, size), open_store()
        spec = RankSpec(
            rank=1, port=store.port, target=str(target.checkpoint.path.resolve()), draft=_draft_spec(draft),
            config=self.config, num_threads=max(1, torch.get_num_threads() // size),
        )  # fmt: skip
        self._others = [_RankProcess(self, replace(spec, rank=rank)) for rank in range(1, size)]
        try:
            self._hear_all(Joining)
            self.ranks: Ranks = join(0, size, self._device, store, config.all_reduce, self._explain)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [item.process.pid for item in self._others]

    def say(self, message: Message) -> None:
        """Send a call to every rank.

        Raises:
            DFlashError: a rank has ended.
        """
        if self._loss is not None:
            raise self._loss
        for item in self._others:
            item.say(message)

    def stop(self, at: StopAt) -> None:
        """Tell every rank the last step of a run, and wait until all know it.

        Raises:
            DFlashError: a rank has ended.
        """
        self.say(Stop(at.run, at.step))
        self._hear_all(Stopping)

    def close(self) -> None:
        """End the processes, after the steps that this GPU has queued: it would wait for the others for ever."""
        is_settled = self._is_settled()
        with self._lock:
            self.is_closing = True
        for item in self._others:
            item.process.end()
        for item in self._others:
            item.process.join()
        for free in self.on_close if is_settled else ():
            free()
        # The end of Python waits for this thread: a thread that came back from NCCL later would abort the process.
        leaving = threading.Thread(target=leave, args=(self._device,), name="rank-leaving", daemon=False)
        leaving.start()
        leaving.join(ENDING_S)  # it may wait for a GPU that waits for a lost rank
        if self._watch is not None and (is_settled or self._is_settled()):
            self._watch.cancel()
        elif self._watch is not None:
            signal.setitimer(signal.ITIMER_REAL, 2 * STUCK_S)  # the system ends a process that does not end by itself
        if leaving.is_alive():
            reason = self._loss or PeerUnreachable("NCCL does not end", id=ENDED)
            _start_timer(lambda: _end_process(reason) if leaving.is_alive() else None)

    def _is_settled(self) -> bool:
        """Whether this rank's device has ended its work, or ends it soon."""
        if self._device.type == "cpu":
            return True
        try:
            Ranks(0, len(self._others) + 1, explain=self._explain).wait(current_event(self._device), SETTLE_S)
        except DFlashError:
            return False
        return True

    def lose(self, reason: DFlashError) -> None:
        """Note that a rank has ended, and end the others, which would wait for it."""
        with self._lock:
            if self.is_closing or self._is_lost.is_set():
                return
            self._loss = reason
            self._watch = _start_timer(lambda: _end_process(reason))
            self._is_lost.set()  # last: the main thread then closes, and cancels the timer
        for item in self._others:
            item.process.kill()

    @property
    def is_lost(self) -> threading.Event:
        """Set when a rank has ended."""
        return self._is_lost

    def _explain(self, timeout_s: float) -> DFlashError | None:
        """See `ranks.rank_group.Explain`."""
        self._is_lost.wait(timeout_s)
        return self._loss

    def _hear_all(self, kind: type[Message]) -> None:
        """Wait for an answer of this kind from every process."""
        for item in self._others:
            for answer in item.answers(START_S):
                if isinstance(answer, kind):
                    break
            else:
                raise self._explain(ENDING_S) or PeerUnreachable(f"rank {item.rank} does not answer", id=ENDED)


class _RankProcess:
    """The process of one rank."""

    def __init__(self, owner: RankProcesses, spec: RankSpec) -> None:
        self.rank = spec.rank
        self._owner = owner
        self._answers: SimpleQueue[Message | None] = SimpleQueue()
        self.process = LineProcess(MODULE, f"rank {self.rank}", self._hear, self._ended)
        self.process.start_reading()
        self.say(spec)

    def say(self, message: Message) -> None:
        """Send a message. Does nothing if the process has ended."""
        self.process.say(to_line(message))

    def answers(self, timeout_s: float) -> Iterator[Message]:
        """Answers until the process ends, or until none comes in time."""
        with suppress(Empty):
            while (answer := self._answers.get(timeout=timeout_s)) is not None:
                yield answer

    def _hear(self, line: str) -> None:
        answer = from_line(line)
        if isinstance(answer, RankFailure):
            self._owner.lose(answer.to_error(self.rank))
        self._answers.put(answer)

    def _ended(self) -> None:
        self._answers.put(None)
        if not self._owner.is_closing and not self._owner.is_lost.wait(FIRST_S):
            reason = f"rank {self.rank} has ended: {self.process.last_words()}"
            self._owner.lose(PeerUnreachable(reason, id=ENDED))


def _draft_spec(draft: DraftLike | None) -> DraftSpec | None:
    if draft is None:
        return None
    checkpoint, names = draft.checkpoint, "stored"
    if isinstance(checkpoint, CanonicalCheckpoint):
        names = checkpoint.naming
    return DraftSpec(path=str(checkpoint.path.resolve()), config=draft.config, names=names)


def _start_timer(call: Callable[[], object]) -> threading.Timer:
    """Call a function in STUCK_S unless the timer is cancelled or the process has ended."""
    timer = threading.Timer(STUCK_S, call)
    timer.daemon = True
    timer.start()
    return timer


def _end_process(reason: DFlashError) -> None:
    """End this process. Its main thread waits for a GPU, and the GPU waits for a lost rank."""
    logger.error("%s", reason.message)
    os._exit(reason.exit_code)
