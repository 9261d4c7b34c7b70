"""Compare two or more results with the first one. Prints nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Annotated, Any, Literal

from dflash_cli.acceptance.conversation_counts import ConversationCounts, pool_repeats
from dflash_cli.acceptance.intervals.acceptance_difference import (
    AcceptanceDifference,
    fewest_of_sides,
    fewest_prompts,
    holm,
    no_interval,
    paired_difference,
    tokens_per_step,
    unpaired_difference,
)
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_runtime.documents import HIDDEN, computed_key
from dflash_runtime.errors import GateFailed, UsageError
from dflash_runtime.phrases import shorten

Verdict = Literal["higher", "lower", "equivalent", "same", "undecided"]
Pair = tuple[ConversationCounts | None, ConversationCounts | None]

NAMED_PROMPTS, SHOWN_VALUE = 3, 24
NOT_MEASURED = frozenset(
    (
        "draft", "draft_digest", "draft_modified_ns", "target_modified_ns", "date", "argv", "num_prompts",
        "prompts_digest", "max_num_requests", "scheduling", "dflash", "lock_sha256",
    )
)  # fmt: skip
"""Facts in which compared results may differ: the draft itself, and facts that do not affect answers."""
MACHINE = frozenset(
    (
        "device", "device_name", "kernels", "python", "torch", "transformers", "prefix_cache", "confidence",
        "num_resamples",
    )
)  # fmt: skip
"""Facts about machine and releases, which change rounding at most. A gate only warns of them."""
SAME_BY_DIGEST = {"target": "target_digest"}
"""Names that are ignored if both results have the digest of the named file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The difference between two results, over all distinct prompts or over the prompts of one category.

    P-values are corrected for the number of compared results, or of categories. `estimate` is None if there are too
    few prompts for a test. An interval needs more prompts than a test.
    """

    category: Annotated[str | None, HIDDEN]
    acceptance_lens: tuple[float | None, float | None]
    num_conversations: int
    estimate: Annotated[AcceptanceDifference | None, HIDDEN]
    reason: Annotated[str | None, "why there is no interval"] = None
    p_value: Annotated[float | None, "corrected for the number of results, or of categories"] = None
    equivalence_p_value: float | None = None

    @property
    @computed_key
    def difference(self) -> float | None:
        """The second acceptance length minus the first."""
        if self.estimate is not None:
            return self.estimate.value
        first, second = self.acceptance_lens
        return None if first is None or second is None else second - first

    @property
    @computed_key
    def interval(self) -> Interval | None:
        """The interval of the difference; null if `reason` says why."""
        return self.estimate.interval if self.estimate is not None else None

    @property
    @computed_key
    def verdict(self) -> Verdict | None:
        """Whether the second acceptance length is higher, lower or equivalent; null with too few prompts.

        "higher" and "lower" are about all prompts. Few prompts must differ by enough to outweigh a kind they may lack.
        """
        if self.estimate is None or self.p_value is None:
            return None
        if self.equivalence_p_value is not None and self.equivalence_p_value < 1 - self.estimate.confidence:
            return "equivalent"
        if not self.estimate.num_differing:
            return "same"
        return self.change if self.change is not None and self.estimate.outweighs_unseen else "undecided"

    @property
    def change(self) -> Literal["higher", "lower"] | None:
        """Whether the second length is higher or lower on these prompts by more than luck; None if it may be luck."""
        if self.estimate is None or self.p_value is None or self.p_value >= 1 - self.estimate.confidence:
            return None
        return "higher" if self.estimate.value > 0 else "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One result compared with the first. `unlike` has the facts in which they differ, with both values."""

    base: MeasuredResult
    other: MeasuredResult
    is_paired: bool
    total: Contrast
    categories: tuple[Contrast, ...]
    unlike: Mapping[str, tuple[Any, Any]]


def compare_results(
    results: Sequence[MeasuredResult], *, confidence: float = 0.95, tolerance: float | None = None, paired: bool = True
) -> tuple[Comparison, ...]:
    """Compare every further result with the first. Results with rows of prompts are paired by prompt if `paired`.

    P-values of totals are corrected for the number of results, p-values of categories for all categories of all
    results.

    Raises:
        UsageError: results to be paired have different prompts.
    """
    base, *others = results
    found = [_compare(base, other, confidence, paired=paired) for other in others]
    totals = iter(correct_p_values([item.total for item in found], tolerance))
    lines = iter(correct_p_values(list(chain.from_iterable(item.categories for item in found)), tolerance))
    return tuple(
        replace(item, total=next(totals), categories=tuple(next(lines) for _ in item.categories)) for item in found
    )


def check_comparable(comparisons: Iterable[Comparison], allowed: Sequence[str]) -> None:
    """Require that results to be judged were measured alike, except for settings in `allowed` and the machine.

    Raises:
        UsageError: naming the settings that differ.
    """
    for item in comparisons:
        differing = [name for name in item.unlike if name not in MACHINE and name not in allowed]
        if differing:
            values = ", ".join(f"{name} {shown_change(item.unlike[name])}" for name in differing)
            raise UsageError(
                f"{item.other.name} and {item.base.name} cannot be judged by a gate: {values}",
                id="incomparable-results",
                field="--gate",
                found=differing,
                hint=f"measure both alike, or allow the difference with --allow-unlike {','.join(differing)}",
            )


def check_no_regression(comparisons: Iterable[Comparison], tolerance: float | None) -> None:
    """Require that no result is lower than the first, in total or in a category.

    Without a tolerance, a result fails if its length is significantly lower on these prompts. With a tolerance, it
    fails unless its lower bound rules out a larger drop. It also fails if a category is significantly lower and drops
    by more.

    Raises:
        GateFailed: a result fails, or cannot be judged.
    """
    for item in comparisons:
        name, total = item.other.name, item.total
        if total.estimate is None:
            raise GateFailed(f"{name}: cannot be judged: {total.reason}", id="cannot-be-judged")
        change = f"{total.estimate.value:+.3f}"
        if tolerance is None and total.change == "lower":
            text = f"{name}: acceptance length {change} against {item.base.name}"
            raise GateFailed(text, id="lower", field="acceptance_len", found=total.estimate.value)
        if tolerance is not None and total.estimate.lower_bound < -tolerance:
            raise GateFailed(
                f"{name}: a drop of more than {tolerance:g} is possible: estimate {change}, lower bound "
                f"{total.estimate.lower_bound:+.3f}",
                id="drop-possible",
                field="acceptance_len",
                found=total.estimate.lower_bound,
                expected=f"at least {-tolerance:g}",
                hint=f"even equal results rule it out from {fewest_prompts(total.estimate, tolerance)} distinct "
                "prompts on; measure more prompts, or raise --tolerance",
            )
        for line in item.categories:
            if line.estimate and line.change == "lower" and line.estimate.value < -(tolerance or 0):
                text = f"{name}: category {line.category}: acceptance length {line.estimate.value:+.3f}"
                raise GateFailed(text, id="category-lower", field=line.category, found=line.estimate.value)


def _compare(base: MeasuredResult, other: MeasuredResult, confidence: float, *, paired: bool) -> Comparison:
    no_rows = next((f"{item.name}: {item.why_no_rows}" for item in (base, other) if not item.conversations), None)
    is_paired = paired and no_rows is None
    unpaired = (*((item, None) for item in base.conversations), *((None, item) for item in other.conversations))
    pairs: Sequence[Pair] = _pair_up(base, other) if is_paired else unpaired
    lines: list[Contrast] = []
    if no_rows is None:
        total = _contrast(None, pairs, confidence, is_paired=is_paired)
        categories = set(map(_category, pairs))
        lines = [
            _contrast(name, [pair for pair in pairs if _category(pair) == name], confidence, is_paired=is_paired)
            for name in sorted(filter(None, categories))
        ]
    else:
        lengths = base.acceptance_len, other.acceptance_len
        total = Contrast(category=None, acceptance_lens=lengths, num_conversations=0, estimate=None, reason=no_rows)
    return Comparison(
        base=base,
        other=other,
        is_paired=is_paired,
        total=total,
        categories=tuple(lines),
        unlike=_unlike(base, other, is_paired=is_paired),
    )


def _category(pair: Pair) -> str | None:
    return next(item.category for item in pair if item is not None)


def _contrast(category: str | None, pairs: Sequence[Pair], confidence: float, *, is_paired: bool) -> Contrast:
    sides = [pool_repeats(item for item in side if item) for side in zip(*pairs, strict=True)]
    base, other = ([(item.num_tokens, item.num_steps) for item in side] for side in sides)
    estimate = (paired_difference if is_paired else unpaired_difference)(base, other, confidence)
    fewest = min(len(base), len(other))
    return Contrast(
        category=category,
        acceptance_lens=(tokens_per_step(base), tokens_per_step(other)),
        num_conversations=fewest,
        estimate=estimate,
        reason=no_interval(estimate, fewest, fewest_of_sides(len(base), len(other), is_paired=is_paired)),
    )


def correct_p_values(lines: Sequence[Contrast], tolerance: float | None = None) -> list[Contrast]:
    """Return the lines with p-values, corrected for the number of lines with a test.

    With a tolerance, they also have a p-value of equivalence.
    """
    tested = [line.estimate for line in lines if line.estimate is not None]
    values = iter(holm([item.p_value for item in tested]))
    within: Iterator[float | None] = repeat(None)
    if tolerance is not None:
        within = iter(holm([item.equivalence_p_value(tolerance) for item in tested]))
    return [
        line if line.estimate is None else replace(line, p_value=next(values), equivalence_p_value=next(within))
        for line in lines
    ]


def _pair_up(base: MeasuredResult, other: MeasuredResult) -> list[Pair]:
    """Return pairs of conversations with the same prompt. Repeated prompts are paired in order.

    Raises:
        UsageError: a prompt is only in one result.
    """
    sides = [_by_key(item.conversations) for item in (base, other)]
    missing = [[side[key].name for key in side if key not in away] for side, away in (sides, sides[::-1])]
    if any(missing):
        parts = [
            f"{len(names)} only in {item.name} ({_some(names)})"
            for names, item in zip(missing, (base, other), strict=True)
            if names
        ]
        raise UsageError(
            f"{other.name} and {base.name} have different prompts: {', '.join(parts)}",
            id="different-prompts",
            hint="measure both on the same prompts, or pass --unpaired to compare them as independent samples",
        )
    return [(item, sides[1][key]) for key, item in sides[0].items()]


def _by_key(conversations: Sequence[ConversationCounts]) -> dict[tuple[str, int], ConversationCounts]:
    seen: Counter[str] = Counter()
    found = {}
    for item in conversations:
        found[item.digest, seen[item.digest]] = item
        seen[item.digest] += 1
    return found


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list, with an ellipsis if there are more."""
    return ", ".join(names[:NAMED_PROMPTS]) + (", ..." if len(names) > NAMED_PROMPTS else "")


def shown_change(values: tuple[Any, Any]) -> str:
    """`bfloat16 -> float32`, with long values cut."""
    return " -> ".join(shorten(str(value), SHOWN_VALUE) for value in values)


def _unlike(base: MeasuredResult, other: MeasuredResult, *, is_paired: bool) -> dict[str, tuple[Any, Any]]:
    """Return facts that both results state and that differ, except facts that do not affect the measurement."""
    was, is_now = ({"definition": item.definition, **item.facts} for item in (base, other))
    shared = was.keys() & is_now.keys()
    told = {name for name, digest in SAME_BY_DIGEST.items() if digest in shared}
    told |= set() if is_paired else {"rendered_prompts_digest"}
    return {
        name: (was[name], is_now[name]) for name in sorted(shared - NOT_MEASURED - told) if was[name] != is_now[name]
    }
