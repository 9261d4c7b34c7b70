"""Compare a draft's own confidence in its tokens with the share of these tokens that the target accepts.

A DSpark draft may predict for each token how likely the target accepts it, given that the target accepts all tokens
before it in the block. So a token counts only in steps that accepted all tokens before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.terminal.shown import Table
from dflash_runtime.metrics import COUNT
from dflash_runtime.scheduling.request_output import RequestOutput

TITLE = "confidence of the draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfidence:
    """The draft's confidence and the accepted share of the same tokens, by position of a block.

    Values are None for a position without judged tokens.
    """

    mean: Annotated[float | None, "mean confidence of all judged tokens"]
    accepted_share: Annotated[float | None, "share of the judged tokens that the target accepted"]
    per_pos_judged: tuple[Annotated[int, COUNT, "verified tokens after accepted ones"], ...]
    per_pos_mean: Annotated[tuple[float | None, ...], "mean confidence of these tokens"]
    per_pos_accepted_share: Annotated[tuple[float | None, ...], "share of these tokens that the target accepted"]

    @property
    def table(self) -> Table:
        """Columns and rows by position."""
        rows = [
            (str(place + 1), str(judged), f"{mean:.3f}", f"{share:.3f}", f"{mean - share:+.3f}")
            for place, (judged, mean, share) in enumerate(
                zip(self.per_pos_judged, self.per_pos_mean, self.per_pos_accepted_share, strict=True)
            )
            if mean is not None and share is not None
        ]
        return ("position", "judged", "confidence", "accepted", "difference"), rows


def find_confidence(outputs: Iterable[RequestOutput], num_speculative_tokens: int) -> DraftConfidence | None:
    """Return the draft's confidence over all verify steps; None if the draft predicts nothing."""
    sums = [0.0] * num_speculative_tokens
    judged, accepted = [0] * num_speculative_tokens, [0] * num_speculative_tokens
    for output in outputs:
        if not output.draft_confidences:
            continue
        for length, confidences in zip(output.acceptance_lengths, output.draft_confidences, strict=True):
            for place, value in enumerate(confidences[:length]):
                if value is not None:
                    sums[place] += value
                    judged[place] += 1
                    accepted[place] += place < length - 1
    if not any(judged):
        return None
    return DraftConfidence(
        mean=_share(sum(sums), sum(judged)),
        accepted_share=_share(sum(accepted), sum(judged)),
        per_pos_judged=tuple(judged),
        per_pos_mean=tuple(map(_share, sums, judged)),
        per_pos_accepted_share=tuple(map(_share, accepted, judged)),
    )


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
