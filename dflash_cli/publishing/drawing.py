"""The layout of a figure: lines, areas, marks and texts in drawing units. `svg_figure.py` and `png_report.py` paint it.

One unit is a hundredth of an inch in a PNG. On an HTML page it scales with the page. y grows downwards.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dflash_cli.publishing.figures import Figure, Kind, Series
from dflash_cli.publishing.measured_values import MeasuredValue
from dflash_runtime.phrases import shorten

COLOURS = (
    ("#1f66c1", "#74b0f4"),
    ("#b4530a", "#f0a35e"),
    ("#137a55", "#5fcf9f"),
    ("#8a3ab9", "#c79bf0"),
    ("#a81d4a", "#f58aa8"),
    ("#5b6770", "#b4bdc6"),
)
"""Colours of the series, on a light and on a dark background. The seventh series has the first colour again."""
MARKS = "●■◆"
"""Marks of the series, in turn, so that series differ by mark as well as by colour."""

WIDTH, ROW, PLOT_HEIGHT, TEXT_SIZE = 640, 26, 260, 12
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 40
NAME_LEFT, NAME_LENGTH = 150, 20
MAX_TICKS, MAX_LABELS = 6, 24

Coordinates = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. It belongs to the grid if `series` is None."""

    points: Coordinates
    series: int | None = None


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon: the band of a curve, or a bar. `note` is the tooltip."""

    points: Coordinates
    series: int
    role: Literal["band", "bar"]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of a series at one value. `note` is the tooltip."""

    x: float
    y: float
    series: int
    note: str


@dataclass(frozen=True, slots=True)
class Label:
    """A text with its baseline at a point. `anchor` says which part of the text lies there."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"]


Shape = Line | Area | Mark | Label


@dataclass(frozen=True, slots=True)
class Drawing:
    """The shapes of a figure, from back to front. The width is `WIDTH`."""

    height: float
    shapes: tuple[Shape, ...]


def lay_out(figure: Figure) -> Drawing:
    """Return the drawing of a figure, without its title and caption."""
    if figure.kind == "dots":
        plot = _Plot(figure, NAME_LEFT, WIDTH - NAME_LEFT - RIGHT, ROW * len(figure.labels))
    else:
        plot = _Plot(figure, LEFT, WIDTH - LEFT - RIGHT, PLOT_HEIGHT - TOP - BOTTOM)
    axes = _row_axes(plot) if figure.kind == "dots" else _column_axes(plot)
    return Drawing(plot.bottom + BOTTOM, (*axes, *_BODIES[figure.kind](plot)))


@dataclass(frozen=True, slots=True)
class _Plot:
    """The rectangle of a drawing that holds the values."""

    figure: Figure
    left: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        return TOP + self.height

    @property
    def series(self) -> Iterator[tuple[int, Series, list[tuple[int, MeasuredValue]]]]:
        """Index, series, and known values with their label's index."""
        for index, series in enumerate(self.figure.series):
            yield index, series, [(place, point) for place, point in enumerate(series.points) if point is not None]

    def column(self, place: float) -> float:
        """Return the x of the middle of a label's column."""
        return self.left + self.width * (place + 0.5) / len(self.figure.labels)

    def row(self, place: float) -> float:
        """Return the y of the middle of a label's row."""
        return TOP + self.height * (place + 0.5) / len(self.figure.labels)

    def up(self, value: float) -> float:
        return self.bottom - self.height * self._share(value)

    def along(self, value: float) -> float:
        return self.left + self.width * self._share(value)

    def _share(self, value: float) -> float:
        return (value - self.figure.low) / (self.figure.high - self.figure.low)

    @property
    def ticks(self) -> list[float]:
        """At most `MAX_TICKS` round numbers on the axis of values."""
        low, high = self.figure.low, self.figure.high
        rough = (high - low) / MAX_TICKS
        unit = 10 ** math.floor(math.log10(rough))
        step = unit * next(size for size in (1, 2, 5, 10) if size * unit >= rough)
        return [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _column_axes(plot: _Plot) -> Iterator[Shape]:
    """Yield the axes of vertical values: numbers on the left, a label below each column."""
    for tick in plot.ticks:
        y = plot.up(tick)
        yield Line(((plot.left, y), (plot.left + plot.width, y)))
        yield Label(plot.left - 6, y + 4, f"{tick:.3g}", "end")
    every = 1 + len(plot.figure.labels) // MAX_LABELS
    for place, label in list(enumerate(plot.figure.labels))[::every]:
        yield Label(plot.column(place), plot.bottom + 17, label, "middle")
    yield Label(plot.left + plot.width / 2, plot.bottom + 34, plot.figure.axis, "middle")


def _row_axes(plot: _Plot) -> Iterator[Shape]:
    """Yield the axes of horizontal values: numbers below, a label on the left of each row."""
    for tick in plot.ticks:
        x = plot.along(tick)
        yield Line(((x, TOP), (x, plot.bottom)))
        yield Label(x, plot.bottom + 17, f"{tick:.3g}", "middle")
    for place, label in enumerate(plot.figure.labels):
        yield Label(plot.left - 8, plot.row(place) + 4, shorten(label, NAME_LENGTH), "end")
    yield Label(plot.left + plot.width / 2, plot.bottom + 34, plot.figure.axis, "middle")


def _curves(plot: _Plot) -> Iterator[Shape]:
    """Yield all bands, then all curves, so that bands never hide a curve."""
    for index, series, _ in plot.series:
        yield from _bands(plot, series, index)
    for index, series, points in plot.series:
        yield Line(tuple((plot.column(place), plot.up(point.value)) for place, point in points), index)
        for place, point in points:
            note = f"{series.name}, {plot.figure.axis} {plot.figure.labels[place]}: {point.text}"
            yield Mark(plot.column(place), plot.up(point.value), index, note)


def _bands(plot: _Plot, series: Series, index: int) -> Iterator[Area]:
    """Yield one area for each run of positions with intervals."""
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    for place, point in enumerate((*series.points, None)):
        if point is not None and point.interval is not None:
            upper.append((plot.column(place), plot.up(point.interval.high)))
            lower.append((plot.column(place), plot.up(point.interval.low)))
        elif upper:
            yield Area((*upper, *reversed(lower)), index, "band")
            upper, lower = [], []


def _bars(plot: _Plot) -> Iterator[Shape]:
    number = len(plot.figure.series)
    width = 0.8 * plot.width / len(plot.figure.labels) / number
    for index, series, points in plot.series:
        for place, point in points:
            left = plot.column(place) + (index - number / 2) * width
            right, top = left + width, plot.up(point.value)
            corners = (left, plot.bottom), (left, top), (right, top), (right, plot.bottom)
            note = f"{series.name}, {plot.figure.labels[place]} {plot.figure.axis}: {point.text}"
            yield Area(corners, index, "bar", note)


def _dots(plot: _Plot) -> Iterator[Shape]:
    number = len(plot.figure.series)
    for index, series, points in plot.series:
        for place, point in points:
            y = plot.row(place) + (index - (number - 1) / 2) * min(7, ROW / number)
            if point.interval is not None:
                yield Line(((plot.along(point.interval.low), y), (plot.along(point.interval.high), y)), index)
            note = f"{series.name}, {plot.figure.labels[place]}: {point.text}"
            yield Mark(plot.along(point.value), y, index, note)


_BODIES: Mapping[Kind, Callable[[_Plot], Iterator[Shape]]] = {"curve": _curves, "bars": _bars, "dots": _dots}
