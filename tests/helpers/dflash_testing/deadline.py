"""A time limit that turns a hang into a failure."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Hang(BaseException):
    """The body takes too long. No `except Exception` or `except OSError` of the tested code catches it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the body after `seconds`. Works only in the main thread, where tests run."""

    def stop(number: int, frame: object) -> None:
        raise Hang(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
