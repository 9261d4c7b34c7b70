"""Differences by draft position: the share of verify steps that accept the position and all positions before it.

One plus this share is the acceptance length of a draft that proposes this one token. So the difference has the interval
and the test of two acceptance lengths.
"""

from collections.abc import Sequence

from dflash_cli.acceptance.conversation_counts import ConversationCounts, Pair, pool_pairs
from dflash_cli.acceptance.intervals.acceptance_difference import (
    AcceptanceDifference,
    TokenCounts,
    fewest_of_sides,
    no_interval,
    paired_difference,
    tokens_per_step,
    unpaired_difference,
)
from dflash_cli.comparing.contrasts import PositionContrast
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_runtime.notices import Notice

ENOUGH_DIFFER = 0.75
"""Share of the prompts that must differ at a position, for an interval. With fewer, it covers 98 to 99 of 100."""


def contrast_positions(
    base: MeasuredResult, other: MeasuredResult, pairs: Sequence[Pair], confidence: float, *, is_paired: bool
) -> tuple[tuple[PositionContrast, ...], Notice | None]:
    """Return the differences at all positions that both results verified, or no difference and the reason."""
    if not pairs:
        return (), Notice("a result has no rows of prompts", id="no-rows")
    sides = pool_pairs(pairs)
    for item, side in zip((base, other), sides, strict=True):
        if item.counts is None or not all(row.histogram or not row.num_steps for row in side):
            text = f"{item.name} ({item.source}) lacks counts by position for each prompt"
            return (), Notice(text, id="no-positions")
    positions = range(1, 1 + min(_num_verified(base), _num_verified(other)))
    return tuple(_contrast(position, sides, confidence, is_paired=is_paired) for position in positions), None


def _num_verified(result: MeasuredResult) -> int:
    return sum(count > 0 for count in result.counts.per_pos_verified) if result.counts is not None else 0


def _contrast(
    position: int,
    sides: tuple[Sequence[ConversationCounts], Sequence[ConversationCounts]],
    confidence: float,
    *,
    is_paired: bool,
) -> PositionContrast:
    base, other = (_tokens(side, position) for side in sides)
    estimate = (paired_difference if is_paired else unpaired_difference)(base, other, confidence)
    fewest = min(len(base), len(other))
    reason = no_interval(estimate, fewest, fewest_of_sides(len(base), len(other), is_paired=is_paired))
    lengths = tokens_per_step(base), tokens_per_step(other)
    return PositionContrast(
        position=position,
        acceptance_rates=(_share(lengths[0]), _share(lengths[1])),
        num_conversations=fewest,
        estimate=estimate,
        reason=reason or (few_differ(estimate) if estimate is not None else None),
    )


def _tokens(side: Sequence[ConversationCounts], position: int) -> TokenCounts:
    """Return tokens and steps of each prompt if only this position was drafted."""
    return [(item.num_steps + item.num_accepted(position), item.num_steps) for item in side]


def _share(length: float | None) -> float | None:
    return None if length is None else length - 1


def few_differ(estimate: AcceptanceDifference) -> Notice | None:
    """Return why the interval is missing if too few prompts differ, or None. Without pairs, every prompt counts."""
    least = ENOUGH_DIFFER * estimate.num_prompts
    if estimate.num_differing >= least:
        return None
    text = f"{estimate.num_differing} of {estimate.num_prompts} distinct prompts differ at this position, and an "
    return Notice(f"{text}interval needs {least:.0f} or more", id="few-prompts-differ")
