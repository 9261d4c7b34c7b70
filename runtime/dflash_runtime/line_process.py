"""A process of our own that reads lines and writes lines. Its stderr is logged."""

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

ENDING_S = 5.0
"""Seconds that a process has to end by itself."""

KEPT_LINES = 20

logger = logging.getLogger(__name__)


class LineProcess:
    """A Python module that runs in a process of its own, until its stdin is closed.

    module   is run as `python -m`
    name     of the process in the log
    hear     is called with each line of its stdout, in a thread
    ended    is called after the last line, in the same thread

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, name: str, hear: Callable[[str], None], ended: Callable[[], None]) -> None:
        self._name, self._hear, self._ended = name, hear, ended
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C reaches the first process alone, which then ends this one
        )
        self._log = threading.Thread(target=self._read_log, name=f"{name}-log", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{name}-lines", daemon=True)

    def start_reading(self) -> None:
        """Begin to call `hear`."""
        self._log.start()
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: str) -> None:
        """Send a line. Does nothing if the process has ended."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def join(self) -> None:
        """Wait for the end of the process, and close its pipes."""
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread, stream in ((self._reader, self._process.stdout), (self._log, self._process.stderr)):
            if thread is not threading.current_thread():
                thread.join(ENDING_S)
            if stream is not None and not thread.is_alive():
                stream.close()

    def last_words(self) -> str:
        """The signal that ended the process, or the last line that it wrote. Waits for its end."""
        code = self._process.wait()
        if code < 0:
            return f"signal {-code}"
        return self._last_lines[-1] if self._last_lines else f"exit code {code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(line)
        self._log.join(ENDING_S)
        self._ended()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_lines.append(line.rstrip())
            logger.info("%s: %s", self._name, line.rstrip())
