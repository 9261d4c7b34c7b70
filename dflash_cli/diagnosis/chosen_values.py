"""Which of several similar values of one setting is chosen: rope bases, windows, and lengths of blocks."""

from collections.abc import Sequence
from dataclasses import replace

from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.reading_results import ReadingResult, by_loss
from dflash_cli.diagnosis.run_settings import Score
from dflash_runtime.draft_config import DraftConfig

NEARLY_ALL = 0.75
"""Share of the drafted tokens from which the block may be shorter than in training."""

LOWER = 0.97
"""Share of the loss to which the block of training lowers the loss of the first tokens, at least."""

ORDERED, SLIGHT = ("rope", "window", "candidates"), 0.02
"""Settings with many similar values, and the share of the gain by which short texts cannot tell such values apart."""


def usual_value(
    best: ReadingResult | None,
    counted: Sequence[ReadingResult],
    own: Score,
    readings: Sequence[AlternativeReading],
) -> ReadingResult | None:
    """Of values of one setting with nearly the lowest loss, the usual value: `readings` lists it first."""
    if best is None or best.factor not in ORDERED:
        return best
    limit = best.score.loss + SLIGHT * (own.loss - best.score.loss)
    near = [item for item in counted if item.factor == best.factor and item.matters and item.score.loss <= limit]
    return min(near, key=lambda item: readings.index(item.alternative))


def longer_block(screened: Sequence[ReadingResult], own: Score, config: DraftConfig) -> ReadingResult | None:
    """The longer block to count whole, if nearly every token is accepted and the block harms none of these."""
    if own.accepted - 1 < NEARLY_ALL * config.num_draft_tokens:
        return None
    longer = [
        replace(item, is_longer=True)
        for item in screened
        if item.factor == "block" and item.alternative.config.block_size > config.block_size
        and item.score.loss < LOWER * own.loss
        and item.score.accepted > own.accepted - (1 - NEARLY_ALL) * config.num_draft_tokens
    ]  # fmt: skip
    return min(longer, key=by_loss, default=None)
