"""The single values of a result, for the CSV table and the figures of a report."""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_cli.acceptance.intervals.statistics import Interval, Summary, value_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredValue:
    """A value with its interval.

    quantity  acceptance_len, accepted_share, conditional_share, steps_giving or definition_NAME
    position  draft position from 1; of steps_giving, the number of tokens
    count     verify steps behind the value; of steps_giving, the steps that committed this number of tokens
    """

    quantity: str
    value: float
    count: int
    position: int | None = None
    interval: Interval | None = None

    @property
    def text(self) -> str:
        """`0.779 [0.753, 0.807]`."""
        return value_text(self.value, self.interval)


def measured_values(summary: Summary) -> Iterator[MeasuredValue]:
    """Yield the known values: length, shares by position, steps by number of tokens, the length by each definition."""
    counts = summary.counts
    if counts.acceptance_len is None:
        return
    yield MeasuredValue(
        quantity="acceptance_len",
        value=counts.acceptance_len,
        count=counts.num_drafts,
        interval=summary.acceptance_len_interval,
    )
    yield from _shares(summary)
    for position, number in enumerate(summary.histogram, start=1):
        yield MeasuredValue(quantity="steps_giving", value=number / counts.num_drafts, count=number, position=position)
    for name, value in summary.definitions.items():
        if value is not None:
            yield MeasuredValue(quantity=f"definition_{name}", value=value, count=counts.num_drafts)


def _shares(summary: Summary) -> Iterator[MeasuredValue]:
    counts = summary.counts
    accepted = zip(counts.per_pos_acceptance_rates, summary.per_pos_intervals, counts.per_pos_verified, strict=True)
    for position, (rate, interval, number) in enumerate(accepted, start=1):
        if number:
            yield MeasuredValue(
                quantity="accepted_share", value=rate, count=number, position=position, interval=interval
            )
    reached = [counts.num_drafts, *counts.per_pos_accepted]
    conditional = zip(summary.per_pos_conditional_rates, summary.per_pos_conditional_intervals, reached, strict=False)
    for position, (share, interval, number) in enumerate(conditional, start=1):
        if share is not None:
            yield MeasuredValue(
                quantity="conditional_share", value=share, count=number, position=position, interval=interval
            )
