"""The progress of a run on stderr: bars, a spinner, and a meter with an estimate."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from dflash_cli.terminal import console
from dflash_cli.terminal.safe_text import safe_line

if TYPE_CHECKING:
    from rich.progress import BarColumn, Progress, ProgressColumn
WIDEST_BAR = 16


def bars() -> "Progress":
    """Bars with `figures` on stderr, hidden if stderr is not a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    texts = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}")
    return _display(*texts, TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a spinner and the elapsed seconds while the block runs, if stderr is a terminal."""
    if console.is_quiet() or not sys.stderr.isatty():
        yield
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with _display(SpinnerColumn(), TextColumn(text, markup=False), TimeElapsedColumn()) as display:
        display.add_task(text)
        yield


def _display(*columns: "ProgressColumn") -> "Progress":
    """A display of these columns on stderr that disappears at its end."""
    from rich.console import Console
    from rich.progress import Progress

    stderr = Console(stderr=True)
    is_hidden = console.is_quiet() or not stderr.is_terminal
    return Progress(*columns, console=stderr, transient=True, disable=is_hidden)


class Meter:
    """Progress of a run: `12/64 prompts  acceptance 3.41 [3.2, 3.6]  0:12 left`, on stderr.

    A terminal shows a bar. A log gets a line after every SECONDS and SHARE of the work.
    """

    SECONDS = 10.0
    SHARE = 0.1
    REDRAW_S = 0.2

    def __init__(self, total: int, unit: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._unit = unit
        self._clock = clock
        self._started = clock()
        self._said_at, self._said_done = self._started, 0
        self._num_before = 0
        self._is_terminal = sys.stderr.isatty()
        self._display: Progress | None = None
        self._bar: BarColumn
        self._drawn_at = self._started

    def __enter__(self) -> Self:
        if self._is_terminal and not console.is_quiet():
            from rich.progress import BarColumn, TextColumn

            self._bar = BarColumn(bar_width=WIDEST_BAR)
            self._display = _display(self._bar, TextColumn("{task.description}", markup=False))
            self._display.start()
            self._display.add_task(self.line(0, ""), total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def resume(self, num_done: int) -> None:
        """Count `num_done` as done before this run, and leave it out of the estimate of the time left."""
        self._num_before = self._said_done = num_done

    def expect(self, total: int) -> None:
        """Change the total, if the amount of work is known only after a part of it."""
        if total != self._total and self._display is not None:
            (task,) = self._display.task_ids
            self._display.update(task, total=total)
        self._total = total

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def is_due_again(self) -> bool:
        """Whether a bar is shown that has not changed for REDRAW_S."""
        return self._display is not None and self._clock() - self._drawn_at >= self.REDRAW_S

    def update(self, num_done: int, estimate: str = "", *, partial: float = 0.0) -> None:
        """Show how much is done, and the estimate so far. `partial` is the finished share of running work."""
        if self._display is not None:
            self._drawn_at = self._clock()
            line = self.line(num_done, estimate, partial)
            self._bar.bar_width = max(4, min(WIDEST_BAR, self._display.console.width - len(line) - 2))
            (task,) = self._display.task_ids
            self._display.update(task, completed=num_done + partial, description=line)
        elif not self._is_terminal and self._is_due(num_done):
            self._said_at, self._said_done = self._clock(), num_done
            console.status(self.line(num_done, estimate))

    def line(self, num_done: int, estimate: str, partial: float = 0.0) -> str:
        """`12/64 prompts  acceptance 3.41 [3.2, 3.6]  0:12 left`."""
        estimate = safe_line(estimate)
        parts = [f"{num_done}/{self._total} {self._unit}", estimate]
        if self._num_before < num_done + partial < self._total:
            rate = (num_done + partial - self._num_before) / max(self.seconds, 1e-9)
            left = (self._total - num_done - partial) / rate
            parts.append(f"{_duration(left)} left")
        return "  ".join(part for part in parts if part)

    def _is_due(self, num_done: int) -> bool:
        """Whether SECONDS and SHARE of the work have passed since the last line."""
        return self._clock() - self._said_at >= self.SECONDS and num_done - self._said_done >= self.SHARE * self._total


def _duration(seconds: float) -> str:
    """`0:12`, `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
