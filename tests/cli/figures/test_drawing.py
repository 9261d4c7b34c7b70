"""The layout of figures: coordinates of values, series that differ without colour, and painters of every shape."""

import math
import re
import struct
import time
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TypeVar
from xml.etree import ElementTree

import pytest

from dflash_cli.figures.drawing import (
    COLOURS,
    COLUMN,
    DASHES,
    FILLS,
    LEFT,
    LEGEND_ROW,
    MARKS,
    PAGE,
    RIGHT,
    TOP,
    Area,
    Drawing,
    Label,
    Line,
    Mark,
    Size,
    lay_out,
    lay_out_sheet,
)
from dflash_cli.figures.figure import AxisMark, Figure, Kind, Point, Series
from dflash_cli.figures.painted_figure import paint
from dflash_cli.figures.svg_figure import page_svg, to_svg

FLOOR = TOP + PAGE.plot_height
Found = TypeVar("Found", Line, Area, Mark, Label)


def value(number: float, ends: tuple[float, float] | None = None) -> Point:
    return Point(value=number, ends=ends, text=f"{number:.3f}")


def figure(kind: Kind, *series: tuple[Point | None, ...], marks: tuple[AxisMark, ...] = ()) -> Figure:
    return Figure(
        name="positions",
        kind=kind,
        title="title",
        caption="caption.",
        axis="axis",
        value_axis="value (unit)",
        labels=tuple(f"label {place}" for place in range(len(series[0]))),
        series=tuple(Series(f"series {index}", points) for index, points in enumerate(series)),
        marks=marks,
        low=0,
        high=1,
    )


def shapes_of(drawing: Drawing, kind: type[Found]) -> list[Found]:
    return [shape for shape in drawing.shapes if isinstance(shape, kind)]


def test_values_from_zero_to_one_fill_the_height() -> None:
    drawing = lay_out(figure("curve", (value(0), value(0.5), value(1))))
    marks = shapes_of(drawing, Mark)
    assert [mark.y for mark in marks] == [FLOOR, (TOP + FLOOR) / 2, TOP]
    across = [right.x - left.x for left, right in pairwise(marks)]
    assert across[0] == pytest.approx(across[1]) == pytest.approx((PAGE.width - LEFT - RIGHT) / 3)
    (curve,) = [line for line in shapes_of(drawing, Line) if line.series is not None]
    assert curve.points == tuple((mark.x, mark.y) for mark in marks)


def test_a_band_covers_each_run_of_labels_with_intervals() -> None:
    points = value(0.5, (0.4, 0.6)), value(0.4, (0.3, 0.5)), value(0.3), None, value(0.2, (0.1, 0.3))
    drawing = lay_out(figure("curve", points))
    (band,) = shapes_of(drawing, Area)
    assert band.role == "band"
    first = [y for _, y in band.points]
    assert first == pytest.approx([FLOOR - share * (FLOOR - TOP) for share in (0.6, 0.5, 0.3, 0.4)])
    whisker, _ = [line for line in shapes_of(drawing, Line) if line.series is not None]
    assert [y for _, y in whisker.points] == pytest.approx([FLOOR - share * (FLOOR - TOP) for share in (0.3, 0.1)])
    assert len(shapes_of(drawing, Mark)) == 4, "a missing value has no mark"
    assert drawing.shapes.index(band) < drawing.shapes.index(shapes_of(drawing, Mark)[0])


def test_bars_of_several_series_do_not_overlap() -> None:
    bars = [
        bar for bar in shapes_of(lay_out(figure("bars", (value(0.5), value(1)), (value(0.25), None))), Area) if bar.note
    ]
    edges = sorted((min(x for x, _ in bar.points), max(x for x, _ in bar.points)) for bar in bars)
    assert all(right <= left + 1e-9 for (_, right), (left, _) in pairwise(edges))
    heights = [max(y for _, y in bar.points) - min(y for _, y in bar.points) for bar in bars]
    assert heights == pytest.approx([share * (FLOOR - TOP) for share in (0.5, 1, 0.25)])
    assert {max(y for _, y in bar.points) for bar in bars} == {FLOOR + 2 * LEGEND_ROW}


def test_rows_have_whiskers_and_more_rows_are_taller() -> None:
    short, tall = (lay_out(figure("dots", (value(0.5, (0.4, 0.6)),) * count)) for count in (1, 30))
    assert tall.height > short.height
    (whisker,) = [line for line in shapes_of(short, Line) if line.series is not None]
    (mark,) = shapes_of(short, Mark)
    assert whisker.points[0][0] < mark.x < whisker.points[1][0]
    assert {y for _, y in whisker.points} == {mark.y}


DRAWN = (value(0.0, (0.0, 0.2)), value(1.0, (0.9, 1.0)), None), (None, value(0.5), value(0.7))


@pytest.mark.parametrize("size", [PAGE, COLUMN])
@pytest.mark.parametrize("kind", ["curve", "bars", "dots"])
def test_every_shape_lies_in_the_drawing_and_is_painted(kind: Kind, size: Size) -> None:
    drawn = figure(kind, *DRAWN, marks=(AxisMark(0.4, "window"),))
    drawing = lay_out(drawn, size)
    for shape in drawing.shapes:
        points = shape.points if isinstance(shape, Line | Area) else ((shape.x, shape.y),)
        assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in points)
    parts = list(ElementTree.fromstring(page_svg(drawn, 0)))
    assert len(parts) == 2 + len(drawing.shapes), "a title, a description, and an element for each shape"
    assert len(list(ElementTree.fromstring(to_svg(drawing, "title")))) == 1 + len(drawing.shapes)


@pytest.mark.parametrize("kind", ["curve", "bars", "dots"])
def test_axes_and_series_are_named(kind: Kind) -> None:
    texts = {label.text for label in shapes_of(lay_out(figure(kind, *DRAWN), COLUMN), Label)}
    assert {"value (unit)", "series 0", "series 1", "label 0"} <= texts
    assert ("axis" in texts) == (kind != "dots"), "rows name themselves"
    alone = {label.text for label in shapes_of(lay_out(figure(kind, DRAWN[0]), COLUMN), Label)}
    assert "series 0" not in alone, "a single series needs no legend"


def test_a_mark_lies_between_its_labels() -> None:
    drawing = lay_out(figure("curve", (value(0.5), value(0.4), value(0.1)), marks=(AxisMark(1.5, "4,096: window"),)))
    (line,) = [shape for shape in shapes_of(drawing, Line) if shape.is_mark]
    _, second, third = (mark.x for mark in shapes_of(drawing, Mark))
    assert [x for x, _ in line.points] == pytest.approx([(second + third) / 2] * 2)
    assert "4,096: window" in {label.text for label in shapes_of(drawing, Label)}


def test_series_differ_without_colour() -> None:
    """By mark and dashes as lines, by fill as bars."""
    assert len(set(MARKS)) == len(set(DASHES)) == len(set(FILLS)) == 4
    text = to_svg(lay_out(figure("curve", *[(value(0.5), value(0.4))] * 4)), "title")
    lines = re.findall(r'<polyline fill="none"[^>]*?stroke-width="1.6"( stroke-dasharray="[^"]*")? points', text)
    assert len(set(lines)) == 4


VIEWS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""Matrices on linear RGB. Source: Machado, Oliveira and Fernandes 2009, severity 1."""


def linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def seen(colour: str, view: str) -> tuple[float, float, float]:
    """The colour in CIELAB, as seen with one kind of colour blindness."""
    red, green, blue = (
        min(1.0, max(0.0, sum(map(math.prod, zip(row, linear(colour), strict=True))))) for row in VIEWS[view]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    a, b, c = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("ground", [0, 1])
def test_colours_differ_for_everyone(view: str, ground: int) -> None:
    """By 35 or more in CIELAB, on a light and on a dark background. Two neighbouring hues differ by about 10."""
    colours = [pair[ground] for pair in COLOURS]
    assert min(math.dist(seen(one, view), seen(two, view)) for one, two in combinations(colours, 2)) > 35


def test_a_sheet_has_two_figures_in_a_row() -> None:
    drawn = [figure("curve", (value(0.5), None)), figure("dots", (value(0.5), None)), figure("bars", (value(0.5),))]
    one, two, three = (lay_out_sheet(drawn[:count], ["head"]) for count in (1, 2, 3))
    assert one.width < two.width == three.width
    assert two.height < three.height
    assert two.width > 2 * PAGE.width


def test_pictures_have_the_width_of_a_column_and_the_same_bytes_each_time() -> None:
    pytest.importorskip("matplotlib")
    drawing = lay_out(figure("curve", *DRAWN), COLUMN)
    png, pdf = paint(drawing, "png"), paint(drawing, "pdf")
    assert struct.unpack(">I", png[16:20])[0] == round(3.33 * 300)
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) [\d.]+ \]", pdf)
    assert float(box) == pytest.approx(3.33 * 72)
    assert b"/FontFile2" in pdf, "the font is embedded, as TrueType"
    assert b"/Subtype /Image" not in pdf, "vectors only"
    assert len(pdf) < 20_000
    time.sleep(1.1 - time.time() % 1)
    assert (paint(drawing, "png"), paint(drawing, "pdf")) == (png, pdf), "no date in the files"


def test_a_difference_says_which_result_is_subtracted() -> None:
    """Also alone, where a curve of another figure needs no name."""
    drawn = figure("curve", (value(0.1), value(0.2)))
    for item, is_named in ((drawn, False), (replace(drawn, name="differences"), True)):
        assert ("series 0" in [label.text for label in shapes_of(lay_out(item), Label)]) is is_named


def test_a_picture_shows_a_dollar_sign_as_it_is() -> None:
    """matplotlib reads `$` as the start of a formula, and fails for `$_$`."""
    pytest.importorskip("matplotlib")
    assert paint(Drawing(100, 50, 11, (Label(5, 20, "$_$ {", "start"),)), "pdf").startswith(b"%PDF")
