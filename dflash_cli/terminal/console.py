"""The only writer to the terminal: results go to stdout, everything else to stderr.

Rich is imported only where something is drawn, so that short commands start at once.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from dflash_cli.terminal.interruption import ReaderGone, discard
from dflash_cli.terminal.safe_text import CONTROLS_OF_TEXT, safe_line, safe_text

if TYPE_CHECKING:
    import logging

    from rich.console import Console

SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}

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


def result(*lines: str) -> None:
    """Write lines of a result to stdout. Each argument is one line."""
    _write("".join(f"{safe_line(line)}\n" for line in lines))


def result_text(text: str) -> None:
    """Write text with lines of its own to stdout, such as an answer. A file or a pipe gets it unchanged."""
    _write(safe_text(text) if is_terminal() else text)


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

    rich_stdout().print(Text.assemble(*parts), soft_wrap=True)


def rich_stdout() -> "Console":
    """Rich's console on stdout, for what Rich draws."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


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


def _say(label: str, colour: str, text: str) -> None:
    text = as_typed(text)
    if has_colours(sys.stderr):
        from rich.console import Console
        from rich.text import Text

        line = Text.assemble((f"{label}: ", f"bold {colour}"), safe_line(text))
        Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    else:
        error_text(f"{label}: {text}")
