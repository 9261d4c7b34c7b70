"""Acceptance counts under the names of vLLM's tests.

`num_accepted` excludes the bonus token, `acceptance_len` includes it. A draft step is a request's verify step with
drafts; a prefill is no draft step, nor is a step that decodes plainly. A draft beyond a step's verify width was neither
accepted nor refused, so that step says nothing of its position.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from dflash_runtime.scheduling.request import RequestOutput


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts over verify steps of blocks with `num_speculative_tokens` (K) drafts, all or some of them verified."""

    num_speculative_tokens: int
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    per_pos_accepted: list[int] = field(default_factory=list)
    per_pos_verified: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_pos_accepted = self.per_pos_accepted or [0] * self.num_speculative_tokens
        self.per_pos_verified = self.per_pos_verified or [self.num_drafts] * self.num_speculative_tokens

    def add(self, num_accepted: int, num_verified: int | None = None) -> None:
        """Count one verify step; it verified all drafts where `num_verified` is not given."""
        num_verified = self.num_speculative_tokens if num_verified is None else num_verified
        self.num_drafts += 1
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.per_pos_accepted[position] += 1
        for position in range(num_verified):
            self.per_pos_verified[position] += 1

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.per_pos_verified)

    @property
    def is_capped(self) -> bool:
        """Whether steps verified part of their block only, so that more of it might have been accepted."""
        return self.num_draft_tokens < self.num_drafts * self.num_speculative_tokens

    @property
    def acceptance_len(self) -> float | None:
        """Tokens committed a verify step, pooled over steps; None without steps.

        Equals 1 + sum of the rates, unless steps verified different numbers of drafts.
        """
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_tokens_per_step(self) -> float | None:
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def overall_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def per_pos_acceptance_rates(self) -> list[float]:
        """Share of the steps that verified position i in which it was accepted (unconditional); 0 where none did."""
        pairs = zip(self.per_pos_accepted, self.per_pos_verified, strict=True)
        return [accepted / verified if verified else 0.0 for accepted, verified in pairs] if self.num_drafts else []

    def to_json(self) -> dict[str, object]:
        """The figures under vLLM's names."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_len": self.acceptance_len,
            "is_capped": self.is_capped,
            "draft_tokens_per_step": self.draft_tokens_per_step,
            "overall_acceptance_rate": self.overall_acceptance_rate,
            "per_pos_accepted": self.per_pos_accepted,
            "per_pos_verified": self.per_pos_verified,
            "per_pos_acceptance_rates": self.per_pos_acceptance_rates,
            "metrics": self.metrics,
        }

    @property
    def accepted_histogram(self) -> list[int]:
        """How many steps accepted 0, 1, ... K drafts, the bonus not counted."""
        return [before - after for before, after in pairwise((self.num_drafts, *self.per_pos_accepted, 0))]

    @property
    def metrics(self) -> dict[str, dict[str, object]] | None:
        """The same under the names and definitions of vLLM's responses; None without a draft, as there.

        Without steps the length is 1 and the rate 0. Source: `RequestSpecDecodeMetrics.to_dict` of vLLM 0.33.
        """
        if not self.num_speculative_tokens:
            return None
        found: dict[str, object] = {
            "mean_acceptance_length": self.acceptance_len or 1.0,
            "draft_acceptance_rate": self.overall_acceptance_rate or 0.0,
            "acceptance_histogram": self.accepted_histogram,
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_speculative_tokens,
        }
        return {"speculative_decoding": found}


def count_acceptance(outputs: Iterable[RequestOutput], num_speculative_tokens: int) -> AcceptanceCounts:
    """Pool the verify steps of finished requests."""
    counts = AcceptanceCounts(num_speculative_tokens)
    for output in outputs:
        widths = output.verify_widths or [num_speculative_tokens + 1] * len(output.acceptance_lengths)
        for length, width in zip(output.acceptance_lengths, widths, strict=True):
            counts.add(length - 1, width - 1)
    return counts


def request_metrics(output: RequestOutput, num_speculative_tokens: int) -> dict[str, dict[str, object]] | None:
    """`AcceptanceCounts.metrics` of one request, with what vLLM adds to it for each step."""
    metrics = count_acceptance([output], num_speculative_tokens).metrics if num_speculative_tokens else None
    if metrics is not None and output.acceptance_lengths:
        widths = output.verify_widths or [num_speculative_tokens + 1] * len(output.acceptance_lengths)
        metrics["speculative_decoding"] |= {
            "per_step_accepted": [length - 1 for length in output.acceptance_lengths],
            "per_step_drafted": [width - 1 for width in widths],
        }
    return metrics


def count_widths(outputs: Iterable[RequestOutput]) -> dict[int, int]:
    """How many steps of finished requests verified so many rows, narrowest first; 1 is a step that decoded plainly."""
    counts: Counter[int] = Counter()
    for output in outputs:
        counts[1] += output.num_plain_steps
        counts.update(output.verify_widths)
    return {width: count for width, count in sorted(counts.items()) if count}
