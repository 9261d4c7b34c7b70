"""The prefill process of an evaluation, seen from the decode side: start it, send it messages, notice its end."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from dflash_cli.handoff.prefill_messages import Opening, PrefillRequest
from dflash_cli.workers.messages import Refusal, WorkerSpec
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import DFlashError, PeerUnreachable

Heard = TypeVar("Heard")
MODULE = "dflash_cli.handoff.prefill_main"
ENDING_S = 5.0
"""Seconds the process has to end by itself."""
KEPT_LINES = 20

logger = logging.getLogger(__name__)


class PrefillProcess:
    """A process that prefills; `prefill_messages` lists the messages. Its stderr is logged.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, pair: WorkerSpec) -> None:
        self.loss: DFlashError | None = None  # why the process has ended
        self._on_loss: Callable[[DFlashError], None] = lambda loss: None
        self._answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C reaches the run alone, which then ends this process
        )
        self._log = threading.Thread(target=self._read_log, name="prefill-log", daemon=True)
        self._reader = threading.Thread(target=self._read, name="prefill-answers", daemon=True)
        self._log.start()
        self._reader.start()
        self.say(pair)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: WorkerSpec | Opening | PrefillRequest) -> None:
        """Send a message. Does nothing if the process has ended."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(to_json(message)) + "\n")
            self._process.stdin.flush()

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
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread, stream in ((self._reader, self._process.stdout), (self._log, self._process.stderr)):
            thread.join(ENDING_S)
            if stream is not None and not thread.is_alive():
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        error: DFlashError | None = None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "exit_code" in answer:
                error = from_json(Refusal, answer).to_error()
            else:
                self._answers.put(answer)
        self._log.join(ENDING_S)
        ended = f"the prefill process has ended: {self._last_words()}"
        error = error or PeerUnreachable(ended, id="prefill-process-ended")
        with self._lock:
            self.loss, act = error, self._on_loss
        self._answers.put(None)
        act(error)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_lines.append(line.rstrip())
            logger.info("prefill process: %s", line.rstrip())

    def _last_words(self) -> str:
        """The signal that ended the process, or the last line that it wrote."""
        code = self._process.wait()
        if code < 0:
            return f"signal {-code}"
        return self._last_lines[-1] if self._last_lines else f"exit code {code}"
