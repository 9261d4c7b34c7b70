"""Judge the findings of each planted fault against its right causes, and print the page of all cases."""

from dataclasses import dataclass
from typing import Any

from planted_faults.cases import SOUND

LOSS_THAT_COUNTS = 0.10
NO_READING = "R06"
"""The rule for low acceptance that no reading explains."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one case. `level` is the first level with a finding."""

    word: str
    level: str
    rules: str
    loss: float | None


def judge(row: dict[str, Any], sound_len: float) -> Verdict:
    """The verdict of a case: right, wrong, no cause, other or silent; for a sound variant finding or silent.

    docs/measurements/planted-faults.md explains the words.
    """
    length = row["acceptance_len"]
    loss = 1 - (length - 1) / (sound_len - 1) if length is not None else None
    seen: dict[str, tuple[str, str]] = {}
    for level, findings in row["levels"].items():
        for rule, severity, _ in findings:
            if severity != "info" and rule not in row["beside"]:
                seen.setdefault(rule, (level, severity))
    rules = ", ".join(seen)
    first = next(iter(seen.values()), ("", ""))[0]
    if not row["is_fault"]:
        return Verdict("finding" if seen else "silent", first, rules, loss)
    named = [level for rule, (level, _) in seen.items() if rule in row["right"]]
    foreign = [rule for rule in seen if rule not in row["right"] and rule != NO_READING]
    if any(rule.startswith("R") or seen[rule][1] == "error" for rule in foreign):
        return Verdict("wrong", first, rules, loss)
    if named:
        return Verdict("right", named[0], rules, loss)
    word = "no cause" if NO_READING in seen else "other" if seen else "silent"
    return Verdict(word, first, rules, loss)


def render(rows: list[dict[str, Any]], *, all_cases: int, num_prompts: int, num_tokens: int) -> str:
    """The text of docs/measurements/planted-faults.md."""
    sound = {row["pair"]: row["acceptance_len"] for row in rows if row["name"] == SOUND}
    rows = [row for row in rows if row["pair"] in sound]
    judged = [(row, judge(row, sound[row["pair"]])) for row in rows]
    planted = [(row, verdict) for row, verdict in judged if row["is_fault"]]
    variants = [(row, verdict) for row, verdict in judged if not row["is_fault"]]
    large = [item for item in planted if item[1].loss is None or item[1].loss > LOSS_THAT_COUNTS]
    lines = [HEAD.rstrip("\n").format(prompts=num_prompts, tokens=num_tokens, done=len(rows), all=all_cases)]
    lines.append("")
    lines.append("| | faults | right cause | wrong cause | no cause named | only other findings | silent |")
    lines.append("|---|---|---|---|---|---|---|")
    for title, chosen in (("all", planted), ("that cost more than 10%, or cannot run", large)):
        counts = [sum(item.word == word for _, item in chosen) for word in WORDS]
        lines.append(f"| {title} | {len(chosen)} | {' | '.join(map(str, counts))} |")
    found = [row["key"] for row, verdict in variants if verdict.word == "finding"]
    lines += [
        "",
        f"Sound variants: {len(variants)}, with a finding: {len(found)}"
        + (f" ({', '.join(found)})." if found else "."),
    ]
    lines += ["", "Faults by the first level that named them:", "", "| level | faults |", "|---|---|"]
    for level in ("headers", "pair", "weights", "run"):
        lines.append(f"| {level} | {sum(item.level == level and item.word == 'right' for _, item in planted)} |")
    lines += [
        "",
        "## Every fault",
        "",
        "| pair | fault | accepts | lost | verdict | first level | rules |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row, verdict) for row, verdict in planted]
    lines += [
        "",
        "## Sound variants",
        "",
        "| pair | variant | accepts | lost | verdict | first level | rules |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row, verdict) for row, verdict in variants]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any], verdict: Verdict) -> str:
    length = f"{row['acceptance_len']:.2f}" if row["acceptance_len"] is not None else "not run"
    loss = f"{verdict.loss:.0%}" if verdict.loss is not None else ""
    cells = (row["pair"], row["name"], length, loss, verdict.word, verdict.level, verdict.rules)
    return f"| {' | '.join(cells)} |"


WORDS = ("right", "wrong", "no cause", "other", "silent")

HEAD = """# Planted faults, case by case

What `dflash validate` reports about drafts with one planted fault each, and about sound drafts. Written by
`python examples/plant_faults.py` from the two bundled drafts. The run level uses {prompts} prompts of {tokens} tokens.
[How many faults are found](../explanation/faults.md) describes the search.

Cases: {done} of {all}.

"""
