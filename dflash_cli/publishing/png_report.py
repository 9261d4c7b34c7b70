"""The figures of a report as one PNG, painted with matplotlib (extra: plot)."""

import io
from collections.abc import Sequence
from typing import Any

from dflash_cli.acceptance.acceptance_report import headline
from dflash_cli.comparing.comparison_report import letter
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_cli.publishing.drawing import COLOURS, MARKS, TEXT_SIZE, WIDTH, Area, Label, Line, Mark, Shape, lay_out
from dflash_cli.publishing.figures import find_figures
from dflash_runtime.errors import UnsupportedError

NUM_COLUMNS, MARGIN, TITLE_HEIGHT, HEAD_HEIGHT = 2, 16, 30, 20
UNITS_PER_INCH, DOTS_PER_INCH = 100, 150
POINTS = 72 / UNITS_PER_INCH
"""Points of a font or a line in one drawing unit."""
MARKERS = dict(zip(MARKS, "osD", strict=True))
TEXT, QUIET, GRID = "#1c2024", "#5c646d", "#e7eaed"


def to_png(results: Sequence[StoredEvaluation]) -> bytes:
    """Return the figures as a PNG in two columns, below the headline of each result.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UnsupportedError(
            "a PNG needs matplotlib, which is not installed",
            id="no-matplotlib",
            field="--format",
            found="png",
            hint="pip install 'dflash-cli[plot]'",
        ) from error
    figures = [(figure.title, lay_out(figure)) for figure in find_figures(results)]
    rows = [figures[start : start + NUM_COLUMNS] for start in range(0, len(figures), NUM_COLUMNS)]
    heights = [TITLE_HEIGHT + max(drawing.height for _, drawing in row) for row in rows]
    width = NUM_COLUMNS * (WIDTH + MARGIN) + MARGIN
    height = 2 * MARGIN + HEAD_HEIGHT * len(results) + sum(heights)
    canvas = Canvas(figsize=(width / UNITS_PER_INCH, height / UNITS_PER_INCH))
    axes = canvas.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    top: float = MARGIN
    for index, result in enumerate(results):
        _paint_head(axes, index, result, top, is_only=len(results) == 1)
        top += HEAD_HEIGHT
    for row, row_height in zip(rows, heights, strict=True):
        for column, (title, drawing) in enumerate(row):
            left = MARGIN + column * (WIDTH + MARGIN)
            _paint_text(axes, left, top + TITLE_HEIGHT - 8, title, TEXT, ha="left")
            for shape in drawing.shapes:
                _paint(axes, shape, left, top + TITLE_HEIGHT)
        top += row_height
    stream = io.BytesIO()
    canvas.savefig(stream, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()


def _paint_head(axes: Any, index: int, result: StoredEvaluation, top: float, *, is_only: bool) -> None:
    """Paint a result's headline. With several results, its mark comes first, as the legend of the figures."""
    text = f"{letter(index)}  {result.name}: {headline(result.evaluation)}"
    if not is_only:
        _paint(axes, Mark(8, 10, index, ""), MARGIN, top)
    _paint_text(axes, MARGIN + (0 if is_only else 20), top + 14, text, TEXT, ha="left")


def _paint(axes: Any, shape: Shape, left: float, top: float) -> None:
    match shape:
        case Line(points, series):
            style = {"color": GRID, "linewidth": POINTS, "zorder": 1} if series is None else _line_style(series)
            axes.plot([left + x for x, _ in points], [top + y for _, y in points], **style)
        case Area(points, series, role):
            opacity = 0.18 if role == "band" else 0.85
            xs, ys = [left + x for x, _ in points], [top + y for _, y in points]
            axes.fill(xs, ys, color=_colour(series), alpha=opacity, linewidth=0, zorder=2)
        case Mark(x, y, series):
            marker = MARKERS[MARKS[series % len(MARKS)]]
            axes.plot([left + x], [top + y], color=_colour(series), marker=marker, markersize=7 * POINTS)
        case Label(x, y, text, anchor):
            align = {"start": "left", "middle": "center", "end": "right"}[anchor]
            _paint_text(axes, left + x, top + y, text, QUIET, ha=align)


def _paint_text(axes: Any, x: float, y: float, text: str, colour: str, *, ha: str) -> None:
    """Paint a text without formulas: by default, matplotlib reads `$` as the start of one."""
    axes.text(x, y, text, color=colour, ha=ha, fontsize=TEXT_SIZE * POINTS, parse_math=False)


def _line_style(series: int) -> dict[str, Any]:
    return {"color": _colour(series), "linewidth": 2 * POINTS}


def _colour(series: int) -> str:
    light, _ = COLOURS[series % len(COLOURS)]
    return light
