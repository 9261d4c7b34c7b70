"""Speed-ups of candidates, their intervals, and the best candidate for each batch size and category.

    speed-up = acceptance length x milliseconds of a plain step / milliseconds of a drafting step

Acceptance length and times are measured separately, so each has its own interval. The interval of the length comes from
resampling prompts. The interval of the ratio of times comes from Student's t over the timed rounds, paired by round. On
a log scale the speed-up is a sum, and MOVER combines the intervals of the terms (Zou and Donner 2008). The intervals
of a batch size hold for all its candidates together (Bonferroni), because the best of several is chosen by its figure.
A single time decides nothing, because it lacks an interval.

Candidates are compared with the best one in tokens per millisecond, paired by prompt. The plain step cancels out. A
candidate is level with the best unless an interval, corrected for the number of comparisons, shows that it is slower.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.conversation_counts import pool_repeats
from dflash_cli.acceptance.intervals.acceptance_difference import TokenCounts, paired_difference, tokens_per_step
from dflash_cli.acceptance.intervals.enough_prompts import why_no_interval, why_no_test
from dflash_cli.acceptance.intervals.resampling import estimate, linear_bounds, tail_widths
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.tuning.candidates import Candidate
from dflash_cli.tuning.round_intervals import half_width
from dflash_cli.tuning.step_costs import StepCosts, Times
from dflash_runtime.documents import HIDDEN, INLINE, NOT_REQUIRED, computed_key

Payoff = Literal["pays", "does not pay", "undecided"]
Arm = tuple[TokenCounts, Times]
"""One side of a comparison: tokens and steps of each conversation, and step times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """A candidate's speed-up over plain decoding."""

    candidate: Annotated[Candidate, INLINE]
    speedup: float
    interval: Annotated[Interval | None, "for all candidates of the batch size together"]
    no_interval: Annotated[str | None, NOT_REQUIRED, "why there is no interval"] = None
    bounds: Annotated[Interval | None, HIDDEN] = None

    @property
    @computed_key
    def payoff(self) -> Payoff:
        """Whether the candidate is certainly faster or certainly slower than plain decoding.

        It is decided from fewer prompts than an interval needs, with room for a kind of prompt that they lack.
        """
        if self.bounds is None or self.bounds.low <= 1 <= self.bounds.high:
            return "undecided"
        return "pays" if self.bounds.low > 1 else "does not pay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Every candidate at a batch size, for the prompts of a category or for all prompts."""

    category: Annotated[str | None, "null: all prompts"]
    batch: int
    speedups: Annotated[tuple[Speedup, ...], "the best first"]
    ties: Annotated[tuple[Candidate, ...], HIDDEN]

    @property
    @computed_key
    def level(self) -> list[str]:
        """Names of candidates that are not certainly slower than the best, such as resized-3."""
        return [item.name for item in self.ties]

    @property
    def best(self) -> Speedup:
        return self.speedups[0]

    @property
    @computed_key
    def payoff(self) -> Payoff:
        """Drafting pays if the best candidate pays. It does not pay if every candidate is certainly slower."""
        if self.best.payoff == "pays":
            return "pays"
        is_hopeless = all(item.payoff == "does not pay" for item in self.speedups)
        return "does not pay" if is_hopeless else "undecided"


def choose(evaluations: Mapping[Candidate, Evaluation], costs: StepCosts, confidence: float) -> list[Choice]:
    """Return the choice for all prompts and for each category, at each batch size with known step times."""
    names = [None, *next(iter(evaluations.values())).categories]
    found = (_choose(evaluations, costs, name, batch, confidence) for name in names for batch in costs.batches)
    return [item for item in found if item is not None]


def overall_best(choices: Sequence[Choice]) -> Candidate | None:
    """Return the candidate with the highest geometric mean of speed-ups, for an engine with one K for all batch sizes.

    Engines resize the block, so other candidates are left out. None if drafting pays at no batch size, and even
    the best candidate is not faster than plain decoding on average.
    """
    choices = [item for item in choices if item.category is None]
    logs: dict[Candidate, list[float]] = {}
    for choice in choices:
        for item in choice.speedups:
            if item.candidate.is_resized:
                logs.setdefault(item.candidate, []).append(math.log(item.speedup))
    best = max(logs, key=lambda item: fmean(logs[item]), default=None)
    is_gain = best is not None and fmean(logs[best]) > 0
    return best if is_gain or any(item.payoff == "pays" for item in choices) else None


def batch_schedule(choices: Sequence[Choice]) -> list[tuple[int, int, int]]:
    """Return ranges (first batch size, last batch size, K) without gaps. K is the best resized block, 0 if none pays.

    Between two measured batch sizes, the nearer one on a log scale decides. Neighbouring ranges with one K are joined.
    """
    measured = sorted((item.batch, _scheduled(item)) for item in choices if item.category is None)
    ranges: list[tuple[int, int, int]] = []
    for place, (batch, number) in enumerate(measured):
        is_last = place + 1 == len(measured)
        last = batch if is_last else max(batch, math.ceil(math.sqrt(batch * measured[place + 1][0])) - 1)
        first = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == number:
            first = ranges.pop()[0]
        ranges.append((first, last, number))
    return ranges


def _scheduled(choice: Choice) -> int:
    resized = [item for item in choice.speedups if item.candidate.is_resized]
    pays = any(item.payoff != "does not pay" for item in resized)
    return resized[0].candidate.num_speculative_tokens if resized and pays else 0


def _choose(
    evaluations: Mapping[Candidate, Evaluation], costs: StepCosts, category: str | None, batch: int, confidence: float
) -> Choice | None:
    """Return the choice, or None if no candidate has both verify steps and a step time."""
    timed = [candidate for candidate in evaluations if costs.of(candidate, batch) is not None]
    level = 1 - (1 - confidence) / max(1, len(timed))
    found = [
        item
        for candidate in timed
        if (item := speedup(evaluations[candidate], costs, candidate, category, batch, level)) is not None
    ]
    if not found:
        return None
    best, *others = sorted(found, key=lambda item: -item.speedup)
    level = 1 - (1 - confidence) / max(1, len(others))  # so that all comparisons hold together (Bonferroni)
    sides = {
        item.candidate: _arm(evaluations[item.candidate], category, costs.of(item.candidate, batch)) for item in found
    }
    tied = [item.candidate for item in others if not is_slower(sides[item.candidate], sides[best.candidate], level)]
    return Choice(category=category, batch=batch, speedups=(best, *others), ties=tuple(tied))


def speedup(
    evaluation: Evaluation, costs: StepCosts, candidate: Candidate, category: str | None, batch: int, confidence: float
) -> Speedup | None:
    """Return a candidate's speed-up on the prompts of a category; None if steps or times are unknown."""
    summary = evaluation.total if category is None else evaluation.categories[category]
    length, times = summary.counts.acceptance_len, costs.of(candidate, batch)
    if length is None or times is None:
        return None
    plain = costs.plain[batch]
    value = length * fmean(plain) / fmean(times)
    counts = [item for item in _arm(evaluation, category, times)[0] if item[1]]
    of_times, reason = _ratio_width(plain, times, confidence), summary.acceptance_len_no_interval
    of_length = _log_widths(counts, summary.acceptance_len_interval, confidence)
    if of_length is None or math.isinf(of_times):
        reason = reason or "each step time was measured once, and an interval needs more"
        return Speedup(candidate=candidate, speedup=value, interval=None, no_interval=reason)
    below, above = (math.hypot(width, of_times) for width in of_length)
    below_unseen, above_unseen = _log_room(length, len(counts))
    low, high = value * math.exp(-below - below_unseen), value * math.exp(above + above_unseen)
    bounds = Interval(low, high, confidence)
    interval = bounds if summary.acceptance_len_interval is not None else None
    return Speedup(candidate=candidate, speedup=value, interval=interval, no_interval=reason, bounds=bounds)


def _log_widths(counts: TokenCounts, known: Interval | None, confidence: float) -> tuple[float, float] | None:
    """Return how far the log length may be below and above; None with too few prompts for a test.

    `known` is the length's interval of another confidence. If it is None, the delta method replaces it.
    """
    import numpy as np

    if why_no_test(len(counts)) is not None:
        return None
    units = np.array([[counts]], dtype=float)
    wider, length = 1.0, float(estimate(units)[0])
    if known is None:
        low, high = linear_bounds(units, confidence=confidence)[0].tolist()
        known = Interval(low, high, confidence)
    elif known.confidence != confidence:
        wider = float(tail_widths(units, confidence)[0] / tail_widths(units, known.confidence)[0])
    low = max(known.low, 1.0)  # a step commits at least one token
    return wider * math.log(length / low), wider * math.log(known.high / length)


def _log_room(length: float, num_prompts: int) -> tuple[float, float]:
    """Return how far the log length falls and rises with one more prompt of mean size: with no accepted token, or free.

    This prompt stands for a kind that few prompts may lack.
    """
    if why_no_interval(num_prompts) is None:
        return 0.0, 0.0
    return math.log((num_prompts + length) / (num_prompts + 1)), math.log1p(1 / num_prompts)


def _arm(evaluation: Evaluation, category: str | None, times: Times | None) -> Arm:
    assert times is not None, "a candidate that has a speed-up"
    conversations = pool_repeats(item for item in evaluation.conversations if category in (None, item.category))
    return [(item.num_tokens, item.num_steps) for item in conversations], times


def is_slower(arm: Arm, best: Arm, confidence: float) -> bool:
    """Return whether an arm certainly gives fewer tokens per millisecond than the best arm, on the same prompts.

    Scaling by the ratio of step times turns the comparison into a difference of tokens per step. Its error includes the
    error of the step times.
    """
    (counts, times), (best_counts, best_times) = arm, best
    ratio = fmean(best_times) / fmean(times)
    scaled = [(tokens * ratio, steps) for tokens, steps in counts]
    difference, length = paired_difference(best_counts, scaled, confidence), tokens_per_step(scaled)
    if difference is None or length is None:
        return False
    of_times = _ratio_width(best_times, times, confidence)
    return difference.value + math.hypot(difference.half_width, length * of_times) < 0


def _ratio_width(times: Times, others: Times, confidence: float) -> float:
    """Return half the width of the interval of the log ratio of times, paired by round if both have equal lengths."""
    if len(times) == len(others):
        logs = [math.log(one / other) for one, other in zip(times, others, strict=True)]
        return half_width(logs, confidence)
    return math.hypot(*(half_width([math.log(item) for item in side], confidence) for side in (times, others)))
