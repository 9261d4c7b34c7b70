"""The layout of a figure: lines, areas, marks and texts in drawing units. The painters paint the shapes.

One unit is a hundredth of an inch. On an HTML page it scales with the page. y grows downwards. Series differ by colour,
by mark and by dashes, so they can be told apart in black and white.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from dflash_cli.figures.figure import Figure, Kind, Point, Series
from dflash_runtime.phrases import shorten

COLOURS = (
    ("#2e8ae6", "#b2c6ff"),
    ("#660066", "#e63939"),
    ("#8c8c00", "#ffcf40"),
    ("#e65c7e", "#b2477d"),
    ("#0d400d", "#66ffb2"),
    ("#8000ff", "#9f40ff"),
)
"""Colours of the series, on a light and on a dark background. The seventh series has the first colour again.

With each of the three kinds of colour blindness, any two differ by 35 or more in CIELAB (tests/cli/figures).
"""
MARKS = "●■◆▲"
"""Marks of the series, in turn."""
DASHES = ((), (6, 3), (2, 2), (8, 2, 2, 2))
"""Lengths of dashes and gaps of the series' lines, in turn, in units."""
FILLS = (0.85, 0.3, 0.6, 0.1)
"""Opacity of the series' bars, in turn. Every bar has an outline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a drawing: width, height of the plot and of the text, and room for the names of rows."""

    width: float
    plot_height: float
    text: float
    name_left: float
    name_length: int
    max_labels: int


PAGE = Size(width=640, plot_height=208, text=12, name_left=166, name_length=20, max_labels=24)
"""For an HTML page, or two figures side by side."""
COLUMN = Size(width=333, plot_height=160, text=11, name_left=128, name_length=16, max_labels=12)
"""For a column of a paper: 3.33 inches wide, with 8-point text."""
LEFT, RIGHT, TOP, ROW, LEGEND_ROW = 62, 14, 12, 26, 16
MAX_TICKS = 6
LETTER = 0.6
"""Mean width of a letter, as a share of the size of its text."""
SAMPLE = 26
"""Length of a series' line in the legend."""

Coordinates = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. Without a series it belongs to the grid, or is a mark on an axis if `is_mark`."""

    points: Coordinates
    series: int | None = None
    is_mark: bool = False


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
    """A text with its baseline at a point, where `anchor` says which part of it lies. Turned, it reads upwards."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"]
    is_turned: bool = False


Shape = Line | Area | Mark | Label


@dataclass(frozen=True, slots=True)
class Drawing:
    """The shapes of a figure, from back to front."""

    width: float
    height: float
    text_size: float
    shapes: tuple[Shape, ...]


def lay_out(figure: Figure, size: Size = PAGE) -> Drawing:
    """Return the drawing of a figure, without its title and caption. The legend is above the plot."""
    is_rows = figure.kind == "dots"
    top = TOP + LEGEND_ROW * (len(figure.series) if figure.has_legend else 0)
    left = size.name_left if is_rows else LEFT
    height = ROW * len(figure.labels) if is_rows else size.plot_height
    plot = _Plot(figure, size, left, top, size.width - left - RIGHT, height)
    axes = _row_axes(plot) if is_rows else _column_axes(plot)
    shapes = (*_legend(plot), *axes, *_BODIES[figure.kind](plot))
    return Drawing(size.width, plot.bottom + 3.4 * size.text, size.text, shapes)


NUM_COLUMNS = 2
"""Figures beside each other on a sheet."""


def lay_out_sheet(figures: Sequence[Figure], heads: Sequence[str]) -> Drawing:
    """Return one drawing with all figures and their titles in columns, below some lines of text."""
    gap, title = 16, 26
    drawings = [lay_out(figure) for figure in figures]
    rows = [range(start, min(start + NUM_COLUMNS, len(figures))) for start in range(0, len(figures), NUM_COLUMNS)]
    heights = [title + max(drawings[place].height for place in row) for row in rows]
    tops = list(accumulate(heights, initial=gap + 20 * len(heads)))
    shapes: list[Shape] = [Label(gap, gap + 20 * place, text, "start") for place, text in enumerate(heads)]
    for row, top in zip(rows, tops, strict=False):
        for column, place in enumerate(row):
            left = gap + column * (PAGE.width + gap)
            shapes.append(Label(left, top + 16, figures[place].title, "start"))
            shapes += [_moved(shape, left, top + title) for shape in drawings[place].shapes]
    width = gap + min(NUM_COLUMNS, len(figures)) * (PAGE.width + gap)
    return Drawing(width, tops[-1] + gap, PAGE.text, tuple(shapes))


def _moved(shape: Shape, right: float, down: float) -> Shape:
    if isinstance(shape, Line | Area):
        return replace(shape, points=tuple((x + right, y + down) for x, y in shape.points))
    return replace(shape, x=shape.x + right, y=shape.y + down)


@dataclass(frozen=True, slots=True)
class _Plot:
    """The rectangle of a drawing that holds the values."""

    figure: Figure
    size: Size
    left: float
    top: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def series(self) -> Iterator[tuple[int, Series, list[tuple[int, Point]]]]:
        """Index, series, and known values with their label's index."""
        for index, series in enumerate(self.figure.series):
            yield index, series, [(place, point) for place, point in enumerate(series.points) if point is not None]

    def column(self, place: float) -> float:
        """Return the x of the middle of a label's column."""
        return self.left + self.width * (place + 0.5) / len(self.figure.labels)

    def row(self, place: float) -> float:
        """Return the y of the middle of a label's row."""
        return self.top + self.height * (place + 0.5) / len(self.figure.labels)

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


def _legend(plot: _Plot) -> Iterator[Shape]:
    """Yield a row for each series: its line, mark and name."""
    if not plot.figure.has_legend:
        return
    length = int((plot.size.width - LEFT - SAMPLE - RIGHT) / (LETTER * plot.size.text))
    for index, series in enumerate(plot.figure.series):
        y = TOP + LEGEND_ROW * (index + 0.3)
        if plot.figure.kind == "bars":
            yield Area(((LEFT, y - 5), (LEFT + SAMPLE, y - 5), (LEFT + SAMPLE, y + 5), (LEFT, y + 5)), index, "bar")
        else:
            yield Line(((LEFT, y), (LEFT + SAMPLE, y)), index)
            yield Mark(LEFT + SAMPLE / 2, y, index, series.name)
        yield Label(LEFT + SAMPLE + 6, y + plot.size.text / 3, shorten(series.name, length), "start")


def _column_axes(plot: _Plot) -> Iterator[Shape]:
    """Yield the axes of vertical values: numbers on the left, a label below each column, marks between columns."""
    text = plot.size.text
    for tick in plot.ticks:
        y = plot.up(tick)
        yield Line(((plot.left, y), (plot.right, y)))
        yield Label(plot.left - 6, y + text / 3, f"{tick:.3g}", "end")
    every = 1 + (len(plot.figure.labels) - 1) // plot.size.max_labels
    for place, label in list(enumerate(plot.figure.labels))[::every]:
        yield Label(plot.column(place), plot.bottom + 1.4 * text, label, "middle")
    for number, mark in enumerate(plot.figure.marks):
        x = plot.column(mark.place)
        yield Line(((x, plot.top), (x, plot.bottom)), is_mark=True)
        is_right = x + LETTER * text * len(mark.name) > plot.right
        y = plot.top + (number % 4 + 1) * 1.1 * text
        yield Label(x - 4 if is_right else x + 4, y, mark.name, "end" if is_right else "start")
    yield Label(plot.left + plot.width / 2, plot.bottom + 2.9 * text, plot.figure.axis, "middle")
    yield Label(text + 2, plot.top + plot.height / 2, plot.figure.value_axis, "middle", is_turned=True)


def _row_axes(plot: _Plot) -> Iterator[Shape]:
    """Yield the axes of horizontal values: numbers below, a label on the left of each row."""
    text = plot.size.text
    for tick in plot.ticks:
        x = plot.along(tick)
        yield Line(((x, plot.top), (x, plot.bottom)))
        yield Label(x, plot.bottom + 1.4 * text, f"{tick:.3g}", "middle")
    for place, label in enumerate(plot.figure.labels):
        yield Label(plot.left - 8, plot.row(place) + text / 3, shorten(label, plot.size.name_length), "end")
    yield Label(plot.left + plot.width / 2, plot.bottom + 2.9 * text, plot.figure.value_axis, "middle")


def _curves(plot: _Plot) -> Iterator[Shape]:
    """Yield all bands, then all curves, so that bands never hide a curve."""
    for index, series, _ in plot.series:
        yield from _bands(plot, series, index)
    for index, series, points in plot.series:
        yield Line(tuple((plot.column(place), plot.up(point.value)) for place, point in points), index)
        for place, point in points:
            note = f"{series.name}, {plot.figure.axis} {plot.figure.labels[place]}: {point.text}"
            yield Mark(plot.column(place), plot.up(point.value), index, note)


def _bands(plot: _Plot, series: Series, index: int) -> Iterator[Shape]:
    """Yield one area for each run of labels with intervals; for a single one, a line."""
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    for place, point in enumerate((*series.points, None)):
        if point is not None and point.ends is not None:
            upper.append((plot.column(place), plot.up(point.ends[1])))
            lower.append((plot.column(place), plot.up(point.ends[0])))
        elif upper:
            yield Area((*upper, *reversed(lower)), index, "band") if len(upper) > 1 else Line((*upper, *lower), index)
            upper, lower = [], []


def _bars(plot: _Plot) -> Iterator[Shape]:
    number = len(plot.figure.series)
    width = 0.8 * plot.width / len(plot.figure.labels) / number
    for index, series, points in plot.series:
        for place, point in points:
            left = plot.column(place) + (index - number / 2) * width
            right, top = left + width, plot.up(point.value)
            corners = (left, plot.bottom), (left, top), (right, top), (right, plot.bottom)
            note = f"{series.name}, {plot.figure.axis} {plot.figure.labels[place]}: {point.text}"
            yield Area(corners, index, "bar", note)
            if point.ends is not None:
                middle = (left + right) / 2
                yield Line(tuple((middle, plot.up(end)) for end in point.ends), index)


def _dots(plot: _Plot) -> Iterator[Shape]:
    number = len(plot.figure.series)
    for index, series, points in plot.series:
        for place, point in points:
            y = plot.row(place) + (index - (number - 1) / 2) * min(7, ROW / number)
            if point.ends is not None:
                yield Line(tuple((plot.along(end), y) for end in point.ends), index)
            note = f"{series.name}, {plot.figure.labels[place]}: {point.text}"
            yield Mark(plot.along(point.value), y, index, note)


_BODIES: Mapping[Kind, Callable[[_Plot], Iterator[Shape]]] = {"curve": _curves, "bars": _bars, "dots": _dots}
