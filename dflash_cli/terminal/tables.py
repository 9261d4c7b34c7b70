"""Tables on stdout: drawn by Rich on a terminal, aligned text elsewhere."""

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.safe_text import safe_line

BARS = "█░#-"
"""Characters of bars, also on ASCII terminals."""

ASCII_MARKS = str.maketrans({"█": "#", "░": "-", "…": "~"})
"""Characters of tables and their replacements for ASCII terminals."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table on stdout. Columns of numbers are right-aligned, other columns left-aligned.

    A terminal that is too narrow for the table gets no column of bars.
    """
    rows = [[_encodable(safe_line(str(cell))) for cell in row] for row in rows]
    columns, title = list(map(safe_line, columns)), safe_line(title) if title else None
    if not console.is_terminal():
        _plain_table(columns, rows, title)
        return
    from rich.table import Table
    from rich.text import Text

    terminal = console.rich_stdout()
    if sum(_widths([columns, *rows])) + 2 * (len(columns) - 1) > terminal.width:
        columns, rows = _without_bars(columns, rows)
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if _is_column_numeric(rows, index) else "left"
        drawn.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=console.SEVERITY_STYLES.get(cell, "")) for cell in row))
    terminal.print(drawn)


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    """Print a table without Rich: rows are not folded, and lines do not end in spaces."""
    from rich.cells import cell_len

    shown = [columns, *rows] if any(columns) else rows
    widths = _widths(shown) or [0] * len(columns)
    rights = [_is_column_numeric(rows, index) for index in range(len(columns))]
    for line in [title] if title else []:
        console.result(line)
    for row in shown:
        parts = []
        for cell, width, is_right in zip(row, widths, rights, strict=True):
            space = " " * (width - cell_len(cell))
            parts += (
                [(space, "")] * is_right
                + [(cell, console.SEVERITY_STYLES.get(cell, ""))]
                + [(space, "")] * (not is_right)
            )
            parts.append(("  ", ""))
        while parts and not parts[-1][0].strip():
            parts.pop()
        console.spans(parts)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column in cells of the terminal."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _without_bars(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without its columns of bars. A column of bars has an empty heading."""
    is_bar = [not name and {*"".join(row[index] for row in rows)} <= {*BARS} for index, name in enumerate(columns)]
    kept = [index for index in range(len(columns)) if not is_bar[index]]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


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


def _is_numeric(cell: str) -> bool:
    return bool(cell) and cell.strip("+-~% ").replace(".", "", 1).replace(",", "").isdigit()
