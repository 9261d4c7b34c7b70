"""Acceptance length and its uncertainty, from the verify steps of a set of requests.

Conversations are resampled, not turns or steps: steps of one text resemble each other, as do the turns of one
conversation, so an interval over them would be too narrow. Intervals are percentile bootstraps that draw whole
conversations. Source: Efron and Tibshirani 1993, chapter 13; clusters as in Cameron, Gelbach and Miller 2008.

numpy is imported where an interval is taken, so that reading headers needs none.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

from dflash_runtime.metrics import AcceptanceCounts, count_acceptance
from dflash_runtime.scheduling.request import RequestOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

StepCounts = Sequence[tuple[int, int]]
"""For each request: tokens its verify steps committed, and how many steps there were."""

MIN_CONVERSATIONS = 8
"""With fewer an interval misses the truth more often than it says, by whatever method, so there is none."""
MAX_DRAWN = 4_000_000
"""Indices drawn at a time, which bounds the memory of a bootstrap."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float
    confidence: float

    def to_json(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high, "confidence": self.confidence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Acceptance over a set of requests."""

    counts: AcceptanceCounts
    num_requests: int
    num_conversations: int
    num_tokens: int
    interval: Interval | None
    histogram: tuple[int, ...]
    definitions: dict[str, float | None]

    @property
    def conditional_rates(self) -> list[float | None]:
        """Share of steps that accepted position i among those that accepted position i - 1; None where none did.

        None also where no step verified it: all steps of an evaluation are as wide.
        """
        counts = self.counts
        reached = [counts.num_drafts, *counts.per_pos_accepted]
        return [
            after / before if before and verified else None
            for before, after, verified in zip(reached, counts.per_pos_accepted, counts.per_pos_verified, strict=False)
        ]

    def to_json(self) -> dict[str, object]:
        return {
            **self.counts.to_json(),
            "acceptance_len_interval": self.interval.to_json() if self.interval else None,
            "per_pos_conditional_rates": self.conditional_rates,
            "histogram": list(self.histogram),
            "num_requests": self.num_requests,
            "num_conversations": self.num_conversations,
            "num_tokens": self.num_tokens,
            "definitions": self.definitions,
        }


DEFINITIONS = {
    "vllm": "1 + accepted / steps, over all steps, counting whole blocks (vLLM, speculators)",
    "zlab": "mean over prompts of tokens / steps, not counting past the end of the answer (z-lab dflash 0.1.0)",
    "zlab_untruncated": "mean over prompts of tokens / steps, counting whole blocks (z-lab, before 0.1.0)",
    "sglang": "mean over prompts of answer tokens / steps, with the token after the prompt (SGLang, per request)",
    "committed": "tokens / steps, over all steps, not counting past the end of the answer",
    "mlx_ratio": "accepted tokens / generated tokens (dflash-mlx; a ratio, not a length)",
}
"""How each project defines acceptance; the keys are those of the JSON output."""


def summarise(
    outputs: Sequence[RequestOutput],
    num_speculative_tokens: int,
    *,
    conversations: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Summary:
    """Pool requests into counts, an interval and every definition.

    `conversations` says for each request to which conversation it belongs; without it each is one of its own.
    """
    conversations = range(len(outputs)) if conversations is None else conversations
    counts = count_acceptance(outputs, num_speculative_tokens)
    histogram = [0] * (num_speculative_tokens + 1)
    for output in outputs:
        for length in output.acceptance_lengths:
            histogram[length - 1] += 1
    return Summary(
        counts=counts,
        num_requests=len(outputs),
        num_conversations=len(set(conversations)),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        interval=bootstrap_interval(
            outputs, conversations, confidence=confidence, num_resamples=num_resamples, seed=seed
        ),
        histogram=tuple(histogram),
        definitions=_definitions(outputs, counts),
    )


def bootstrap_interval(
    outputs: Sequence[RequestOutput],
    conversations: Sequence[Hashable] | None = None,
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
) -> Interval | None:
    """Interval of the pooled acceptance length over resampled conversations.

    None for fewer than MIN_CONVERSATIONS with steps. A percentile interval of few conversations is too narrow, so its
    tails are those of Student's t. Source: Hesterberg 2015, "What Teachers Should Know about the Bootstrap", the
    expanded percentile interval.
    """
    sample = _pool_conversations(count_steps(outputs), conversations or range(len(outputs)))
    if len(sample) < MIN_CONVERSATIONS or num_resamples < 1:
        return None
    drawn = _resample([list(sample)], num_resamples, seed)
    return _percentiles(drawn[:, 0], confidence, tail=_expanded_tail((1 - confidence) / 2, len(sample)))


def paired_interval(
    base: StepCounts, other: StepCounts, *, confidence: float, num_resamples: int, seed: int
) -> Interval | None:
    """Interval of how much longer the pooled acceptance length of `other` is, on the same requests as `base`.

    Each resample draws the same requests on both sides, and the tails are Student's, as in `bootstrap_interval`. None
    for fewer than two requests that have steps on both.
    """
    pairs = [pair for pair in zip(base, other, strict=True) if pair[0][1] and pair[1][1]]
    if len(pairs) < 2 or num_resamples < 1:
        return None
    drawn = _resample([[pair[side] for pair in pairs] for side in (0, 1)], num_resamples, seed)
    tail = _expanded_tail((1 - confidence) / 2, len(pairs))
    return _percentiles(drawn[:, 1] - drawn[:, 0], confidence, tail=tail)


def count_steps(outputs: Sequence[RequestOutput]) -> StepCounts:
    """For each request: tokens its verify steps committed, and how many steps there were."""
    return [(sum(output.acceptance_lengths), len(output.acceptance_lengths)) for output in outputs]


def pooled_acceptance_len(counts: StepCounts) -> float:
    """Tokens per step over these requests; without any step 1, the value for no accepted token."""
    num_steps = sum(steps for _, steps in counts)
    return sum(tokens for tokens, _ in counts) / num_steps if num_steps else 1.0


def _pool_conversations(counts: StepCounts, conversations: Sequence[Hashable]) -> StepCounts:
    """Tokens and steps of each conversation that has steps."""
    pooled: dict[Hashable, tuple[int, int]] = {}
    for (tokens, steps), name in zip(counts, conversations, strict=True):
        before = pooled.get(name, (0, 0))
        pooled[name] = before[0] + tokens, before[1] + steps
    return [item for item in pooled.values() if item[1]]


def _resample(sides: Sequence[StepCounts], num_resamples: int, seed: int) -> "NDArray[Any]":
    """Pooled lengths of resamples, `[num_resamples, sides]`; each draws the same units on every side."""
    import numpy as np

    counts = np.array(sides, dtype=np.int64)  # [sides, units, tokens and steps]
    num_units = counts.shape[1]
    generator = np.random.default_rng(seed)
    chunk = max(1, MAX_DRAWN // num_units)
    parts = []
    for start in range(0, num_resamples, chunk):
        drawn = generator.integers(0, num_units, (min(chunk, num_resamples - start), num_units))
        sums = np.stack([[side[:, field][drawn].sum(axis=1) for field in (0, 1)] for side in counts])
        parts.append((sums[:, 0] / sums[:, 1]).T)
    return np.concatenate(parts)


def _percentiles(estimates: "NDArray[Any]", confidence: float, *, tail: float) -> Interval:
    import numpy as np

    low, high = np.quantile(estimates, [tail, 1 - tail])
    return Interval(float(low), float(high), confidence)


def _expanded_tail(tail: float, count: int) -> float:
    """The share to cut off on either side of a bootstrap of `count` units, so that it is as wide as Student's t."""
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_quantile(1 - tail, count - 1))


def student_quantile(share: float, freedom: int) -> float:
    """A quantile of Student's t, by its expansion about the normal one.

    To 0.5% from 7 degrees of freedom on, for shares up to 0.995. Source: Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(share)
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom**power) for power, term in enumerate(terms))


def _definitions(outputs: Sequence[RequestOutput], counts: AcceptanceCounts) -> dict[str, float | None]:
    """Each project's own figure, on the same steps."""
    stepped = [output for output in outputs if output.acceptance_lengths]
    if not stepped:
        return dict.fromkeys(DEFINITIONS)
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "vllm": counts.acceptance_len,
        "zlab": fmean(fmean(output.committed_lengths) for output in stepped),
        "zlab_untruncated": fmean(fmean(output.acceptance_lengths) for output in stepped),
        "sglang": fmean(len(output.token_ids) / len(output.acceptance_lengths) for output in stepped),
        "committed": sum(sum(output.committed_lengths) for output in stepped) / counts.num_drafts,
        "mlx_ratio": counts.num_accepted_tokens / num_tokens,
    }
