"""Results with a short `repr` in Python, and with tables and figures in a notebook."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dflash_cli.terminal.safe_text import safe_line

if TYPE_CHECKING:
    from dflash_cli.figures.figure import Figure

MAX_ROWS = 12
"""The rows of a table that `repr` shows."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


class Shown:
    """Base of results. Subclasses define `summary`, `shown_tables` if they have tables, and `document`.

    A subclass that is itself a document inherits `document`.
    """

    @property
    def document(self) -> Any:
        """The document that --json prints: an object of a class with a KIND."""
        return self

    def to_json(self) -> dict[str, Any]:
        """The JSON document of the result."""
        from dflash_runtime.documents import to_json

        found: dict[str, Any] = to_json(self.document)
        return found

    def summary(self) -> Sequence[str]:
        """A few lines about the result, the most important line first."""
        raise NotImplementedError

    def shown_tables(self) -> Mapping[str, Table]:
        """The tables of the result: title -> columns and rows."""
        return {}

    def shown_figures(self) -> "Sequence[Figure]":
        """The figures of the result, the most important one first."""
        return ()

    def __repr__(self) -> str:
        blocks = ["\n".join(map(safe_line, self.summary()))]
        for title, (columns, rows) in list(self.shown_tables().items())[:1]:
            blocks.append("\n".join(filter(None, [title, *_lines(columns, rows[:MAX_ROWS])])))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        parts = [f"<p>{'<br>'.join(escape(line) for line in self.summary())}</p>"]
        for title, (columns, rows) in self.shown_tables().items():
            head = "".join(f"<th>{escape(name)}</th>" for name in columns)
            body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
            caption = f"<caption>{escape(title)}</caption>" if title else ""
            parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return "".join([*parts, *(f"<figure>{drawing}</figure>" for drawing in self._drawings())])

    def _repr_svg_(self) -> str | None:
        return next(iter(self._drawings()), None)

    def _drawings(self) -> "Iterator[str]":
        """Yield each figure as SVG with colours of its own, so that a notebook needs no style."""
        from dflash_cli.figures.drawing import lay_out
        from dflash_cli.figures.svg_figure import to_svg

        for figure in self.shown_figures():
            yield to_svg(lay_out(figure), figure.title)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of aligned columns."""
    cells = [[safe_line(str(cell)) for cell in row] for row in ([columns] if any(columns) else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
