"""Comparisons as JSON and as tables of at most 80 columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, Literal

from dflash_cli.acceptance.curve_shape import CurveShape
from dflash_cli.acceptance.intervals.statistics import Interval, value_text
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import Comparison, Contrast
from dflash_runtime.documents import INLINE
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import shorten

CATEGORY_WIDTH = 14


def letter(place: int) -> str:
    """Return A, B, ... as the name of a result in tables."""
    return ascii_uppercase[place] if place < len(ascii_uppercase) else str(place + 1)


def legend(results: Sequence[MeasuredResult]) -> list[str]:
    """Return a line for each result: `A  old.json  acceptance length 3.439, 64 prompts`."""
    return [
        f"{letter(place)}  {item.name}  acceptance length {item.acceptance_len:.3f}, "
        + (f"{len(item.conversations)} prompts" if item.conversations else f"totals only ({item.source})")
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
        return f"{start}{total.change:+.3f}, no interval" if total.change is not None else f"{start}not known"
    return (
        f"{start}{value_text(total.difference.value, total.difference.interval, '+.3f')}, "
        f"p {p_value_text(total.p_value, '= ')}, {total.verdict}"
    )


def how(comparison: Comparison, tolerance: float | None, num_results: int) -> list[str]:
    """Return lines that explain how the difference was computed and what the verdict means."""
    total = comparison.total
    if total.difference is None:
        return [f"no interval: {total.reason}"]
    kind = "paired by prompt" if comparison.is_paired else "as independent samples"
    lines = [f"{kind}; in brackets, the {100 * total.difference.confidence:g}% interval"]
    corrected = ["results"] * (num_results > 2) + ["categories"] * bool(comparison.categories)
    if corrected:
        lines.append(f"p is corrected for the number of {' and '.join(corrected)} (Holm)")
    if tolerance is not None:
        lines.append(f"equivalent: a difference of {tolerance:g} or more, either way, is ruled out")
    return lines


def table(comparison: Comparison, place: int) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return columns and rows: each category, then all prompts."""
    columns = ("category", "prompts", "A", letter(place), "difference", "p", "verdict")
    return columns, [_row(line) for line in (*comparison.categories, comparison.total)]


def _row(line: Contrast) -> tuple[str, ...]:
    name = line.category or "all"
    return (
        shorten(name, CATEGORY_WIDTH),
        str(line.num_conversations),
        value_text(line.base_len, None, ".2f"),
        value_text(line.other_len, None, ".2f"),
        difference_text(line),
        p_value_text(line.p_value),
        line.verdict,
    )


def warning(comparison: Comparison) -> Notice | None:
    """Return a warning if the two results were measured under different conditions."""
    if not comparison.unlike:
        return None
    fields = ", ".join(
        f"{name} {shorten(str(was), 24)} -> {shorten(str(now), 24)}" for name, (was, now) in comparison.unlike.items()
    )
    text = f"{comparison.other.name} was measured under other conditions than {comparison.base.name}: {fields}"
    return Notice(text, id="measured-otherwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastEntry:
    """The difference between two results, over all conversations or over the conversations of one category."""

    acceptance_lens: tuple[float | None, float | None]
    num_conversations: int
    difference: float | None
    interval: Interval | None
    p_value: Annotated[float | None, "corrected for the number of results, or of categories"]
    equivalence_p_value: float | None
    verdict: Literal["higher", "lower", "equivalent", "same", "undecided"] | None
    reason: Annotated[str | None, "why there is no interval"]

    @classmethod
    def of(cls, line: Contrast) -> "ContrastEntry":
        """Return the entry of a line of a comparison."""
        return cls(
            acceptance_lens=(line.base_len, line.other_len),
            num_conversations=line.num_conversations,
            difference=line.change,
            interval=line.difference.interval if line.difference is not None else None,
            p_value=line.p_value,
            equivalence_p_value=line.equivalence_p_value,
            verdict=None if line.verdict == "-" else line.verdict,
            reason=line.reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultEntry:
    """One compared result."""

    name: str
    source: Annotated[str, "the program that wrote the file"]
    acceptance_len: float
    num_conversations: Annotated[int, "0 if the file has totals only"]
    why_no_rows: str | None
    shapes: tuple[CurveShape, ...]

    @classmethod
    def of(cls, result: MeasuredResult) -> "ResultEntry":
        """Return the entry of a result."""
        return cls(
            name=result.name,
            source=result.source,
            acceptance_len=result.acceptance_len,
            num_conversations=len(result.conversations),
            why_no_rows=result.why_no_rows,
            shapes=tuple(result.shapes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonEntry:
    """A further result compared with the first one."""

    base: str
    other: str
    is_paired: bool
    total: Annotated[ContrastEntry, INLINE]
    categories: Mapping[str, ContrastEntry]
    unlike: Annotated[Mapping[str, tuple[Any, Any]], "facts that differ: the value of each result"]

    @classmethod
    def of(cls, comparison: Comparison) -> "ComparisonEntry":
        """Return the entry of a comparison."""
        return cls(
            base=comparison.base.name,
            other=comparison.other.name,
            is_paired=comparison.is_paired,
            total=ContrastEntry.of(comparison.total),
            categories={line.category or "": ContrastEntry.of(line) for line in comparison.categories},
            unlike=comparison.unlike,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareDocument:
    """Result of `dflash compare`."""

    KIND: ClassVar[str] = "compare"

    results: tuple[ResultEntry, ...]
    tolerance: float | None
    comparisons: Annotated[tuple[ComparisonEntry, ...], "each further result compared with the first"]


def compare_document(comparisons: Sequence[Comparison], tolerance: float | None) -> CompareDocument:
    """Return the document of comparisons with the same first result."""
    return CompareDocument(
        results=result_entries(comparisons),
        tolerance=tolerance,
        comparisons=tuple(map(ComparisonEntry.of, comparisons)),
    )


def result_entries(comparisons: Sequence[Comparison]) -> tuple[ResultEntry, ...]:
    """Return the first result and every result compared with it; empty without comparisons."""
    results = [*(item.base for item in comparisons[:1]), *(item.other for item in comparisons)]
    return tuple(map(ResultEntry.of, results))


def difference_text(line: Contrast) -> str:
    if line.difference is not None:
        return value_text(line.difference.value, line.difference.interval, "+.2f")
    return value_text(line.change, None, "+.2f")


def p_value_text(value: float | None, equals: str = "") -> str:
    """`0.012`, or `<0.001`."""
    if value is None:
        return "-"
    return f"{equals}{value:.3f}" if value >= 0.001 else f"{'< ' if equals else '<'}0.001"
