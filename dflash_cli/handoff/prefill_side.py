"""The prefill process as its run sees it: started, told what to prefill, and missed when it is gone."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from dflash_runtime.errors import DFlashError, PeerUnreachable

MODULE = "dflash_cli.handoff.prefill_process"
ENDING_S = 5.0
"""How long the process is given to end by itself."""
KEPT_LINES = 20

logger = logging.getLogger(__name__)


class PrefillProcess:
    """A process that prefills; see `prefill_process` for what is said. What it writes to stderr is logged.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, pair: Mapping[str, Any]) -> None:
        self.loss: DFlashError | None = None  # why it is gone, once it is
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
            start_new_session=True,  # Ctrl-C is for the run, which then ends this process
        )
        self._log = threading.Thread(target=self._read_log, name="prefill-log", daemon=True)
        self._reader = threading.Thread(target=self._read, name="prefill-answers", daemon=True)
        self._log.start()
        self._reader.start()
        self.say(pair)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: Mapping[str, Any]) -> None:
        """Tell it something; where it is gone, nobody hears."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            DFlashError: it was refused, or is gone.
        """
        answer = self._answers.get()
        if answer is None:
            assert self.loss is not None
            self._answers.put(None)  # for who asks once more
            raise self.loss
        return answer

    def when_lost(self, act: Callable[[DFlashError], None]) -> None:
        """Call `act` once it is gone, at once if it is already; in a thread of its own otherwise."""
        with self._lock:
            self._on_loss = act
        if self.loss is not None:
            act(self.loss)

    def close(self) -> None:
        """End it; it has nothing to finish."""
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
                error = DFlashError(answer["message"], hint=answer["hint"])
                error.exit_code = answer["exit_code"]
            else:
                self._answers.put(answer)
        self._log.join(ENDING_S)
        error = error or PeerUnreachable(f"the prefill process has ended: {self._last_word()}")
        with self._lock:
            self.loss, act = error, self._on_loss
        self._answers.put(None)
        act(error)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_lines.append(line.rstrip())
            logger.info("prefill process: %s", line.rstrip())

    def _last_word(self) -> str:
        """How it ended: by a signal, or with the last line that it wrote."""
        code = self._process.wait()
        if code < 0:
            return f"signal {-code}"
        return self._last_lines[-1] if self._last_lines else f"exit code {code}"
