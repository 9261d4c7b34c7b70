"""Two or more results held against the first one. Knows no terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.intervals.acceptance_difference import (
    MIN_COMPARED,
    AcceptanceDifference,
    holm,
    paired_difference,
    tokens_per_step,
    unpaired_difference,
)
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_runtime.errors import GateFailed, UsageError

Verdict = Literal["higher", "lower", "equivalent", "same", "undecided", "-"]
Pair = tuple[ConversationCounts | None, ConversationCounts | None]

NAMED_PROMPTS = 3
NOT_MEASURED = frozenset(
    (
        "draft", "draft_digest", "draft_modified_ns", "target_modified_ns", "date", "argv", "num_prompts",
        "prompts_digest", "max_num_requests", "scheduling", "dflash",
    )
)  # fmt: skip
"""Facts in which results that are compared may differ: the draft itself, and what decides no answer."""
SAME_BY_DIGEST = {"target": "target_digest"}
"""A name that says nothing where both results have the digest of what is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """One line of a comparison: both lengths over all conversations or those of one category, and the difference.

    P-values are corrected for all lines of their family. Without a `difference`, `reason` says why.
    """

    category: str | None
    base_len: float | None
    other_len: float | None
    num_conversations: int
    difference: AcceptanceDifference | None
    reason: str | None = None
    p_value: float | None = None
    equivalence_p_value: float | None = None

    @property
    def change(self) -> float | None:
        """By how much the other length is above the first; None where one of them is not known."""
        return None if self.base_len is None or self.other_len is None else self.other_len - self.base_len

    @property
    def verdict(self) -> Verdict:
        if self.difference is None or self.p_value is None:
            return "-"
        if self.difference.value == self.difference.error == 0:
            return "same"
        error_rate = 1 - self.difference.confidence
        if self.equivalence_p_value is not None and self.equivalence_p_value < error_rate:
            return "equivalent"
        if self.p_value < error_rate:
            return "higher" if self.difference.value > 0 else "lower"
        return "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One result held against the first one. `unlike` are facts that differ: name -> what each result has."""

    base: MeasuredResult
    other: MeasuredResult
    is_paired: bool
    total: Contrast
    categories: tuple[Contrast, ...]
    unlike: Mapping[str, tuple[Any, Any]]


def compare_results(
    results: Sequence[MeasuredResult], *, confidence: float = 0.95, tolerance: float | None = None, paired: bool = True
) -> tuple[Comparison, ...]:
    """Hold every further result against the first, paired by prompt unless that is waived or there are no rows.

    P-values are corrected for the number of results, and those of categories for all categories of all results.

    Raises:
        UsageError: results that are to be paired are of unlike prompts.
    """
    base, *others = results
    found = [_compare(base, other, confidence, paired=paired) for other in others]
    totals = iter(_corrected([item.total for item in found], tolerance))
    lines = iter(_corrected(list(chain.from_iterable(item.categories for item in found)), tolerance))
    return tuple(
        replace(item, total=next(totals), categories=tuple(next(lines) for _ in item.categories)) for item in found
    )


def check_no_regression(comparisons: Iterable[Comparison], tolerance: float | None) -> None:
    """Require that no result is lower than the first, in total or in a category.

    Without a tolerance, a result fails where its length is shown to be lower. With one, it fails unless a fall by more
    than the tolerance is ruled out, and where a category is shown to be lower by more.

    Raises:
        GateFailed: one fails, or cannot be judged.
    """
    for item in comparisons:
        name, total = item.other.name, item.total
        if total.difference is None:
            raise GateFailed(f"{name}: cannot be judged: {total.reason}")
        change = f"{total.difference.value:+.3f}"
        if tolerance is None and total.verdict == "lower":
            raise GateFailed(f"{name}: acceptance length {change} against {item.base.name}")
        if tolerance is not None and total.difference.lower_bound < -tolerance:
            raise GateFailed(
                f"{name}: a fall by more than {tolerance:g} is not ruled out: {change}, by one-sided bound "
                f"{total.difference.lower_bound:+.3f}",
                hint="measure more prompts, if the difference itself is small",
            )
        for line in item.categories:
            if line.difference and line.verdict == "lower" and line.difference.value < -(tolerance or 0):
                raise GateFailed(f"{name}: category {line.category}: acceptance length {line.difference.value:+.3f}")


def _compare(base: MeasuredResult, other: MeasuredResult, confidence: float, *, paired: bool) -> Comparison:
    no_rows = next((f"{item.name}: {item.why_no_rows}" for item in (base, other) if not item.conversations), None)
    is_paired = paired and no_rows is None
    pairs = _pair_up(base, other) if is_paired else _set_side_by_side(base, other)
    if no_rows is None:
        total = _contrast(None, pairs, confidence, is_paired=is_paired)
    else:
        total = Contrast(
            category=None,
            base_len=base.acceptance_len,
            other_len=other.acceptance_len,
            num_conversations=0,
            difference=None,
            reason=no_rows,
        )
    categories = {item.category for pair in pairs for item in pair if item is not None} - {None}
    lines = [
        _contrast(name, [pair for pair in pairs if _category(pair) == name], confidence, is_paired=is_paired)
        for name in sorted(filter(None, categories))
    ]
    return Comparison(
        base=base,
        other=other,
        is_paired=is_paired,
        total=total,
        categories=tuple(lines) if no_rows is None else (),
        unlike=_unlike(base, other, is_paired=is_paired),
    )


def _category(pair: Pair) -> str | None:
    return next(item.category for item in pair if item is not None)


def _contrast(category: str | None, pairs: Sequence[Pair], confidence: float, *, is_paired: bool) -> Contrast:
    base, other = ([(item.num_tokens, item.num_steps) for item in side if item] for side in zip(*pairs, strict=True))
    difference = (paired_difference if is_paired else unpaired_difference)(base, other, confidence)
    return Contrast(
        category=category,
        base_len=tokens_per_step(base),
        other_len=tokens_per_step(other),
        num_conversations=min(len(base), len(other)),
        difference=difference,
        reason=None if difference else f"an interval takes {MIN_COMPARED} prompts or more",
    )


def _corrected(lines: Sequence[Contrast], tolerance: float | None) -> list[Contrast]:
    """The lines with p-values, corrected for how many of them are tested."""
    tested = [(line, line.difference) for line in lines if line.difference is not None]
    values = iter(holm([difference.p_value for _, difference in tested]))
    within = iter(holm([difference.equivalence_p_value(tolerance or 0.0) for _, difference in tested]))
    found = []
    for line in lines:
        if line.difference is None:
            found.append(line)
            continue
        value, equivalent = next(values), next(within)
        kept = equivalent if tolerance is not None else None
        found.append(replace(line, p_value=value, equivalence_p_value=kept))
    return found


def _pair_up(base: MeasuredResult, other: MeasuredResult) -> list[Pair]:
    """Conversations of the same prompt; a prompt that comes twice is paired in order.

    Raises:
        UsageError: some prompt is not in both.
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
            f"{other.name}: not the prompts of {base.name}: {', '.join(parts)}",
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
    """The first names of a list, and that there are more."""
    return ", ".join(names[:NAMED_PROMPTS]) + (", ..." if len(names) > NAMED_PROMPTS else "")


def _set_side_by_side(base: MeasuredResult, other: MeasuredResult) -> list[Pair]:
    """Conversations of both results, each by itself."""
    return [*((item, None) for item in base.conversations), *((None, item) for item in other.conversations)]


def _unlike(base: MeasuredResult, other: MeasuredResult, *, is_paired: bool) -> dict[str, tuple[Any, Any]]:
    """Facts that both results state and that differ, but for those that say nothing about what was measured."""
    was, is_now = ({"definition": item.definition, **item.facts} for item in (base, other))
    shared = was.keys() & is_now.keys()
    told = {name for name, digest in SAME_BY_DIGEST.items() if digest in shared}
    told |= set() if is_paired else {"rendered_prompts_digest"}
    return {
        name: (was[name], is_now[name]) for name in sorted(shared - NOT_MEASURED - told) if was[name] != is_now[name]
    }
