"""Acceptance length and its uncertainty, from the verify steps of a set of requests.

Requests are resampled, not steps: steps of one text resemble each other, so an interval over steps would be too
narrow. Intervals are percentile bootstraps that draw whole requests. Source: Efron and Tibshirani 1993,
chapter 13; clusters as in Cameron, Gelbach and Miller 2008.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from dflash_runtime.metrics import AcceptanceCounts, count_acceptance
from dflash_runtime.scheduling.request import RequestOutput

StepCounts = Sequence[tuple[int, int]]
"""For each request: tokens its verify steps committed, and how many steps there were."""


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
    num_tokens: int
    interval: Interval | None
    histogram: tuple[int, ...]
    definitions: dict[str, float | None]

    @property
    def conditional_rates(self) -> list[float | None]:
        """Share of steps that accepted position i among those that accepted position i - 1."""
        reached = [self.counts.num_drafts, *self.counts.per_pos_accepted]
        return [
            after / before if before else None
            for before, after in zip(reached, self.counts.per_pos_accepted, strict=False)
        ]

    def to_json(self) -> dict[str, object]:
        return {
            **self.counts.to_json(),
            "acceptance_len_interval": self.interval.to_json() if self.interval else None,
            "per_pos_conditional_rates": self.conditional_rates,
            "histogram": list(self.histogram),
            "num_requests": self.num_requests,
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
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Summary:
    """Pool requests into counts, an interval and every definition."""
    counts = count_acceptance(outputs, num_speculative_tokens)
    histogram = [0] * (num_speculative_tokens + 1)
    for output in outputs:
        for length in output.acceptance_lengths:
            histogram[length - 1] += 1
    return Summary(
        counts=counts,
        num_requests=len(outputs),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        interval=bootstrap_interval(outputs, confidence=confidence, num_resamples=num_resamples, seed=seed),
        histogram=tuple(histogram),
        definitions=_definitions(outputs, counts),
    )


def bootstrap_interval(
    outputs: Sequence[RequestOutput], *, confidence: float, num_resamples: int, seed: int
) -> Interval | None:
    """Interval of the pooled acceptance length over resampled requests; None for fewer than two with steps."""
    sample = [counts for counts in count_steps(outputs) if counts[1]]
    if len(sample) < 2 or num_resamples < 1:
        return None
    return _bootstrap(
        lambda drawn: pooled_acceptance_len([sample[index] for index in drawn]),
        len(sample),
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
    )


def paired_interval(
    base: StepCounts, other: StepCounts, *, confidence: float, num_resamples: int, seed: int
) -> Interval | None:
    """Interval of how much longer the pooled acceptance length of `other` is, on the same requests as `base`.

    Each resample draws the same requests on both sides. None for fewer than two that have steps on both.
    """
    pairs = [pair for pair in zip(base, other, strict=True) if pair[0][1] and pair[1][1]]
    if len(pairs) < 2 or num_resamples < 1:
        return None

    def difference(drawn: Sequence[int]) -> float:
        chosen = [pairs[index] for index in drawn]
        return pooled_acceptance_len([pair[1] for pair in chosen]) - pooled_acceptance_len([pair[0] for pair in chosen])

    return _bootstrap(difference, len(pairs), confidence=confidence, num_resamples=num_resamples, seed=seed)


def count_steps(outputs: Sequence[RequestOutput]) -> StepCounts:
    """For each request: tokens its verify steps committed, and how many steps there were."""
    return [(sum(output.acceptance_lengths), len(output.acceptance_lengths)) for output in outputs]


def pooled_acceptance_len(counts: StepCounts) -> float:
    """Tokens per step over these requests; without any step 1, the value for no accepted token."""
    num_steps = sum(steps for _, steps in counts)
    return sum(tokens for tokens, _ in counts) / num_steps if num_steps else 1.0


def _bootstrap(
    estimate: Callable[[Sequence[int]], float], num_requests: int, *, confidence: float, num_resamples: int, seed: int
) -> Interval:
    """Percentile interval of an estimate over resampled indices of requests."""
    generator = random.Random(seed)
    indices = range(num_requests)
    estimates = sorted(estimate(generator.choices(indices, k=num_requests)) for _ in range(num_resamples))
    tail = (1 - confidence) / 2
    return Interval(_quantile(estimates, tail), _quantile(estimates, 1 - tail), confidence)


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


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (Hyndman and Fan 1996, type 7)."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
