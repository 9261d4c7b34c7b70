"""Acceptance length and its uncertainty, from the verify steps of a set of requests.

The unit of chance is the request, not the step: steps of one text resemble each other, so an interval over steps
would be too narrow. Intervals are percentile bootstraps that draw whole requests. Source: Efron and Tibshirani 1993,
chapter 13; clusters as in Cameron, Gelbach and Miller 2008.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dflash_runtime.metrics import AcceptanceCounts, count_acceptance
from dflash_runtime.scheduling.request import RequestOutput


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
    "vllm": "1 + accepted / steps, pooled over steps, whole blocks (vLLM, speculators)",
    "zlab": "mean over prompts of each prompt's mean step, cut at stops and limits (z-lab dflash 0.1.0)",
    "zlab_untruncated": "mean over prompts of each prompt's mean step, whole blocks (z-lab, before 0.1.0)",
    "sglang": "mean over prompts of tokens / steps, the prefill's token included (SGLang, per request)",
    "committed": "tokens committed a step, pooled over steps, cut at stops and limits",
    "mlx_ratio": "accepted drafts / tokens generated (dflash-mlx; a ratio, no length)",
}
"""What each project calls acceptance, by our key for it."""


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
    steps = [len(output.acceptance_lengths) for output in outputs if output.acceptance_lengths]
    lengths = [sum(output.acceptance_lengths) for output in outputs if output.acceptance_lengths]
    if len(steps) < 2 or num_resamples < 1:
        return None
    generator = random.Random(seed)
    places = range(len(steps))
    estimates = []
    for _ in range(num_resamples):
        drawn = generator.choices(places, k=len(steps))
        estimates.append(sum(lengths[place] for place in drawn) / sum(steps[place] for place in drawn))
    estimates.sort()
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
        "zlab": fmean(fmean(output.kept_lengths) for output in stepped),
        "zlab_untruncated": fmean(fmean(output.acceptance_lengths) for output in stepped),
        "sglang": fmean(len(output.token_ids) / len(output.acceptance_lengths) for output in stepped),
        "committed": sum(sum(output.kept_lengths) for output in stepped) / counts.num_drafts,
        "mlx_ratio": counts.num_accepted_tokens / num_tokens,
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (Hyndman and Fan 1996, type 7)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
