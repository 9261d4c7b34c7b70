"""Acceptance length and its uncertainty, from the verify steps of a set of requests.

Conversations are resampled, not turns or steps. Steps of one text resemble each other, as do turns of one conversation,
so intervals over them would be too narrow. Source: cluster bootstrap, Cameron, Gelbach and Miller 2008;
`resampling.py` computes the intervals.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL, why_no_interval
from dflash_cli.acceptance.intervals.rare_prompts import ShareOfPrompts, fallen, risen
from dflash_cli.acceptance.intervals.resampling import linear_bounds, resampled_bounds
from dflash_runtime.documents import INLINE, NOT_REQUIRED, computed_key
from dflash_runtime.metrics import AcceptanceCounts, count_acceptance
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request_output import RequestOutput

if TYPE_CHECKING:
    from dflash_cli.acceptance.intervals.resampling import Floats

StepCounts = Sequence[tuple[int, int]]
"""Tokens that the verify steps of each request committed, and the number of these steps."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float
    confidence: float


def limit_text(num_prompts: int, confidence: float) -> str:
    """`64 distinct prompts can lack a kind of prompt that is rarer than 1 in 21`, at the interval's error rate."""
    share = ShareOfPrompts(0, num_prompts).upper(1 - confidence)
    rarity = f"1 in {int(1 / share)}" if share <= 0.5 else f"{share:.0%}"
    return f"{plural(num_prompts, 'distinct prompt')} can lack a kind of prompt that is rarer than {rarity}"


def value_text(value: float | None, interval: Interval | None = None, form: str = ".3f") -> str:
    """`3.439 [3.241, 3.659]`: a value with its interval if it has one. A missing value is `-`."""
    if value is None:
        return "-"
    ends = f" [{interval.low:{form}}, {interval.high:{form}}]" if interval is not None else ""
    return f"{value:{form}}{ends}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Acceptance over a set of requests."""

    counts: Annotated[AcceptanceCounts, INLINE]
    acceptance_len_interval: Annotated[Interval | None, "over resampled prompts"]
    acceptance_len_no_interval: Annotated[str | None, "why there is no interval"]
    per_pos_intervals: Annotated[tuple[Interval | None, ...], "intervals of per_pos_acceptance_rates"]
    per_pos_conditional_intervals: Annotated[
        tuple[Interval | None, ...],
        NOT_REQUIRED,
        "intervals of per_pos_conditional_rates, for positions that enough conversations reached",
    ] = ()
    histogram: Annotated[tuple[int, ...], "number of steps that committed 1, 2, ... K + 1 tokens"]
    num_requests: int
    num_conversations: int
    num_distinct_prompts: Annotated[
        int | None, NOT_REQUIRED, "units of the intervals: repeats of a prompt count as one"
    ] = None
    num_tokens: int
    definitions: Annotated[Mapping[str, float | None], "acceptance by each project's own definition"]

    def __post_init__(self) -> None:
        """Drop the intervals of a document of an earlier release if today's rules give none."""
        none, reason = (None,) * len(self.counts.per_pos_accepted), why_no_interval(self.num_units)
        if reason is not None and self.acceptance_len_interval is not None:
            object.__setattr__(self, "acceptance_len_interval", None)
            object.__setattr__(self, "acceptance_len_no_interval", reason)
            object.__setattr__(self, "per_pos_intervals", none)
        if reason is not None or not self.per_pos_conditional_intervals:
            object.__setattr__(self, "per_pos_conditional_intervals", none)

    @property
    def num_units(self) -> int:
        """Number of distinct prompts; in results of earlier releases, number of conversations."""
        return self.num_conversations if self.num_distinct_prompts is None else self.num_distinct_prompts

    @property
    def length_text(self) -> str:
        """The acceptance length and its interval, in tokens per step."""
        return value_text(self.counts.acceptance_len, self.acceptance_len_interval)

    @property
    @computed_key
    def per_pos_conditional_rates(self) -> list[float | None]:
        """Share of the steps that accepted position i, among the steps that accepted position i - 1.

        None if no step accepted position i - 1 or verified position i. All steps of an evaluation have the same width.
        """
        counts = self.counts
        reached = [counts.num_drafts, *counts.per_pos_accepted]
        return [
            after / before if before and verified else None
            for before, after, verified in zip(reached, counts.per_pos_accepted, counts.per_pos_verified, strict=False)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Acceptance over every anchor of a text. A live run has another mean: it skips anchors inside accepted blocks."""

    num_anchors: int
    mean_over_anchors: float | None
    mean_over_anchors_interval: Interval | None
    per_pos_acceptance_rates: list[float | None]
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, summary: Summary) -> "Anchors":
        """Return the result over all anchors from the summary of their blocks."""
        return cls(
            num_anchors=summary.counts.num_drafts,
            mean_over_anchors=summary.counts.acceptance_len,
            mean_over_anchors_interval=summary.acceptance_len_interval,
            per_pos_acceptance_rates=[*summary.counts.per_pos_acceptance_rates],
            histogram=summary.histogram,
        )


DEFINITIONS = {
    "vllm": "1 + accepted / steps, whole blocks (vLLM, speculators)",
    "zlab": "mean over prompts, as committed (z-lab, dflash 0.1.0)",
    "zlab_untruncated": "mean over prompts, whole blocks (z-lab, before)",
    "sglang": "mean over prompts, with the prompt's token (SGLang)",
    "committed": "tokens / steps, not counting past the answer's end",
    "mlx_ratio": "accepted / generated tokens, a ratio (dflash-mlx)",
}
"""Each project's definition of acceptance, short enough for a table. The keys are the keys of the JSON output.

"Mean over prompts" is the mean of each prompt's tokens / steps. "Whole blocks" counts tokens cut off by stops and
limits. "The prompt's token" is the first token, which prefill gives and no verify step.
"""


def summarise(
    outputs: Sequence[RequestOutput],
    num_speculative_tokens: int,
    *,
    conversations: Sequence[Hashable] | None = None,
    prompts: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Summary:
    """Return counts, intervals and the acceptance by every definition, over all requests together.

    `conversations` names the conversation of each request, by default its own. `prompts` names the distinct prompt of
    each request, by default its conversation: repeats of a prompt are not independent, so prompts are resampled.
    """
    names = range(len(outputs)) if conversations is None else conversations
    prompts = names if prompts is None else prompts
    counts = count_acceptance(outputs, num_speculative_tokens)
    num_speculative_tokens = counts.num_speculative_tokens
    lengths = _lengths_by_prompt(outputs, prompts, num_speculative_tokens)
    reason = _why_none(len(lengths), num_resamples)
    intervals: list[Interval | None] = [None] * (2 * num_speculative_tokens + 1)
    if reason is None:
        units = _acceptance_units(lengths)
        asked = _enough_for_interval(units)
        found = _intervals(units[asked], confidence=confidence, num_resamples=num_resamples, seed=seed)
        for place, interval in zip(asked, found, strict=True):
            intervals[place] = interval if interval.low < interval.high else None
        if intervals[0] is None:
            intervals[0] = _interval_of_equals(counts.acceptance_len, len(lengths), num_speculative_tokens, confidence)
    return Summary(
        counts=counts,
        num_requests=len(outputs),
        num_conversations=len(set(names)),
        num_distinct_prompts=len(set(prompts)),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        acceptance_len_interval=intervals[0],
        acceptance_len_no_interval=reason,
        per_pos_intervals=tuple(
            interval if verified else None
            for interval, verified in zip(intervals[1:], counts.per_pos_verified, strict=False)
        ),
        per_pos_conditional_intervals=tuple(intervals[num_speculative_tokens + 1 :]),
        histogram=tuple(map(sum, zip(*lengths, strict=True))) or (0,) * (num_speculative_tokens + 1),
        definitions=_definitions(outputs, counts),
    )


def running_interval(sample: StepCounts) -> tuple[float, float] | None:
    """Return the ends of a cheap 95% interval, for progress displays. `sample` has one item per distinct prompt."""
    import numpy as np

    if why_no_interval(len(sample)) is not None:
        return None
    low, high = linear_bounds(np.array([[sample]], dtype=np.float64), confidence=0.95)[0]
    return float(low), float(high)


def _why_none(num_units: int, num_resamples: int) -> Notice | None:
    """Return why the interval is missing, or None."""
    reason = why_no_interval(num_units)
    return Notice("no bootstrap was requested", id="no-bootstrap") if reason is None and not num_resamples else reason


def _intervals(units: "Floats", *, confidence: float, num_resamples: int, seed: int) -> list[Interval]:
    bounds = resampled_bounds(units, confidence=confidence, num_resamples=num_resamples, seed=seed)
    return [Interval(float(low), float(high), confidence) for low, high in bounds]


def pooled_acceptance_len(counts: StepCounts) -> float:
    """Return tokens per step over all requests, or 1 (no accepted token) without any step."""
    num_steps = sum(steps for _, steps in counts)
    return sum(tokens for tokens, _ in counts) / num_steps if num_steps else 1.0


def _interval_of_equals(
    length: float | None, num_prompts: int, num_speculative_tokens: int, confidence: float
) -> Interval | None:
    """Return the interval if all prompts have the same length: as many others as the rule of three leaves possible."""
    if length is None:
        return None
    share = ShareOfPrompts(0, num_prompts).upper((1 - confidence) / 2)
    return Interval(fallen(length, share), risen(length, share, num_speculative_tokens + 1), confidence)


def _lengths_by_prompt(
    outputs: Sequence[RequestOutput], prompts: Sequence[Hashable], num_speculative_tokens: int
) -> list[list[int]]:
    """Return the number of steps that committed 1, 2, ... K + 1 tokens, for each distinct prompt with steps."""
    found: dict[Hashable, list[int]] = {}
    for output, name in zip(outputs, prompts, strict=True):
        if output.acceptance_lengths:
            lengths = found.setdefault(name, [0] * (num_speculative_tokens + 1))
            for length in output.acceptance_lengths:
                lengths[length - 1] += 1
    return list(found.values())


def _acceptance_units(lengths: Sequence[Sequence[int]]) -> "Floats":
    """Return units `[2K + 1, 1, U, 2]`: tokens per step, acceptance rates and conditional rates of the positions."""
    import numpy as np

    counts = np.array(lengths, dtype=np.float64)
    num_steps = counts.sum(axis=1)
    accepted = num_steps[:, None] - counts.cumsum(axis=1)[:, :-1]
    numerators = np.concatenate([num_steps[:, None] + accepted.sum(axis=1, keepdims=True), accepted, accepted], axis=1)
    steps = np.repeat(num_steps[:, None], accepted.shape[1] + 1, axis=1)
    reached = np.concatenate([num_steps[:, None], accepted[:, :-1]], axis=1)
    return np.stack([numerators.T, np.concatenate([steps, reached], axis=1).T], axis=-1)[:, None]


def _enough_for_interval(units: "Floats") -> list[int]:
    """Return the indices of quantities with enough conversations."""
    num_speaking = (units[:, 0, :, 1] > 0).sum(axis=1).tolist()
    return [place for place, count in enumerate(num_speaking) if count >= MIN_FOR_INTERVAL]


def _definitions(outputs: Sequence[RequestOutput], counts: AcceptanceCounts) -> dict[str, float | None]:
    """Return the acceptance of these steps by each project's definition."""
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
