"""Drawings as SVG: no script, font or image from elsewhere.

On a page, colours come from its style: it defines the classes `s0` to `s5`, one for each colour. Elsewhere each element
has its own colours, so that a notebook shows an SVG without a style, and several SVGs never share one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from dflash_cli.figures.drawing import (
    COLOURS,
    DASHES,
    FILLS,
    MARKS,
    Area,
    Coordinates,
    Drawing,
    Label,
    Line,
    Mark,
    Shape,
    lay_out,
)
from dflash_cli.figures.figure import Figure

UNITS_PER_INCH = 100
TEXT, GRID, AXIS_MARK = "#1c2024", "#d9dde1", "#5c646d"
"""Colours of texts and lines that belong to no series."""
STYLES: Mapping[str, Mapping[str, object]] = {
    "grid": {"fill": "none", "stroke": GRID, "stroke-width": 1},
    "axis-mark": {"fill": "none", "stroke": AXIS_MARK, "stroke-width": 1},
    "line": {"fill": "none", "stroke-width": 1.6},
    "band": {"fill-opacity": 0.15, "stroke-width": 0.5},
    "bar": {"stroke-width": 1},
    "mark": {"stroke": "none"},
}
"""Attributes by role. The colour of a series is added to them."""


def page_svg(figure: Figure, number: int) -> str:
    """Return the figure as an element of a page. `number` makes its ids unique on the page."""
    drawing = lay_out(figure)
    head = [
        f'<svg viewBox="0 0 {drawing.width} {drawing.height:.1f}" role="img" '
        f'aria-labelledby="title{number} text{number}">',
        f'<title id="title{number}">{escape(figure.title)}</title>',
        f'<desc id="text{number}">{escape(figure.caption)} The table below has the numbers.</desc>',
    ]
    return "\n".join([*head, *_Painter(is_inline=False).elements(drawing), "</svg>"])


def to_svg(drawing: Drawing, title: str) -> str:
    """Return the drawing as a whole document, as wide as on paper."""
    width, height = (f"{size / UNITS_PER_INCH:.3f}in" for size in (drawing.width, drawing.height))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height:.1f}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="{drawing.text_size}" fill="{TEXT}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *_Painter(is_inline=True).elements(drawing), "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Painter:
    """Turns shapes into elements, with attributes of their own or with classes of the page."""

    is_inline: bool

    def elements(self, drawing: Drawing) -> list[str]:
        return [self._element(shape) for shape in drawing.shapes]

    def _element(self, shape: Shape) -> str:
        match shape:
            case Line(points, series, is_mark):
                role = "line" if series is not None else "axis-mark" if is_mark else "grid"
                dashes = DASHES[series % len(DASHES)] if series is not None else (4, 3) if is_mark else ()
                dashed = f' stroke-dasharray="{" ".join(map(str, dashes))}"' if dashes else ""
                return f'<polyline {self._style(role, series)}{dashed} points="{_corners(points)}"/>'
            case Area(points, series, role, note):
                fill = f' fill-opacity="{FILLS[series % len(FILLS)]}"' if role == "bar" else ""
                style = self._style(role, series)
                return f'<polygon {style}{fill} points="{_corners(points)}">{_title(note)}</polygon>'
            case Mark():
                return self._mark(shape)
            case Label(x, y, text, anchor, is_turned):
                turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if is_turned else ""
                return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'

    def _style(self, role: str, series: int | None) -> str:
        if not self.is_inline:
            return f'class="{role}"' if series is None else f'class="{role} s{series % len(COLOURS)}"'
        attributes = dict(STYLES[role])
        if series is not None:
            colour, _ = COLOURS[series % len(COLOURS)]
            attributes = {"fill": colour, "stroke": colour} | attributes
        return " ".join(f'{name}="{value}"' for name, value in attributes.items())

    def _mark(self, mark: Mark) -> str:
        """Return a circle, a square, a diamond or a triangle."""
        style, x, y = self._style("mark", mark.series), mark.x, mark.y
        kind = MARKS[mark.series % len(MARKS)]
        if kind == "●":
            return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="3.5">{_title(mark.note)}</circle>'
        if kind == "▲":
            corners = (x, y - 4), (x - 4, y + 3.2), (x + 4, y + 3.2)
            return f'<polygon {style} points="{_corners(corners)}">{_title(mark.note)}</polygon>'
        turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "◆" else ""
        return (
            f'<rect {style} x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"{turned}>'
            f"{_title(mark.note)}</rect>"
        )


def _title(note: str) -> str:
    return f"<title>{escape(note)}</title>" if note else ""


def _corners(points: Coordinates) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
