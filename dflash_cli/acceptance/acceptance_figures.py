"""The figures of measured results: by position, by number of tokens, by context length, by category."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from dflash_cli.acceptance.condition_results import ConditionResult
from dflash_cli.acceptance.context_curve import ContextCurve
from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.acceptance.measured_values import MeasuredValue, measured_values
from dflash_cli.figures.figure import AxisMark, Figure, Point, Series

SHARE, LENGTH = "share of verify steps", "tokens per verify step"
BY_POSITION = {
    "accepted_share": Figure(
        name="positions",
        kind="curve",
        title="Acceptance by position",
        caption="Share of verify steps that accepted this position and all before it. The band is the interval over "
        "prompts, if there are enough prompts.",
        axis="draft position",
        value_axis=SHARE,
    ),
    "conditional_share": Figure(
        name="conditional",
        kind="curve",
        title="Conditional acceptance",
        caption="Acceptance rate given that the previous position was accepted. It falls slowly for a sound draft. The "
        f"band is left out if fewer than {MIN_FOR_INTERVAL} prompts reached the position.",
        axis="draft position",
        value_axis="conditional acceptance rate",
    ),
    "steps_giving": Figure(
        name="histogram",
        kind="bars",
        title="Tokens per step",
        caption="Share of verify steps that committed this number of tokens, the target's own token included.",
        axis="tokens committed by a step",
        value_axis=SHARE,
    ),
}
"""Figures over positions or numbers of tokens, without their values, by quantity."""
BY_CATEGORY = Figure(
    name="categories",
    kind="dots",
    title="Acceptance length by category",
    caption="Tokens per step, with the interval over prompts if the category has enough prompts.",
    axis="category",
    value_axis=LENGTH,
    low=1,
)
BY_CONTEXT = Figure(
    name="context",
    kind="curve",
    title="Acceptance length by context length",
    caption="Tokens per step for prompts of exactly this length, with the interval over prompts. Dashed lines are "
    "lengths that the draft names.",
    axis="prompt length (tokens)",
    value_axis=LENGTH,
    low=1,
)


class Measured(Protocol):
    """The parts of an evaluation that figures show."""

    @property
    def total(self) -> Summary: ...

    @property
    def categories(self) -> Mapping[str, Summary]: ...

    @property
    def conditions(self) -> Sequence[ConditionResult]: ...

    @property
    def context(self) -> ContextCurve | None: ...


def find_figures(results: Mapping[str, Measured]) -> list[Figure]:
    """Return the figures of results by name: three by position, by context length and by category if measured."""
    figures = [_by_position(quantity, figure, results) for quantity, figure in BY_POSITION.items()]
    lengths = sorted({size for item in results.values() for size, _ in _by_length(item)})
    names = {
        name
        for item in results.values()
        for name, summary in item.categories.items()
        if summary.counts.acceptance_len is not None
    }
    figures += [_by_context(results, lengths)] if len(lengths) > 1 else []
    return [*figures, _by_category(results, sorted(names))] if names else figures


def _by_position(quantity: str, figure: Figure, results: Mapping[str, Measured]) -> Figure:
    is_bars = figure.kind == "bars"
    most = max(item.total.counts.num_speculative_tokens for item in results.values()) + is_bars
    series = []
    for name, result in results.items():
        found = {value.position: value for value in measured_values(result.total) if value.quantity == quantity}
        series.append(Series(name, tuple(_point(found.get(position)) for position in range(1, most + 1))))
    return replace(
        figure,
        labels=tuple(str(position) for position in range(1, most + 1)),
        series=tuple(series),
        high=min(1.0, 1.15 * _highest(series)) if is_bars else 1.0,
    )


def _by_category(results: Mapping[str, Measured], names: Sequence[str]) -> Figure:
    series = [
        Series(name, tuple(_length(result.categories.get(category)) for category in names))
        for name, result in results.items()
    ]
    return replace(BY_CATEGORY, labels=tuple(names), series=tuple(series), high=1.05 * _highest(series))


def _by_context(results: Mapping[str, Measured], lengths: Sequence[int]) -> Figure:
    series = []
    for name, result in results.items():
        under: dict[str | None, dict[int, Summary]] = {}
        for size, item in _by_length(result):
            under.setdefault(item.condition.thinking, {})[size] = item.summary
        for thinking, found in under.items():
            title = name if thinking is None else f"{name} thinking {thinking}".lstrip()
            series.append(Series(title, tuple(_length(found.get(size)) for size in lengths)))
    return replace(
        BY_CONTEXT,
        labels=tuple(f"{size:,}" for size in lengths),
        series=tuple(series),
        marks=tuple(_axis_marks(results, lengths)),
        high=1.05 * _highest(series),
    )


def _by_length(result: Measured) -> list[tuple[int, ConditionResult]]:
    """Return the conditions with a context length."""
    return [
        (size, item)
        for item in result.conditions
        if (size := item.condition.context_len) is not None and item.summary.counts.acceptance_len is not None
    ]


def _axis_marks(results: Mapping[str, Measured], lengths: Sequence[int]) -> Iterator[AxisMark]:
    """Yield the lengths that drafts name, between measured lengths on a logarithmic scale. Equal ones once."""
    seen = set()
    for result in results.values():
        for mark in result.context.marks if result.context is not None else ():
            text = f"{mark.kind} {mark.num_tokens:,}"
            for place, (low, high) in enumerate(pairwise(lengths)):
                is_last = high == lengths[-1] == mark.num_tokens
                if text not in seen and (low <= mark.num_tokens < high or is_last):
                    seen.add(text)
                    yield AxisMark(place + math.log(mark.num_tokens / low) / math.log(high / low), text)


def _length(summary: Summary | None) -> Point | None:
    """The acceptance length of a summary."""
    return _point(next(measured_values(summary), None)) if summary is not None else None


def _point(value: MeasuredValue | None) -> Point | None:
    if value is None:
        return None
    ends = (value.interval.low, value.interval.high) if value.interval is not None else None
    return Point(value=value.value, ends=ends, text=value.text)


def _highest(series: Sequence[Series]) -> float:
    return max(point.extent[1] for item in series for point in item.points if point is not None)
