"""Acceptance counts under the names of vLLM's tests.

`num_accepted` excludes the bonus token, and `acceptance_len` includes it. Only verify steps with drafts count, not
prefills or plain decode steps. A draft token beyond a step's verify width is neither accepted nor rejected, so the step
does not count for that position.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

from dflash_runtime.documents import HIDDEN, OPTIONAL, Limits, computed_key
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.scheduling.request_output import RequestOutput

COUNT = Limits(least=0)

MAX_DRAFT_TOKENS = 1024
"""More draft tokens than any block has. Larger numbers in files and answers of others are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeDecoding:
    """Acceptance of one request or of many, under the names and definitions of vLLM's responses.

    Source: `RequestSpecDecodeMetrics.to_dict` of vLLM 0.33.
    """

    mean_acceptance_length: Annotated[float, "with the bonus token; 1 without steps"]
    draft_acceptance_rate: Annotated[float, "accepted drafts divided by verified drafts; 0 without steps"]
    acceptance_histogram: Annotated[list[int], "number of steps that accepted 0, 1, ... K drafts, without the bonus"]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: Annotated[int, "K"]
    per_step_accepted: Annotated[tuple[int, ...] | None, OPTIONAL, "of one request, in rows"] = None
    per_step_drafted: Annotated[tuple[int, ...] | None, OPTIONAL, "of one request, in rows"] = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """The field `metrics` of vLLM's responses."""

    speculative_decoding: SpeculativeDecoding


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts over verify steps, for blocks of `num_speculative_tokens` (K) drafts. A step may verify fewer drafts."""

    num_speculative_tokens: Annotated[int, HIDDEN] = 0
    num_drafts: Annotated[int, COUNT, "verify steps with drafts"] = 0
    num_accepted_tokens: Annotated[int, COUNT, "accepted drafts, without the bonus token"] = 0
    per_pos_accepted: list[Annotated[int, COUNT]] = field(default_factory=list)
    per_pos_verified: list[Annotated[int, COUNT]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_speculative_tokens = self.num_speculative_tokens or len(self.per_pos_accepted)
        if not 0 <= self.num_speculative_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidConfig("num_speculative_tokens", self.num_speculative_tokens, f"at most {MAX_DRAFT_TOKENS}")
        self.per_pos_accepted = self.per_pos_accepted or [0] * self.num_speculative_tokens
        self.per_pos_verified = self.per_pos_verified or [self.num_drafts] * self.num_speculative_tokens
        if len(self.per_pos_verified) != len(self.per_pos_accepted):
            expected = f"{len(self.per_pos_accepted)} counts, the length of per_pos_accepted"
            raise InvalidConfig("per_pos_verified", self.per_pos_verified, expected)

    def add(self, num_accepted: int, num_verified: int | None = None) -> None:
        """Count one verify step. `num_verified` is the number of its verified drafts, by default all.

        A step with more drafts than configured adds positions: a server may have a second method with longer drafts.
        """
        num_verified = max(num_accepted, self.num_speculative_tokens if num_verified is None else num_verified)
        self._widen(num_verified)
        self.num_drafts += 1
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.per_pos_accepted[position] += 1
        for position in range(num_verified):
            self.per_pos_verified[position] += 1

    def _widen(self, num_positions: int) -> None:
        more = [0] * (num_positions - self.num_speculative_tokens)
        self.per_pos_accepted += more
        self.per_pos_verified += more
        self.num_speculative_tokens += len(more)

    @property
    @computed_key
    def num_draft_tokens(self) -> int:
        """Number of verified drafts."""
        return sum(self.per_pos_verified)

    @property
    @computed_key
    def acceptance_len(self) -> float | None:
        """Tokens committed per verify step, including the target's own token, pooled over steps; None without steps.

        Equals 1 + sum of the rates, unless steps verified different numbers of drafts.
        """
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    @computed_key
    def is_capped(self) -> bool:
        """Whether some steps verified only part of their block, so that more drafts might have been accepted."""
        return self.num_draft_tokens < self.num_drafts * self.num_speculative_tokens

    @property
    @computed_key
    def draft_tokens_per_step(self) -> float | None:
        """Verified drafts per verify step; None without steps."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    @computed_key
    def overall_acceptance_rate(self) -> float | None:
        """Accepted drafts divided by verified drafts; None without verified drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    @computed_key
    def per_pos_acceptance_rates(self) -> list[float]:
        """Share of the steps that accepted position i, among the steps that verified it (unconditional).

        The rate of a position that no step verified is 0.
        """
        pairs = zip(self.per_pos_accepted, self.per_pos_verified, strict=True)
        return [accepted / verified if verified else 0.0 for accepted, verified in pairs] if self.num_drafts else []

    @property
    def accepted_histogram(self) -> list[int]:
        """Number of steps that accepted 0, 1, ... K drafts, without the bonus token."""
        return [before - after for before, after in pairwise((self.num_drafts, *self.per_pos_accepted, 0))]

    @property
    @computed_key
    def metrics(self) -> Metrics | None:
        """The same counts under the names of vLLM's responses; None without a draft, as in vLLM."""
        if not self.num_speculative_tokens:
            return None
        found = SpeculativeDecoding(
            mean_acceptance_length=self.acceptance_len or 1.0,
            draft_acceptance_rate=self.overall_acceptance_rate or 0.0,
            acceptance_histogram=self.accepted_histogram,
            num_spec_steps=self.num_drafts,
            num_accepted_draft_tokens=self.num_accepted_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_spec_tokens=self.num_speculative_tokens,
        )
        return Metrics(found)


def count_acceptance(outputs: Iterable[RequestOutput], num_speculative_tokens: int) -> AcceptanceCounts:
    """The counts over all verify steps of finished requests."""
    counts = AcceptanceCounts(num_speculative_tokens)
    for output in outputs:
        for length, width in zip(output.acceptance_lengths, _widths(output, num_speculative_tokens), strict=True):
            counts.add(length - 1, width - 1)
    return counts


def request_metrics(output: RequestOutput, num_speculative_tokens: int) -> Metrics | None:
    """`AcceptanceCounts.metrics` of one request, with the counts of each step, as in vLLM."""
    metrics = count_acceptance([output], num_speculative_tokens).metrics if num_speculative_tokens else None
    if metrics is None or not output.acceptance_lengths:
        return metrics
    return Metrics(
        replace(
            metrics.speculative_decoding,
            per_step_accepted=tuple(length - 1 for length in output.acceptance_lengths),
            per_step_drafted=tuple(width - 1 for width in _widths(output, num_speculative_tokens)),
        )
    )


def _widths(output: RequestOutput, num_speculative_tokens: int) -> list[int]:
    """Verified rows of each step: its drafts and the anchor. Without widths, at least its committed tokens."""
    configured = output.verify_widths or [num_speculative_tokens + 1] * len(output.acceptance_lengths)
    return list(map(max, configured, output.acceptance_lengths))


def count_widths(outputs: Iterable[RequestOutput]) -> dict[int, int]:
    """Verified rows -> number of steps of finished requests, narrowest first. Width 1 is a plain decode step."""
    counts: Counter[int] = Counter()
    for output in outputs:
        counts[1] += output.num_plain_steps
        counts.update(output.verify_widths)
    return {width: count for width, count in sorted(counts.items()) if count}
