"""The layout of figures: each value has its coordinates, and both painters paint every shape."""

import struct
from itertools import pairwise
from typing import TypeVar
from xml.etree import ElementTree

import pytest

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.publishing.drawing import (
    BOTTOM,
    LEFT,
    PLOT_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Area,
    Drawing,
    Line,
    Mark,
    lay_out,
)
from dflash_cli.publishing.figures import Figure, Kind, Series
from dflash_cli.publishing.measured_values import MeasuredValue
from dflash_cli.publishing.png_report import to_png
from dflash_cli.publishing.svg_figure import draw_svg

FLOOR = PLOT_HEIGHT - BOTTOM


def value(number: float, ends: tuple[float, float] | None = None) -> MeasuredValue:
    interval = Interval(*ends, 0.95) if ends is not None else None
    return MeasuredValue(quantity="accepted_share", value=number, count=10, interval=interval)


def figure(kind: Kind, *series: tuple[MeasuredValue | None, ...]) -> Figure:
    return Figure(
        kind=kind,
        title="title",
        caption="caption.",
        axis="axis",
        labels=tuple(f"label {place}" for place in range(len(series[0]))),
        series=tuple(Series("AB"[index], points) for index, points in enumerate(series)),
        low=0,
        high=1,
    )


Found = TypeVar("Found", Line, Area, Mark)


def shapes_of(drawing: Drawing, kind: type[Found]) -> list[Found]:
    return [shape for shape in drawing.shapes if isinstance(shape, kind)]


def test_values_from_zero_to_one_fill_the_height() -> None:
    drawing = lay_out(figure("curve", (value(0), value(0.5), value(1))))
    marks = shapes_of(drawing, Mark)
    assert [mark.y for mark in marks] == [FLOOR, (TOP + FLOOR) / 2, TOP]
    across = [right.x - left.x for left, right in pairwise(marks)]
    assert across[0] == pytest.approx(across[1]) == pytest.approx((WIDTH - LEFT - RIGHT) / 3)
    (curve,) = [line for line in shapes_of(drawing, Line) if line.series is not None]
    assert curve.points == tuple((mark.x, mark.y) for mark in marks)


def test_a_band_covers_each_run_of_positions_with_intervals() -> None:
    points = value(0.5, (0.4, 0.6)), value(0.4, (0.3, 0.5)), value(0.3), None, value(0.2, (0.1, 0.3))
    drawing = lay_out(figure("curve", points))
    bands = shapes_of(drawing, Area)
    assert [len(band.points) for band in bands] == [4, 2]
    assert {band.role for band in bands} == {"band"}
    first = [y for _, y in bands[0].points]
    assert first == pytest.approx([FLOOR - share * (FLOOR - TOP) for share in (0.6, 0.5, 0.3, 0.4)])
    assert len(shapes_of(drawing, Mark)) == 4, "a missing value has no mark"
    assert drawing.shapes.index(bands[-1]) < drawing.shapes.index(shapes_of(drawing, Mark)[0])


def test_bars_of_several_series_do_not_overlap() -> None:
    bars = shapes_of(lay_out(figure("bars", (value(0.5), value(1)), (value(0.25), None))), Area)
    edges = sorted((min(x for x, _ in bar.points), max(x for x, _ in bar.points)) for bar in bars)
    assert all(right <= left + 1e-9 for (_, right), (left, _) in pairwise(edges))
    heights = {bar.note: max(y for _, y in bar.points) - min(y for _, y in bar.points) for bar in bars}
    assert list(heights.values()) == pytest.approx([share * (FLOOR - TOP) for share in (0.5, 1, 0.25)])
    assert {max(y for _, y in bar.points) for bar in bars} == {FLOOR}


def test_rows_have_whiskers_and_more_rows_are_taller() -> None:
    short, tall = (lay_out(figure("dots", (value(0.5, (0.4, 0.6)),) * count)) for count in (1, 30))
    assert tall.height > short.height
    (whisker,) = [line for line in shapes_of(short, Line) if line.series is not None]
    (mark,) = shapes_of(short, Mark)
    assert whisker.points[0][0] < mark.x < whisker.points[1][0]
    assert {y for _, y in whisker.points} == {mark.y}


@pytest.mark.parametrize("kind", ["curve", "bars", "dots"])
def test_every_shape_lies_in_the_drawing_and_is_painted(kind: Kind) -> None:
    drawn = figure(kind, (value(0.0, (0.0, 0.2)), value(1.0, (0.9, 1.0)), None), (None, value(0.5), value(0.7)))
    drawing = lay_out(drawn)
    for shape in drawing.shapes:
        points = shape.points if isinstance(shape, Line | Area) else ((shape.x, shape.y),)
        assert all(0 <= x <= WIDTH and 0 <= y <= drawing.height for x, y in points)
    parts = list(ElementTree.fromstring(draw_svg(drawn, 0)))
    assert len(parts) == 2 + len(drawing.shapes), "a title, a description, and an element for each shape"


def test_a_picture_has_room_for_two_figures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn = [figure("curve", (value(0.5), None)), figure("dots", (value(0.5), None))]
    sizes = []
    for count in (1, 2):
        monkeypatch.setattr("dflash_cli.publishing.png_report.find_figures", lambda results, count=count: drawn[:count])
        sizes.append(struct.unpack(">II", to_png([])[16:24]))
    assert sizes[0] == sizes[1], "the second figure is beside the first"
    assert sizes[0][0] > 2 * WIDTH
