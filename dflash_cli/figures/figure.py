"""A figure as data: series of values with intervals over labels. `drawing.py` lays it out."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["curve", "bars", "dots"]
Name = Literal["positions", "conditional", "histogram", "categories", "context", "differences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value with the ends of its interval, and both as text."""

    value: float
    ends: tuple[float, float] | None = None
    text: str

    @property
    def extent(self) -> tuple[float, float]:
        """The lowest and the highest drawn value."""
        return (self.value, self.value) if self.ends is None else self.ends


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one result, one for each label. Missing values are None."""

    name: str
    points: tuple[Point | None, ...]


@dataclass(frozen=True, slots=True)
class AxisMark:
    """A named place on the axis of labels, such as a draft's window. 0.5 lies halfway between the first two labels."""

    place: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: curves with bands over labels, bars, or dots with whiskers in rows.

    `axis` names the labels and `value_axis` the values, with their unit. `low` and `high` bound the axis of values.
    """

    name: Name
    kind: Kind
    title: str
    caption: str
    axis: str
    value_axis: str
    labels: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    marks: tuple[AxisMark, ...] = ()
    low: float = 0
    high: float = 1

    @property
    def has_legend(self) -> bool:
        """Whether the series need their names: there are several, or the name says which result is subtracted."""
        return len(self.series) > 1 or self.name == "differences"

    @property
    def columns(self) -> list[str]:
        """The header of the figure's table."""
        return [self.axis, *(item.name for item in self.series)]

    @property
    def rows(self) -> list[list[str]]:
        """The figure as a table: one row for each label, one column for each series."""
        return [
            [label, *("-" if (point := item.points[place]) is None else point.text for item in self.series)]
            for place, label in enumerate(self.labels)
        ]
