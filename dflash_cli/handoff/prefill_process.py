"""The prefill process of an evaluation, seen from the decode side: start it, send it messages, notice its end."""

import json
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from dflash_cli.handoff.prefill_messages import Opening, PrefillRequest
from dflash_cli.workers.messages import Refusal, WorkerSpec
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import DFlashError, PeerUnreachable
from dflash_runtime.line_process import LineProcess

Heard = TypeVar("Heard")
MODULE = "dflash_cli.handoff.prefill_main"


class PrefillProcess:
    """A process that prefills; `prefill_messages` lists the messages. Its stderr is logged.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, pair: WorkerSpec) -> None:
        self.loss: DFlashError | None = None  # why the process has ended
        self._refusal: DFlashError | None = None
        self._on_loss: Callable[[DFlashError], None] = lambda loss: None
        self._answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._process = LineProcess(MODULE, "prefill process", self._hear, self._ended)
        self._process.start_reading()
        self.say(pair)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: WorkerSpec | Opening | PrefillRequest) -> None:
        """Send a message. Does nothing if the process has ended."""
        self._process.say(json.dumps(to_json(message)) + "\n")

    def hear(self, kind: type[Heard]) -> Heard:
        """The next answer, an object of class `kind`. Waits for it.

        Raises:
            DFlashError: the process answered with an error, or has ended.
        """
        answer = self._answers.get()
        if answer is None:
            assert self.loss is not None
            self._answers.put(None)  # for the next call
            raise self.loss
        return from_json(kind, answer)

    def when_lost(self, act: Callable[[DFlashError], None]) -> None:
        """Call `act` when the process ends: now if it has already ended, otherwise later in another thread."""
        with self._lock:
            self._on_loss = act
        if self.loss is not None:
            act(self.loss)

    def close(self) -> None:
        """End the process. It has no work to finish."""
        self.when_lost(lambda loss: None)
        self._process.end()
        self._process.join()

    def _hear(self, line: str) -> None:
        answer = json.loads(line)
        if "exit_code" in answer:
            self._refusal = from_json(Refusal, answer).to_error()
        else:
            self._answers.put(answer)

    def _ended(self) -> None:
        ended = f"the prefill process has ended: {self._process.last_words()}"
        error = self._refusal or PeerUnreachable(ended, id="prefill-process-ended")
        with self._lock:
            self.loss, act = error, self._on_loss
        self._answers.put(None)
        act(error)
