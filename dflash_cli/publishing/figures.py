"""The figures of a report as data: series of values with intervals over labels. `drawing.py` lays them out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.comparing.comparison_report import letter
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_cli.publishing.measured_values import MeasuredValue, measured_values

Kind = Literal["curve", "bars", "dots"]


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one result, one for each label. Missing values are None."""

    name: str
    points: tuple[MeasuredValue | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: curves with bands over positions, bars, or dots with whiskers in rows.

    `low` and `high` bound the axis of values.
    """

    kind: Kind
    title: str
    caption: str
    axis: str
    labels: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    low: float = 0
    high: float = 1

    @property
    def columns(self) -> list[str]:
        """The header of the figure's table."""
        return ["category" if self.kind == "dots" else self.axis, *(item.name for item in self.series)]

    @property
    def rows(self) -> list[list[str]]:
        """The figure as a table: one row for each label, one column for each series."""
        return [
            [label, *("-" if (point := item.points[place]) is None else point.text for item in self.series)]
            for place, label in enumerate(self.labels)
        ]


BY_POSITION = {
    "accepted_share": Figure(
        kind="curve",
        title="Acceptance by position",
        caption="Share of verify steps that accepted this position and all before it. The band is the interval over "
        "prompts, if there are enough prompts.",
        axis="position",
    ),
    "conditional_share": Figure(
        kind="curve",
        title="Conditional acceptance",
        caption="Acceptance rate given that the previous position was accepted. It falls slowly for a sound draft. The "
        f"band is left out if fewer than {MIN_FOR_INTERVAL} prompts reached the position.",
        axis="position",
    ),
    "steps_giving": Figure(
        kind="bars",
        title="Tokens per step",
        caption="Share of verify steps that committed this number of tokens, the target's own token included.",
        axis="tokens",
    ),
}
"""Figures over positions or numbers of tokens, without their values, by quantity."""


def find_figures(results: Sequence[StoredEvaluation]) -> list[Figure]:
    """Return the figures of a report: three by position, and one by category if a result has categories."""
    figures = [_by_position(quantity, figure, results) for quantity, figure in BY_POSITION.items()]
    names = {
        name
        for item in results
        for name, summary in item.evaluation.categories.items()
        if summary.counts.acceptance_len is not None
    }
    return [*figures, _by_category(results, sorted(names))] if names else figures


def _by_position(quantity: str, figure: Figure, results: Sequence[StoredEvaluation]) -> Figure:
    is_bars = figure.kind == "bars"
    most = max(result.evaluation.total.counts.num_speculative_tokens for result in results) + is_bars
    series = []
    for place, result in enumerate(results):
        values = measured_values(result.evaluation.total)
        found = {value.position: value for value in values if value.quantity == quantity}
        series.append(Series(letter(place), tuple(found.get(position) for position in range(1, most + 1))))
    return replace(
        figure,
        labels=tuple(str(position) for position in range(1, most + 1)),
        series=tuple(series),
        high=min(1.0, 1.15 * max(point.value for point in _points(series))) if is_bars else 1.0,
    )


def _by_category(results: Sequence[StoredEvaluation], names: Sequence[str]) -> Figure:
    series = []
    for place, result in enumerate(results):
        lengths = {name: next(measured_values(summary), None) for name, summary in result.evaluation.categories.items()}
        series.append(Series(letter(place), tuple(lengths.get(name) for name in names)))
    return Figure(
        kind="dots",
        title="Acceptance length by category",
        caption="Tokens per step, with the interval over prompts if the category has enough prompts.",
        axis="tokens per step",
        labels=tuple(names),
        series=tuple(series),
        low=1,
        high=1.05 * max(point.interval.high if point.interval else point.value for point in _points(series)),
    )


def _points(series: Sequence[Series]) -> list[MeasuredValue]:
    return [point for item in series for point in item.points if point is not None]
