"""Ctrl-C between steps instead of inside one: a rank that leaves a step would let the others wait for it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

Caught = tuple[int, FrameType | None]


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Act on a Ctrl-C when the block ends. A second one acts at once. Other threads than the main one get none."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    act, caught = previous, list[Caught]()

    def note(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            act(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if len(caught) == 1:
        act(*caught[0])
