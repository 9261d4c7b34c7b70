"""Comparisons as JSON and as tables of at most 80 columns."""

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import Comparison, Contrast

CATEGORY_WIDTH = 14


def letter(place: int) -> str:
    """A, B, ... by which tables name the results."""
    return ascii_uppercase[place] if place < len(ascii_uppercase) else str(place + 1)


def legend(results: Sequence[MeasuredResult]) -> list[str]:
    """`A  old.json  3.439, 64 prompts`, a line for each result."""
    return [
        f"{letter(place)}  {item.name}  acceptance length {item.acceptance_len:.3f}, "
        + (f"{len(item.conversations)} prompts" if item.conversations else f"totals only ({item.source})")
        for place, item in enumerate(results)
    ]


def shape_lines(results: Sequence[MeasuredResult]) -> list[str]:
    """What the curves by position tell of faults, of each result that has such a shape."""
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
    interval = total.difference.interval
    return (
        f"{start}{total.difference.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}], "
        f"p {p_value_text(total.p_value, '= ')}, {total.verdict}"
    )


def how(comparison: Comparison, tolerance: float | None, num_results: int) -> list[str]:
    """How the difference was taken, and what the verdict says, where `num_results` were compared."""
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
    """Columns and rows: the categories, and all together."""
    columns = ("category", "prompts", "A", letter(place), "difference", "p", "verdict")
    return columns, [_row(line) for line in (*comparison.categories, comparison.total)]


def _row(line: Contrast) -> tuple[str, ...]:
    name = line.category or "all"
    return (
        name if len(name) <= CATEGORY_WIDTH else f"{name[: CATEGORY_WIDTH - 1]}…",
        str(line.num_conversations),
        _length(line.base_len),
        _length(line.other_len),
        difference_text(line),
        p_value_text(line.p_value),
        line.verdict,
    )


def warning(comparison: Comparison) -> str | None:
    """What was measured otherwise than the first result, beside the draft."""
    if not comparison.unlike:
        return None
    fields = ", ".join(f"{name} {_short(was)} -> {_short(now)}" for name, (was, now) in comparison.unlike.items())
    return f"{comparison.other.name} was measured otherwise than {comparison.base.name}: {fields}"


def to_json(comparisons: Sequence[Comparison], tolerance: float | None) -> dict[str, Any]:
    """The document of `dflash compare --json`."""
    results = [comparisons[0].base, *(item.other for item in comparisons)]
    return {
        "results": [_result_json(item) for item in results],
        "tolerance": tolerance,
        "comparisons": [
            {
                "base": item.base.name,
                "other": item.other.name,
                "is_paired": item.is_paired,
                **contrast_json(item.total),
                "categories": {line.category: contrast_json(line) for line in item.categories},
                "unlike": {name: list(values) for name, values in item.unlike.items()},
            }
            for item in comparisons
        ],
    }


def _result_json(result: MeasuredResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "source": result.source,
        "acceptance_len": result.acceptance_len,
        "num_conversations": len(result.conversations),
        "why_no_rows": result.why_no_rows,
        "shapes": [shape.to_json() for shape in result.shapes],
    }


def contrast_json(line: Contrast) -> Mapping[str, Any]:
    return {
        "acceptance_lens": [line.base_len, line.other_len],
        "num_conversations": line.num_conversations,
        "difference": line.change,
        "interval": line.difference.interval.to_json() if line.difference else None,
        "p_value": line.p_value,
        "equivalence_p_value": line.equivalence_p_value,
        "verdict": None if line.verdict == "-" else line.verdict,
        "reason": line.reason,
    }


def _length(length: float | None) -> str:
    return "-" if length is None else f"{length:.2f}"


def difference_text(line: Contrast) -> str:
    if line.difference is not None:
        interval = line.difference.interval
        return f"{line.difference.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
    return "-" if line.change is None else f"{line.change:+.2f}"


def p_value_text(value: float | None, equals: str = "") -> str:
    """`0.012`, or `<0.001`."""
    if value is None:
        return "-"
    return f"{equals}{value:.3f}" if value >= 0.001 else f"{'< ' if equals else '<'}0.001"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
