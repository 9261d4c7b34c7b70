"""A figure as an SVG element of a page: no script, font or image from elsewhere. Colours come from the page's style.

The page defines the classes `s0` to `s5`, one for each colour.
"""

from html import escape

from dflash_cli.publishing.drawing import COLOURS, MARKS, WIDTH, Area, Coordinates, Label, Line, Mark, Shape, lay_out
from dflash_cli.publishing.figures import Figure


def draw_svg(figure: Figure, number: int) -> str:
    """Return the figure as one `<svg>` element. `number` makes its ids unique on the page."""
    drawing = lay_out(figure)
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {drawing.height}" role="img" aria-labelledby="title{number} text{number}">',
            f'<title id="title{number}">{escape(figure.title)}</title>',
            f'<desc id="text{number}">{escape(figure.caption)} The table below has the numbers.</desc>',
            *map(_element, drawing.shapes),
            "</svg>",
        ]
    )


def _element(shape: Shape) -> str:
    match shape:
        case Line(points, series):
            style = "grid" if series is None else f"line {_colour(series)}"
            return f'<polyline class="{style}" points="{_corners(points)}"/>'
        case Area(points, series, role, note):
            return f'<polygon class="{role} {_colour(series)}" points="{_corners(points)}">{_title(note)}</polygon>'
        case Mark():
            return _mark(shape)
        case Label(x, y, text, anchor):
            return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(mark: Mark) -> str:
    """Return a circle, a square or a diamond."""
    style, x, y = f"mark {_colour(mark.series)}", mark.x, mark.y
    kind = MARKS[mark.series % len(MARKS)]
    if kind == "●":
        return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{_title(mark.note)}</circle>'
    turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "◆" else ""
    return (
        f'<rect class="{style}" x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"{turned}>'
        f"{_title(mark.note)}</rect>"
    )


def _colour(series: int) -> str:
    return f"s{series % len(COLOURS)}"


def _title(note: str) -> str:
    return f"<title>{escape(note)}</title>" if note else ""


def _corners(points: Coordinates) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
