"""What the figures of a report show, whatever draws them: series over labels, with intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_cli.acceptance.intervals.statistics import Interval, Summary
from dflash_cli.comparing.comparison_report import letter
from dflash_cli.comparing.stored_evaluation import StoredEvaluation

Kind = Literal["curve", "bars", "dots"]


@dataclass(frozen=True, slots=True)
class Point:
    """A value with the interval it has, if any."""

    value: float
    interval: Interval | None = None

    @property
    def text(self) -> str:
        """`0.779 [0.753, 0.807]`."""
        if self.interval is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.interval.low:.3f}, {self.interval.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one result, one a label; None where there is none."""

    name: str
    points: tuple[Point | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: curves with bands over positions, bars, or dots with whiskers beside names.

    `low` and `high` bound the axis of values.
    """

    kind: Kind
    title: str
    caption: str
    axis: str
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    low: float
    high: float

    @property
    def columns(self) -> list[str]:
        """The heading of that table."""
        return ["category" if self.kind == "dots" else self.axis, *(item.name for item in self.series)]

    @property
    def rows(self) -> list[list[str]]:
        """The figure as a table: a row a label, a column a series."""
        return [
            [label, *("-" if (point := item.points[place]) is None else point.text for item in self.series)]
            for place, label in enumerate(self.labels)
        ]


def find_figures(results: Sequence[StoredEvaluation]) -> list[Figure]:
    """The figures of a report on some results; by category only where one has categories."""
    summaries = [(letter(place), item.evaluation.total) for place, item in enumerate(results)]
    figures = [_positions(summaries), _conditional(summaries), _histogram(summaries)]
    categories = [(name, found) for item in results for name, found in item.evaluation.categories.items()]
    names = sorted({name for name, found in categories if found.counts.num_drafts})
    return [*figures, _categories(results, names)] if names else figures


def _positions(summaries: Sequence[tuple[str, Summary]]) -> Figure:
    return Figure(
        kind="curve",
        title="Accepted by position",
        caption="Share of the steps that accepted the drafted token at a position and all before it; the band is the "
        "interval over prompts, where there are enough of them.",
        axis="position",
        labels=_places(summaries, first=1),
        series=_series(
            summaries,
            lambda summary: [
                Point(rate, interval) if verified else None
                for rate, interval, verified in zip(
                    summary.counts.per_pos_acceptance_rates,
                    summary.per_pos_intervals,
                    summary.counts.per_pos_verified,
                    strict=True,
                )
            ],
        ),
        low=0,
        high=1,
    )


def _conditional(summaries: Sequence[tuple[str, Summary]]) -> Figure:
    return Figure(
        kind="curve",
        title="Accepted where the position before was",
        caption="Of the steps that accepted the position before, the share that accepted this one as well; a sound "
        "draft falls slowly here. Where fewer than 32 prompts got so far there is no band.",
        axis="position",
        labels=_places(summaries, first=1),
        series=_series(
            summaries,
            lambda summary: [
                None if rate is None else Point(rate, interval)
                for rate, interval in zip(
                    summary.per_pos_conditional_rates, summary.per_pos_conditional_intervals, strict=True
                )
            ],
        ),
        low=0,
        high=1,
    )


def _histogram(summaries: Sequence[tuple[str, Summary]]) -> Figure:
    series = _series(
        summaries,
        lambda summary: [Point(count / summary.counts.num_drafts) for count in summary.histogram],
    )
    most = max(point.value for item in series for point in item.points if point is not None)
    return Figure(
        kind="bars",
        title="Tokens a step gives",
        caption="Share of the steps that gave so many tokens, the target's own included.",
        axis="tokens",
        labels=_places(summaries, first=1, more=1),
        series=series,
        low=0,
        high=min(1.0, most * 1.15),
    )


def _categories(results: Sequence[StoredEvaluation], names: Sequence[str]) -> Figure:
    series = tuple(
        Series(letter(place), tuple(_length(item.evaluation.categories.get(name)) for name in names))
        for place, item in enumerate(results)
    )
    points = [point for item in series for point in item.points if point is not None]
    return Figure(
        kind="dots",
        title="Acceptance length by category",
        caption="Tokens a step, with the interval over prompts where a category has enough of them.",
        axis="tokens a step",
        labels=tuple(names),
        series=series,
        low=1,
        high=1.05 * max(point.interval.high if point.interval else point.value for point in points),
    )


def _length(summary: Summary | None) -> Point | None:
    length = summary.counts.acceptance_len if summary is not None else None
    return None if length is None or summary is None else Point(length, summary.acceptance_len_interval)


def _series(
    summaries: Sequence[tuple[str, Summary]], points_of: Callable[[Summary], Sequence[Point | None]]
) -> tuple[Series, ...]:
    """One series a result, all of one length: a result with smaller blocks has no points at the end."""
    found = [(name, tuple(points_of(summary))) for name, summary in summaries]
    most = max(len(points) for _, points in found)
    return tuple(Series(name, points + (None,) * (most - len(points))) for name, points in found)


def _places(summaries: Sequence[tuple[str, Summary]], *, first: int, more: int = 0) -> tuple[str, ...]:
    most = max(summary.counts.num_speculative_tokens for _, summary in summaries) + more
    return tuple(str(first + place) for place in range(most))
