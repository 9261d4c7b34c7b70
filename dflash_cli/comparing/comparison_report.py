"""Comparisons as JSON and as tables of at most 80 columns."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar

from dflash_cli.acceptance.intervals.statistics import value_text
from dflash_cli.comparing.contrasts import Contrast, PositionContrast, Tested
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import Comparison, shown_change
from dflash_cli.terminal.shown import Table
from dflash_runtime.documents import INLINE, NOT_REQUIRED
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural, shorten

CATEGORY_WIDTH = 14
WIDTH = 80
CORRECTED = "share of steps, p corrected for the number of positions (Holm)"


def letter(place: int) -> str:
    """Return A, B, ... as the name of a result in tables."""
    return ascii_uppercase[place] if place < len(ascii_uppercase) else str(place + 1)


def legend(results: Sequence[MeasuredResult]) -> list[str]:
    """Return a line for each result: `A  old.json  acceptance length 3.439, 64 prompts`."""
    return [
        f"{letter(place)}  {item.name}  acceptance length {item.acceptance_len:.3f}, "
        + (plural(len(item.conversations), "prompt") if item.conversations else f"totals only ({item.source})")
        for place, item in enumerate(results)
    ]


def shape_lines(results: Sequence[MeasuredResult]) -> list[str]:
    """Return the shapes of each result's acceptance curve that point to a fault."""
    return [
        f"{letter(place)} {line}" if line.startswith("shape") else f"  {line}"
        for place, item in enumerate(results)
        for shape in item.shapes
        for line in shape.lines
    ]


def headline(comparison: Comparison, place: int) -> str:
    """`B against A: +0.123 [+0.045, +0.201], p = 0.0023, higher`."""
    total = comparison.total
    start = f"{letter(place)} against A: "
    if total.difference is None:
        return f"{start}not known"
    change = f"{start}{value_text(total.difference, total.interval, '+.3f')}"
    none = ", no interval" if total.interval is None else ""
    sure = f", p {p_value_text(total.p_value, '= ')}, {total.verdict}" if total.estimate is not None else ""
    return f"{change}{none}{sure}"


def how(comparison: Comparison, tolerance: float | None, num_results: int) -> list[str]:
    """Return lines that explain the computation of the difference and the meaning of its verdict."""
    total = comparison.total
    if total.estimate is None:
        return [f"no interval: {total.reason}"]
    kind = "paired by prompt" if comparison.is_paired else "as independent samples"
    interval = total.interval
    about = (
        f"no interval: {total.reason}"
        if interval is None
        else f"in brackets, the {100 * interval.confidence:g}% interval"
    )
    lines = textwrap.wrap(f"{kind}; {about}", WIDTH)
    if total.change is not None and total.verdict != total.change:
        lines.append(f"{total.change} on these prompts; a kind of prompt that they lack may outweigh it")
    elif any(line.change is not None and line.verdict == "undecided" for line in comparison.categories):
        level = 1 - total.estimate.confidence
        lines.append(f"undecided at p < {level:.2g}: a kind of prompt that a category lacks may outweigh it")
    corrected = ["results"] * (num_results > 2) + ["categories"] * bool(comparison.categories)
    if corrected:
        lines.append(f"p is corrected for the number of {' and '.join(corrected)} (Holm)")
    if tolerance is not None:
        lines.append(f"equivalent: a difference of {tolerance:g} or more, either way, is ruled out")
    return lines


def table(comparison: Comparison, place: int) -> Table:
    """Return columns and rows: each category, then all prompts."""
    columns = ("category", "prompts", "A", letter(place), "difference", "p", "verdict")
    return columns, [_row(line) for line in (*comparison.categories, comparison.total)]


def position_table(comparison: Comparison, place: int) -> Table:
    """Return columns and rows: the share of steps that accept each draft position, and its difference."""
    rows = [
        (str(line.position), *(value_text(rate) for rate in line.acceptance_rates), *contrast_cells(line, "+.3f"))
        for line in comparison.positions
    ]
    return ("position", "A", letter(place), "difference", "p", "verdict"), rows


def position_lines(comparison: Comparison) -> list[str]:
    """Return lines that name the positions that differ, or the reason for no answer. Empty without rows of prompts."""
    if comparison.no_positions is not None:
        is_told = comparison.total.estimate is None
        return [] if is_told else textwrap.wrap(f"by position: not known: {comparison.no_positions}", WIDTH)
    return textwrap.wrap(f"by position: {position_verdict(comparison)}; {CORRECTED}", WIDTH)


def position_finding(comparison: Comparison) -> str:
    """Return the verdict by position for a report, with the settings in which the two results differ."""
    other = f", measured with other settings: {', '.join(comparison.unlike)}" if comparison.unlike else ""
    return f"{position_verdict(comparison)}{other}; {CORRECTED}"


def position_verdict(comparison: Comparison) -> str:
    """`lower at 4 to 7`: the positions that differ, or the reason for no verdict."""
    found = {
        verdict: [line.position for line in comparison.positions if line.verdict == verdict]
        for verdict in ("lower", "higher")
    }
    named = [f"{verdict} at {_ranges(positions)}" for verdict, positions in found.items() if positions]
    if not any(line.verdict for line in comparison.positions):
        named = [f"no verdict: {comparison.positions[0].reason}"] if comparison.positions else ["nothing was drafted"]
    return ", ".join(named) or "no position is shown to differ"


def _ranges(numbers: Sequence[int]) -> str:
    """`1, 3 to 5`: ascending numbers, neighbours together."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _row(line: Contrast) -> tuple[str, ...]:
    lengths = [value_text(length, form=".2f") for length in line.acceptance_lens]
    return (
        shorten(line.category or "all", CATEGORY_WIDTH),
        str(line.num_conversations),
        *lengths,
        *contrast_cells(line),
    )


def warning(comparison: Comparison) -> Notice | None:
    """Return a warning with the facts in which the two results differ, or None if all are equal."""
    if not comparison.unlike:
        return None
    fields = ", ".join(f"{name} {shown_change(values)}" for name, values in comparison.unlike.items())
    text = f"{comparison.other.name} was measured under other conditions than {comparison.base.name}: {fields}"
    return Notice(text, id="measured-otherwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonEntry:
    """A further result compared with the first one."""

    base: str
    other: str
    is_paired: bool
    total: Annotated[Contrast, INLINE]
    categories: Mapping[str, Contrast]
    positions: Annotated[
        tuple[PositionContrast, ...], NOT_REQUIRED, "share of verify steps that accept each draft position"
    ] = ()
    no_positions: Annotated[str | None, NOT_REQUIRED, "why positions is empty"] = None
    unlike: Annotated[Mapping[str, tuple[Any, Any]], "facts that differ: the value of each result"]

    @classmethod
    def of(cls, comparison: Comparison) -> "ComparisonEntry":
        """Return the entry of a comparison."""
        return cls(
            base=comparison.base.name,
            other=comparison.other.name,
            is_paired=comparison.is_paired,
            total=comparison.total,
            categories={line.category or "": line for line in comparison.categories},
            positions=comparison.positions,
            no_positions=comparison.no_positions,
            unlike=comparison.unlike,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareDocument:
    """Result of `dflash compare`."""

    KIND: ClassVar[str] = "compare"

    results: tuple[MeasuredResult, ...]
    tolerance: float | None
    comparisons: Annotated[tuple[ComparisonEntry, ...], "each further result compared with the first"]


def compare_document(comparisons: Sequence[Comparison], tolerance: float | None) -> CompareDocument:
    """Return the document of comparisons with the same first result."""
    return CompareDocument(
        results=compared_results(comparisons),
        tolerance=tolerance,
        comparisons=tuple(map(ComparisonEntry.of, comparisons)),
    )


def compared_results(comparisons: Sequence[Comparison]) -> tuple[MeasuredResult, ...]:
    """Return the first result and every result compared with it; empty without comparisons."""
    return (*(item.base for item in comparisons[:1]), *(item.other for item in comparisons))


def contrast_cells(line: Tested, form: str = "+.2f") -> tuple[str, str, str]:
    """Return difference, p-value and verdict as cells of a table."""
    return value_text(line.difference, line.interval, form), p_value_text(line.p_value), line.verdict or "-"


def p_value_text(value: float | None, equals: str = "") -> str:
    """`0.012`, or `<0.001`."""
    if value is None:
        return "-"
    return f"{equals}{value:.3f}" if value >= 0.001 else f"{'< ' if equals else '<'}0.001"
