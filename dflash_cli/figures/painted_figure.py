"""Drawings as PNG and PDF, painted with matplotlib (extra: plot).

A PDF has vector shapes and text in an embedded TrueType font (type 42), as publishers ask for. The font is DejaVu Sans,
which every matplotlib brings along. Both formats have the same bytes
in each run with the same release of matplotlib.
"""

import io
from typing import Any, Literal

from dflash_cli.figures.drawing import COLOURS, COLUMN, DASHES, FILLS, MARKS, Area, Drawing, Label, Line, Mark, Shape
from dflash_cli.figures.svg_figure import AXIS_MARK, GRID, TEXT, UNITS_PER_INCH
from dflash_runtime.errors import UnsupportedError

POINTS = 72 / UNITS_PER_INCH
"""Points of a font or a line in one drawing unit."""
MARKERS = dict(zip(MARKS, "osD^", strict=True))
NO_DATES: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def paint(drawing: Drawing, form: Literal["png", "pdf"]) -> bytes:
    """Return the drawing as a file of this form. A narrow PNG has 300 dots per inch, a wide one 150.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UnsupportedError(
            f"a {form.upper()} needs matplotlib, which is not installed",
            id="no-matplotlib",
            field="--format",
            found=form,
            hint="pip install 'dflash-cli[plot]'",
        ) from error
    stream = io.BytesIO()
    with rc_context({"pdf.fonttype": 42, "font.family": ["DejaVu Sans"]}):
        canvas = Canvas(figsize=(drawing.width / UNITS_PER_INCH, drawing.height / UNITS_PER_INCH))
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
        axes.set_axis_off()
        for place, shape in enumerate(drawing.shapes):
            _paint(axes, shape, drawing.text_size * POINTS, place)
        dots = 300 if drawing.width <= COLUMN.width else 150
        canvas.savefig(stream, format=form, dpi=dots, metadata=NO_DATES[form])
    return stream.getvalue()


def _paint(axes: Any, shape: Shape, text_size: float, order: int) -> None:
    match shape:
        case Line(points, series, is_mark):
            colour = _colour(series) if series is not None else AXIS_MARK if is_mark else GRID
            dashes = DASHES[series % len(DASHES)] if series is not None else (4, 3) if is_mark else ()
            width = (1.6 if series is not None else 1) * POINTS
            # A line style counts in widths of its line.
            style = (0, tuple(length * POINTS / width for length in dashes)) if dashes else "-"
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, linestyle=style, zorder=order)
        case Area(points, series, role):
            opacity = 0.15 if role == "band" else FILLS[series % len(FILLS)]
            width = (0.5 if role == "band" else 1) * POINTS
            xs, ys = zip(*points, strict=True)
            axes.fill(xs, ys, color=_colour(series), alpha=opacity, linewidth=0, zorder=order)
            axes.fill(xs, ys, fill=False, edgecolor=_colour(series), linewidth=width, zorder=order)
        case Mark(x, y, series):
            marker = MARKERS[MARKS[series % len(MARKS)]]
            axes.plot([x], [y], color=_colour(series), marker=marker, markersize=6 * POINTS, zorder=order)
        case Label(x, y, text, anchor, is_turned):
            align = {"start": "left", "middle": "center", "end": "right"}[anchor]
            turned = {"rotation": 90, "ha": "right", "va": "center"} if is_turned else {"ha": align}
            # By default, matplotlib reads `$` as the start of a formula.
            axes.text(x, y, text, color=TEXT, fontsize=text_size, parse_math=False, zorder=order, **turned)


def _colour(series: int) -> str:
    light, _ = COLOURS[series % len(COLOURS)]
    return light
