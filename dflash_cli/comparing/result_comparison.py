"""Compare two or more results with the first one. Prints nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_cli.acceptance.conversation_counts import ConversationCounts, Pair, pool_pairs
from dflash_cli.acceptance.intervals.acceptance_difference import (
    fewest_of_sides,
    fewest_prompts,
    no_interval,
    paired_difference,
    tokens_per_step,
    unpaired_difference,
)
from dflash_cli.comparing.contrasts import Contrast, PositionContrast, correct_p_values
from dflash_cli.comparing.measured_result import MeasuredResult, read_result
from dflash_cli.comparing.position_contrasts import contrast_positions
from dflash_runtime.errors import GateFailed, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import shorten

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
class Comparison:
    """One result compared with the first. `unlike` has the facts in which they differ, with both values.

    Without differences by position, `no_positions` says why.
    """

    base: MeasuredResult
    other: MeasuredResult
    is_paired: bool
    total: Contrast
    categories: tuple[Contrast, ...]
    positions: tuple[PositionContrast, ...]
    no_positions: Notice | None
    unlike: Mapping[str, tuple[Any, Any]]


def compare_results(
    results: Sequence[MeasuredResult], *, confidence: float = 0.95, tolerance: float | None = None, paired: bool = True
) -> tuple[Comparison, ...]:
    """Compare every further result with the first. Results with rows of prompts are paired by prompt if `paired`.

    P-values of totals are corrected for the number of results, p-values of categories for all categories of all
    results, p-values of positions for all positions of all results.

    Raises:
        UsageError: results to be paired have different prompts.
    """
    base, *others = results
    found = [_compare(base, other, confidence, paired=paired) for other in others]
    totals = iter(correct_p_values([item.total for item in found], tolerance))
    lines = iter(correct_p_values(list(chain.from_iterable(item.categories for item in found)), tolerance))
    positions = iter(correct_p_values(list(chain.from_iterable(item.positions for item in found))))
    return tuple(
        replace(
            item,
            total=next(totals),
            categories=tuple(next(lines) for _ in item.categories),
            positions=tuple(next(positions) for _ in item.positions),
        )
        for item in found
    )


def compare_files(paths: Sequence[Path], names: Sequence[str]) -> tuple[Comparison, ...]:
    """Compare the results in some files with the first one, under other names. Empty if they have different prompts."""
    results = [replace(read_result(path), name=name) for path, name in zip(paths, names, strict=True)]
    try:
        return compare_results(results) if len(results) > 1 else ()
    except UsageError as error:
        if error.id == "different-prompts":
            return ()
        raise


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
                hint=f"equal results pass from {fewest_prompts(total.estimate, tolerance)} distinct prompts on; "
                "measure more prompts, or raise --tolerance",
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
    positions, no_positions = contrast_positions(base, other, pairs, confidence, is_paired=is_paired)
    return Comparison(
        base=base,
        other=other,
        is_paired=is_paired,
        total=total,
        categories=tuple(lines),
        positions=positions,
        no_positions=no_positions,
        unlike=_unlike(base, other, is_paired=is_paired),
    )


def _category(pair: Pair) -> str | None:
    return next(item.category for item in pair if item is not None)


def _contrast(category: str | None, pairs: Sequence[Pair], confidence: float, *, is_paired: bool) -> Contrast:
    base, other = ([(item.num_tokens, item.num_steps) for item in side] for side in pool_pairs(pairs))
    estimate = (paired_difference if is_paired else unpaired_difference)(base, other, confidence)
    fewest = min(len(base), len(other))
    return Contrast(
        category=category,
        acceptance_lens=(tokens_per_step(base), tokens_per_step(other)),
        num_conversations=fewest,
        estimate=estimate,
        reason=no_interval(estimate, fewest, fewest_of_sides(len(base), len(other), is_paired=is_paired)),
    )


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
    """Return facts that both results state and that differ, except facts that do not affect the measurement.

    A fact that one of two files of the same program and release lacks is None there: an option without a value.
    """
    was, is_now = ({"definition": item.definition, **item.facts} for item in (base, other))
    shared = was.keys() & is_now.keys()
    if base.source == other.source and "dflash" in shared and was["dflash"] == is_now["dflash"]:
        shared = was.keys() | is_now.keys()
    told = {name for name, digest in SAME_BY_DIGEST.items() if digest in shared}
    told |= set() if is_paired else {"rendered_prompts_digest"}
    return {
        name: (was.get(name), is_now.get(name))
        for name in sorted(shared - NOT_MEASURED - told)
        if was.get(name) != is_now.get(name)
    }
