"""Where the events of a run go: text to stdout, rows to a file, figures to a progress line."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from dflash_cli import console
from dflash_cli.generation import Answer, Event, Tally
from dflash_cli.output import atomic_text, json_line
from dflash_cli.prompts import PromptRow

Sink = Callable[[Event], None]


class TextSink:
    """Streams each row to stdout, in input order; a row behind another waits its turn. Ids where there is no text."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self._pending = {row.index: row.num_turns for row in rows}
        self._held: dict[int, list[str]] = {row.index: [] for row in rows}

    def __call__(self, event: Event) -> None:
        index = event.row.index
        ids = "".join(f"{token} " for token in event.token_ids)
        self._held[index].append(ids if event.text is None else event.text)
        if event.answer is not None:
            self._held[index].append("\n")
            self._pending[index] -= 1
        self._release()

    def _release(self) -> None:
        """Print what the first unfinished row has, and every finished row before it."""
        while self._held:
            index = next(iter(self._held))
            text = "".join(self._held[index])
            self._held[index].clear()
            if text:
                console.result(text, end="")
            if self._pending[index]:
                return
            del self._held[index]


class RowSink:
    """Writes a row an answer, in input order, turns in theirs."""

    def __init__(self, rows: Sequence[PromptRow], write: Callable[[str], object]) -> None:
        self._order = iter([(row.index, turn) for row in rows for turn in range(row.num_turns)])
        self._next = next(self._order, None)
        self._held: dict[tuple[int, int], Answer] = {}
        self._write = write

    def __call__(self, event: Event) -> None:
        if event.answer is None:
            return
        self._held[event.row.index, event.answer.turn] = event.answer
        while self._next is not None and self._next in self._held:
            self._write(json_line(self._held.pop(self._next).to_json()))
            self._next = next(self._order, None)


class ProgressSink:
    """A bar over answers on stderr, with tokens a second and acceptance so far."""

    def __init__(self, tally: Tally, num_answers: int, label: str, stack: ExitStack) -> None:
        self._tally = tally
        self._progress = stack.enter_context(console.progress())
        self._task = self._progress.add_task(label, total=num_answers, figures="")
        self._started = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if event.answer is not None:
            figures = self._tally.figures(time.perf_counter() - self._started)
            self._progress.update(self._task, advance=1, figures=figures)


def open_row_sink(rows: Sequence[PromptRow], output: str, stack: ExitStack) -> RowSink:
    """A sink that writes rows to stdout (`-`) or to a file that appears when the run is complete."""
    if output == "-":
        return RowSink(rows, lambda line: console.result(line, end=""))
    return RowSink(rows, stack.enter_context(atomic_text(Path(output))).write)
