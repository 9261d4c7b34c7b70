"""Judge the causes named for planted kinds of faults, and print the page of all cells."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LARGE, COSTS = 0.5, 0.1
NAMED, TOO_LONG = "named", "too long"
WORDS = ("right", "wrong", NAMED, "low", "remark", "silent", TOO_LONG)

HEAD = """# Planted kinds of faults

Causes that `dflash diagnose` names for drafts with one planted fault. Written by `examples/plant_kinds.py`.

| word | meaning |
|---|---|
| right | the sentence names the fault or the damaged part |
| wrong | it names another cause |
| named | it names a cause that nobody has judged |
| low | no cause; a finding gives the figure, says that it is low and lists what was tried |
| remark | the same as a remark, because sound drafts may accept as little |
| silent | no finding |
| too long | the diagnosis exceeded its time limit |
"""


def word_of(row: Mapping[str, Any], part: str, right: str | None) -> str:
    """The judgement of one diagnosis; `right` is a pattern of right causes."""
    found = row.get(part)
    if found is None:
        return TOO_LONG if row.get("too_long") and part == "plain" else ""
    if found["has_cause"] and right is None:
        return NAMED
    if found["has_cause"]:
        words = f"{found['rule']} {found['sentence'].partition('; next:')[0]}"
        return "right" if right is not None and re.search(right, words) else "wrong"
    low = [severity for rule, severity, *_ in found["findings"] if rule == "R06"]
    if low:
        return "remark" if low == ["info"] else "low"
    return "silent"


def render(
    rows: Iterable[Mapping[str, Any]],
    faults: Iterable[Any],
    judged: Mapping[str, str] | None = None,
    factors: str | None = None,
) -> str:
    """The page. `judged` has the judgement of each cell (family/name/strength) instead of the kinds' patterns.

    `factors` names the factors of the readings that were tried, if not all were tried.
    """
    patterns = {fault.name: getattr(fault, "right", None) for fault in faults}
    undoable = {fault.name: getattr(fault, "is_undoable", getattr(fault, "undoable", True)) for fault in faults}
    lines, counted = [], []
    for row in rows:
        if row.get("not_applicable") or row["name"] not in patterns:
            continue
        key = f"{row['family']}/{row['name']}/{row['strength']}"
        plain, expected = (_judged(row, part, patterns[row["name"]], judged, key) for part in ("plain", "expected"))
        counted.append((row, plain, expected, undoable[row["name"]]))
        cause = row.get("refused") or row.get("failed") or _cause(row)
        length = "" if row.get("length") is None else f"{row['length']:.2f}"
        loss = "" if row.get("loss") is None else f"{row['loss']:.0%}"
        cells = (
            row["family"],
            row["name"],
            row["strength"],
            length,
            loss,
            plain,
            expected,
            "",
            cause.replace("|", "/"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    tried = [] if factors is None else [f"Only readings of these factors were tried: {factors.replace(',', ', ')}.", ""]
    return "\n".join([HEAD, *tried, *totals(counted), "", "## Every cell", "", *TITLE, *lines]) + "\n"


def _judged(row: Mapping[str, Any], part: str, right: str | None, judged: Mapping[str, str] | None, key: str) -> str:
    word = word_of(row, part, right)
    return (
        word
        if judged is None or word not in ("right", "wrong", NAMED)
        else judged.get(f"{key}/{part}", judged.get(key, word))
    )


TITLE = (
    "| family | fault | strength | accepts | lost | plain | with the expected figure | by hand | cause |",
    "|---|---|---|---|---|---|---|---|---|",
)


def totals(counted: list[tuple[Mapping[str, Any], str, str, bool]]) -> list[str]:
    """Counts of words by cost."""
    groups: dict[str, Callable[[Mapping[str, Any], bool], bool]] = {
        "all": lambda row, undoable: True,
        "cost more than 10% or cannot run": lambda row, undoable: row.get("loss") is None or row["loss"] > COSTS,
        "cost more than 10%, can be undone": lambda row, undoable: (row.get("loss") or 0) > COSTS and undoable,
        "cost more than half": lambda row, undoable: (row.get("loss") or 0) > LARGE,
    }
    lines = [f"| | judged | cells | {' | '.join(WORDS)} |", f"|---|---|---|{'---|' * len(WORDS)}"]
    for title, belongs in groups.items():
        chosen = [item for item in counted if belongs(item[0], item[3])]
        for mode, words in (
            ("plain", [plain for _, plain, _, _ in chosen]),
            ("with the expected figure", [expected or plain for _, plain, expected, _ in chosen]),
        ):
            numbers = " | ".join(str(words.count(word)) for word in WORDS)
            lines.append(f"| {title} | {mode} | {len(chosen)} | {numbers} |")
    return lines


def _cause(row: Mapping[str, Any]) -> str:
    found = row.get("expected") or row.get("plain") or {}
    if found.get("has_cause"):
        return f"{found['rule']} {found['sentence'].partition(';')[0][:240]}"
    better = found.get("improves")
    return f"improves: {better[0]}; {better[1]}" if better else ""
