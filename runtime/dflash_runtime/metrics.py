"""Acceptance counts under the names of vLLM's tests.

`num_accepted` excludes the bonus token, `acceptance_len` includes it. A draft step is a request's verify step with
drafts; a prefill is no draft step, nor is a step that decodes plainly.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dflash_runtime.scheduling.request import RequestOutput


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts over verify steps that drafted `num_speculative_tokens` (K) tokens each."""

    num_speculative_tokens: int
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    per_pos_accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_pos_accepted = self.per_pos_accepted or [0] * self.num_speculative_tokens

    def add(self, num_accepted: int) -> None:
        """Count one verify step."""
        self.num_drafts += 1
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.per_pos_accepted[position] += 1

    @property
    def num_draft_tokens(self) -> int:
        return self.num_drafts * self.num_speculative_tokens

    @property
    def acceptance_len(self) -> float | None:
        """Tokens committed a verify step, pooled over steps; None without steps. Equals 1 + sum of the rates."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_tokens_per_step(self) -> float | None:
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def overall_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def per_pos_acceptance_rates(self) -> list[float]:
        """Share of all steps in which position i was accepted (unconditional)."""
        return [count / self.num_drafts for count in self.per_pos_accepted] if self.num_drafts else []

    def to_json(self) -> dict[str, object]:
        """The figures under vLLM's names."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_len": self.acceptance_len,
            "draft_tokens_per_step": self.draft_tokens_per_step,
            "overall_acceptance_rate": self.overall_acceptance_rate,
            "per_pos_accepted": self.per_pos_accepted,
            "per_pos_acceptance_rates": self.per_pos_acceptance_rates,
        }


def count_acceptance(outputs: Iterable[RequestOutput], num_speculative_tokens: int) -> AcceptanceCounts:
    """Pool the verify steps of finished requests."""
    counts = AcceptanceCounts(num_speculative_tokens)
    for output in outputs:
        for length in output.acceptance_lengths:
            counts.add(length - 1)
    return counts
