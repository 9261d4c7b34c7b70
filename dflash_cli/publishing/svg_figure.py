"""A figure as SVG that stands in a page: no script, no font or image from elsewhere, colours from the page's style.

A series is told by its mark as well as by its colour, whose classes `s0` to `s5` the page defines.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dflash_cli.publishing.figures import Figure, Point, Series

WIDTH, ROW, PLOT_HEIGHT = 640, 26, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 40
NAME_LEFT, NAME_LENGTH = 150, 20
COLOURS = 6
TICKS = 6


@dataclass(frozen=True, slots=True)
class _Plot:
    """The rectangle of a figure in which values are drawn, in units of the drawing."""

    figure: Figure
    left: float
    top: float
    width: float
    height: float

    def across(self, place: float, count: int) -> float:
        """The middle of one of `count` equal columns."""
        return self.left + self.width * (place + 0.5) / count

    def up(self, value: float) -> float:
        return self.top + self.height * (1 - self._share(value))

    def along(self, value: float) -> float:
        return self.left + self.width * self._share(value)

    def _share(self, value: float) -> float:
        return (value - self.figure.low) / (self.figure.high - self.figure.low)

    @property
    def ticks(self) -> list[float]:
        """Round numbers on the axis of values, of which there are at most `TICKS`."""
        low, high = self.figure.low, self.figure.high
        rough = (high - low) / TICKS
        unit = 10 ** math.floor(math.log10(rough))
        step = unit * next(size for size in (1, 2, 5, 10) if size * unit >= rough)
        return [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw_svg(figure: Figure, number: int) -> str:
    """The figure as one `<svg>` element; `number` makes its ids its own on the page."""
    if figure.kind == "dots":
        height = TOP + BOTTOM + ROW * len(figure.labels)
        plot = _Plot(figure, NAME_LEFT, TOP, WIDTH - NAME_LEFT - RIGHT, height - TOP - BOTTOM)
    else:
        height = PLOT_HEIGHT
        plot = _Plot(figure, LEFT, TOP, WIDTH - LEFT - RIGHT, height - TOP - BOTTOM)
    body = {"curve": _curves, "bars": _bars, "dots": _dots}[figure.kind](plot)
    frame = _rows(plot) if figure.kind == "dots" else _columns(plot)
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title{number} text{number}">',
            f'<title id="title{number}">{escape(figure.title)}</title>',
            f'<desc id="text{number}">{escape(figure.caption)} The table below has the figures.</desc>',
            *frame,
            *body,
            "</svg>",
        ]
    )


def _columns(plot: _Plot) -> Iterator[str]:
    """Axes of a figure whose labels stand below it."""
    right, bottom = plot.left + plot.width, plot.top + plot.height
    for tick in plot.ticks:
        height = plot.up(tick)
        yield f'<line class="grid" x1="{plot.left}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text x="{plot.left - 6}" y="{height + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
    count = len(plot.figure.labels)
    every = 1 + count // 24
    for place, label in enumerate(plot.figure.labels):
        if place % every == 0:
            across = plot.across(place, count)
            yield f'<text x="{across:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(label)}</text>'
    middle = plot.left + plot.width / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">{escape(plot.figure.axis)}</text>'


def _rows(plot: _Plot) -> Iterator[str]:
    """Axes of a figure whose labels stand on its left."""
    bottom = plot.top + plot.height
    for tick in plot.ticks:
        place = plot.along(tick)
        yield f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{plot.top}" y2="{bottom}"/>'
        yield f'<text x="{place:.1f}" y="{bottom + 17}" text-anchor="middle">{tick:.3g}</text>'
    for place, label in enumerate(plot.figure.labels):
        shown = label if len(label) <= NAME_LENGTH else f"{label[: NAME_LENGTH - 1]}…"
        yield f'<text x="{plot.left - 8}" y="{_row(plot, place) + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
    middle = plot.left + plot.width / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">{escape(plot.figure.axis)}</text>'


def _row(plot: _Plot, place: int) -> float:
    return plot.top + plot.height * (place + 0.5) / len(plot.figure.labels)


def _curves(plot: _Plot) -> Iterator[str]:
    """Bands first, so that no band hides a curve."""
    for index, series in enumerate(plot.figure.series):
        yield from _band(plot, series, index)
    for index, series in enumerate(plot.figure.series):
        places = [(place, point) for place, point in enumerate(series.points) if point is not None]
        corners = [(plot.across(place, len(series.points)), plot.up(point.value)) for place, point in places]
        yield f'<polyline class="line {_colour(index)}" points="{_path(corners)}"/>'
        for (x, y), (place, point) in zip(corners, places, strict=True):
            yield _mark(index, x, y, f"{series.name}, {plot.figure.axis} {plot.figure.labels[place]}: {point.text}")


def _band(plot: _Plot, series: Series, index: int) -> Iterator[str]:
    """The intervals as one area for each stretch of positions that has them."""
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    for place, point in enumerate((*series.points, None)):
        if point is not None and point.interval is not None:
            x = plot.across(place, len(series.points))
            upper.append((x, plot.up(point.interval.high)))
            lower.append((x, plot.up(point.interval.low)))
        elif upper:
            yield f'<polygon class="band {_colour(index)}" points="{_path([*upper, *reversed(lower)])}"/>'
            upper, lower = [], []


def _bars(plot: _Plot) -> Iterator[str]:
    count, number = len(plot.figure.labels), len(plot.figure.series)
    width = 0.8 * plot.width / count / number
    for index, series in enumerate(plot.figure.series):
        for place, point in enumerate(series.points):
            if point is None:
                continue
            x = plot.across(place, count) + (index - number / 2) * width
            y = plot.up(point.value)
            text = f"{series.name}, {plot.figure.labels[place]} {plot.figure.axis}: {point.text}"
            yield (
                f'<rect class="bar {_colour(index)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{plot.up(plot.figure.low) - y:.1f}"><title>{escape(text)}</title></rect>'
            )


def _dots(plot: _Plot) -> Iterator[str]:
    number = len(plot.figure.series)
    for index, series in enumerate(plot.figure.series):
        for place, point in enumerate(series.points):
            if point is not None:
                y = _row(plot, place) + (index - (number - 1) / 2) * min(7, ROW / number)
                yield from _dot(plot, index, y, point, f"{series.name}, {plot.figure.labels[place]}: {point.text}")


def _dot(plot: _Plot, index: int, y: float, point: Point, text: str) -> Iterator[str]:
    if point.interval is not None:
        low, high = plot.along(point.interval.low), plot.along(point.interval.high)
        yield f'<line class="line {_colour(index)}" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield _mark(index, plot.along(point.value), y, text)


def _mark(index: int, x: float, y: float, text: str) -> str:
    """A circle, a square or a diamond, which says its figure where a pointer rests on it."""
    title = f"<title>{escape(text)}</title>"
    if index % 3 == 0:
        return f'<circle class="mark {_colour(index)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'
    turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if index % 3 == 2 else ""
    return (
        f'<rect class="mark {_colour(index)}" x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"{turned}>'
        f"{title}</rect>"
    )


def _colour(index: int) -> str:
    return f"s{index % COLOURS}"


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
