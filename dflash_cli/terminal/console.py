"""The only writer to the terminal: results go to stdout, everything else to stderr.

Rich is imported only where something is drawn, so that short commands start at once.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from dflash_cli.terminal.interruption import ReaderGone, discard

if TYPE_CHECKING:
    import logging

    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn

SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}

BARS = "█░#-"
"""Characters of bars, also on ASCII terminals."""

ASCII_MARKS = str.maketrans({"█": "#", "░": "-", "…": "~"})
"""Characters of tables and their replacements for ASCII terminals."""

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, and characters that change the direction of a line."""
CONTROLS_OF_TEXT = re.compile(f"(?!\x1b\\[[02]m)(?![\t\n]){CONTROLS.pattern}")
"""The same without tabs, ends of lines, and the codes of `dim`."""

_is_quiet = False
_is_json = False
_has_reader = True
_verbosity = -1  # not set yet
_typed: tuple[re.Pattern[str], str] | None = None


def configure(*, quiet: bool | None = None, verbosity: int | None = None, json: bool | None = None) -> None:
    """Set how much is printed; None leaves a setting as it is.

    `quiet` prints only results, warnings and errors. A `verbosity` of 1 logs steps of our packages, 2 every detail.
    `json` prints JSON documents instead of text.
    """
    global _is_quiet, _verbosity, _is_json, _has_reader
    _has_reader = True
    _is_json = _is_json if json is None else json
    _is_quiet = _is_quiet if quiet is None else quiet
    if verbosity is not None and verbosity != _verbosity:
        _verbosity = verbosity
        _log_to_stderr(verbosity)


def name_commands(program: str, commands: Iterable[str]) -> None:
    """Show commands in messages with the name that the user typed: another package may own the script `dflash`."""
    global _typed
    shown = rf"(?<![\w./-])dflash(?= (?:{'|'.join(map(re.escape, commands))})\b)"
    _typed = None if program == "dflash" else (re.compile(shown), program)


def as_typed(text: str) -> str:
    """A text with its commands as the user would type them; see `name_commands`."""
    return text if _typed is None else _typed[0].sub(_typed[1], str(text))


def is_quiet() -> bool:
    """Whether only results, warnings and errors are printed."""
    return _is_quiet


def is_json() -> bool:
    """Whether results are printed as JSON documents."""
    return _is_json


def safe_line(text: str) -> str:
    """The text on one line, with control characters escaped: `\\x1b`, `\\n`.

    Names in files of others could otherwise forge lines of this tool, or change what a terminal shows.
    """
    return CONTROLS.sub(_escape, text)


def result(*lines: str) -> None:
    """Write lines of a result to stdout. Each argument is one line."""
    _write("".join(f"{safe_line(line)}\n" for line in lines))


def result_text(text: str) -> None:
    """Write text with lines of its own to stdout, such as an answer. A file or a pipe gets it unchanged."""
    _write(CONTROLS_OF_TEXT.sub(_escape, text) if is_terminal() else text)


def _write(text: str) -> None:
    """Write to stdout. Without a reader the text is lost, but the run goes on to its verdict."""
    global _has_reader
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _has_reader = False
        discard(sys.stdout)


def stop_without_reader() -> None:
    """End a run that only writes text, if the reader of stdout has gone.

    Raises:
        ReaderGone: a result could not be written.
    """
    if not _has_reader:
        raise ReaderGone


def page(text: str) -> None:
    """Show a long text in a pager on a terminal, or write it to stdout."""
    if not is_terminal():
        result_text(text)
        return
    import pydoc

    pydoc.pager(text)


def result_bytes(content: bytes) -> None:
    """Write the bytes of a file to stdout."""
    sys.stdout.flush()
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        result_text(content.decode())
    else:
        stream.write(content)
        stream.flush()


def result_json(document: Any) -> None:
    """Write the one JSON document of a `--json` run; see `json_document`."""
    result(json_document(document))


def show(result: Any, draw: Callable[[], None]) -> None:
    """Print a result: its document for --json, otherwise the text that `draw` prints."""
    if _is_json:
        result_json(getattr(result, "document", result))
    else:
        draw()


def json_document(document: Any, indent: int | None = None) -> str:
    """The text of a document: an object of a class with a KIND."""
    from dflash_runtime.documents import to_json

    text = json.dumps(to_json(document), ensure_ascii=False, allow_nan=False, indent=indent)
    return CONTROLS_OF_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def note(text: str) -> None:
    """Print a note on stderr, unless the run is quiet."""
    if not _is_quiet:
        _say("note", "cyan", text)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    _say("warning", "yellow", text)


def error(text: str, hint: str | None = None) -> None:
    """Print an error on one line of stderr, and a hint with the next command."""
    _say("error", "red", text)
    if hint:
        _say("hint", "cyan", hint)


def status(text: str) -> None:
    """Print a line about the progress of the run on stderr, unless the run is quiet."""
    if not _is_quiet:
        error_text(text)


def error_text(text: str) -> None:
    """Write a line to stderr, unless its reader has gone."""
    try:
        sys.stderr.write(safe_line(text) + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        discard(sys.stderr)


def confirm(question: str) -> bool:
    """Ask on stderr, and read the answer from stdin. Only `y` and `yes` agree; the end of stdin does not."""
    sys.stderr.write(f"{safe_line(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table on stdout. Columns of numbers are right-aligned, other columns left-aligned.

    A terminal that is too narrow for the table gets no column of bars.
    """
    rows = [[_encodable(safe_line(str(cell))) for cell in row] for row in rows]
    columns, title = list(map(safe_line, columns)), safe_line(title) if title else None
    if not is_terminal():
        _plain_table(columns, rows, title)
        return
    from rich.table import Table
    from rich.text import Text

    terminal = _rich_stdout()
    if sum(_widths([columns, *rows])) + 2 * (len(columns) - 1) > terminal.width:
        columns, rows = _without_bars(columns, rows)
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if _is_column_numeric(rows, index) else "left"
        drawn.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=SEVERITY_STYLES.get(cell, "")) for cell in row))
    terminal.print(drawn)


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def has_colours(stream: TextIO) -> bool:
    """Whether a stream gets colours: a terminal that is not dumb, or any with FORCE_COLOR, and none with NO_COLOR."""
    is_capable = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return not os.environ.get("NO_COLOR") and (is_capable or bool(os.environ.get("FORCE_COLOR")))


def dim(text: str) -> str:
    """The text, dimmed if stdout has colours."""
    return f"\x1b[2m{text}\x1b[0m" if has_colours(sys.stdout) else text


def severity_line(before: str, severity: str, after: str) -> None:
    """Print one line on stdout with a coloured severity. `severity` may be padded."""
    spans([(before, ""), (severity, SEVERITY_STYLES.get(severity.strip(), "")), (after, "")])


def spans(parts: Iterable[tuple[str, str]]) -> None:
    """Print one line of (text, style) parts on stdout, coloured if stdout has colours. The line is not wrapped."""
    parts = [(safe_line(text), style) for text, style in parts]
    if not has_colours(sys.stdout):
        result("".join(text for text, _ in parts))
        return
    from rich.text import Text

    _rich_stdout().print(Text.assemble(*parts), soft_wrap=True)


def progress() -> "Progress":
    """Bars with `figures` on stderr, hidden if stderr is not a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    texts = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}")
    return _display(*texts, TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a spinner and the elapsed seconds while the block runs, if stderr is a terminal."""
    if _is_quiet or not sys.stderr.isatty():
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

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=_is_quiet or not console.is_terminal)


WIDEST_BAR = 16


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
        if self._is_terminal and not _is_quiet:
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
            status(self.line(num_done, estimate))

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


def _log_to_stderr(verbosity: int) -> None:
    """Let the packages of this project log warnings (0), also steps (1) or every detail (2) to stderr.

    A logged notice is left out, because the command prints it.
    """
    import logging

    from dflash_runtime.notices import Notice

    warnings = logging.Handler(logging.WARNING)
    warnings.addFilter(lambda record: not isinstance(record.msg, Notice))
    warnings.emit = lambda record: warn(record.getMessage())  # type: ignore[method-assign]
    for name in ("dflash_cli", "dflash_runtime"):
        logger = logging.getLogger(name)
        logger.handlers = [warnings]
        if verbosity:
            steps = logging.Handler()
            steps.addFilter(lambda record: record.levelno < logging.WARNING)
            steps.emit = _tell_step  # type: ignore[method-assign]
            logger.addHandler(steps)
            logger.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)


def _tell_step(record: "logging.LogRecord") -> None:
    """Print a logged step, with -vv also its module."""
    where = f"{record.name}: " if _verbosity > 1 else ""
    _say(record.levelname.lower(), "dim", f"{where}{record.getMessage()}")


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    """Print a table without Rich: rows are not folded, and lines do not end in spaces."""
    from rich.cells import cell_len

    shown = [columns, *rows] if any(columns) else rows
    widths = _widths(shown) or [0] * len(columns)
    rights = [_is_column_numeric(rows, index) for index in range(len(columns))]
    for line in [title] if title else []:
        result(line)
    for row in shown:
        parts = []
        for cell, width, is_right in zip(row, widths, rights, strict=True):
            space = " " * (width - cell_len(cell))
            parts += [(space, "")] * is_right + [(cell, SEVERITY_STYLES.get(cell, ""))] + [(space, "")] * (not is_right)
            parts.append(("  ", ""))
        while parts and not parts[-1][0].strip():
            parts.pop()
        spans(parts)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column in cells of the terminal."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _without_bars(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without its columns of bars. A column of bars has an empty heading."""
    is_bar = [not name and {*"".join(row[index] for row in rows)} <= {*BARS} for index, name in enumerate(columns)]
    kept = [index for index in range(len(columns)) if not is_bar[index]]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _rich_stdout() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def _encodable(text: str) -> str:
    """The text, with characters replaced that stdout cannot encode."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(ASCII_MARKS).encode("ascii", "backslashreplace").decode()
    return text


def _is_column_numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    """Whether every cell is a number or a dash, which stands for a missing number."""
    cells = {row[index] for row in rows} - {"-"}
    return bool(cells) and all(map(_is_numeric, cells))


def _say(label: str, colour: str, text: str) -> None:
    text = as_typed(text)
    if has_colours(sys.stderr):
        from rich.console import Console
        from rich.text import Text

        line = Text.assemble((f"{label}: ", f"bold {colour}"), safe_line(text))
        Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    else:
        error_text(f"{label}: {text}")


def _is_numeric(cell: str) -> bool:
    return bool(cell) and cell.strip("+-~% ").replace(".", "", 1).replace(",", "").isdigit()
