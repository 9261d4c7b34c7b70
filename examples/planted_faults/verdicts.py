"""What was said of each planted fault, judged against its right causes, and the page that shows it."""

from dataclasses import dataclass
from typing import Any

from planted_faults.cases import SOUND

LOSS_THAT_COUNTS = 0.10
NO_READING = "R06"
"""The rule that says: too little is accepted, and no reading explains it."""


@dataclass(frozen=True)
class Verdict:
    """What was said of one case. `level` is the first that spoke of it."""

    word: str
    level: str
    rules: str
    loss: float | None


def judge(row: dict[str, Any], sound_len: float) -> Verdict:
    """right, wrong, no cause, other or silent, as docs/faults.md explains; finding or silent for a sound variant."""
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
    """docs/faults.md."""
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

HEAD = """# Planted faults

What `dflash validate` says of drafts with one fault each, and of sound ones. Printed by
`python examples/plant_faults.py`, from the two bundled drafts, with {prompts} prompts of {tokens} tokens at the
run level.

"Lost" is the share of the accepted drafts that the fault costs. A verdict is *right* where a finding names the cause,
*wrong* where a reading or an error names another, *no cause* where it is said that too little is accepted and
that no reading explains it, *other* where only other rules spoke, *silent* where none did. Levels: headers without a
target, headers with one (pair), weights, run. A reading is named only where it gains more than a tenth of a token, and
more than a tenth of what is accepted: faults that cost less than that are meant to be silent at the run level.

A draft that loses much and still accepts a good share of its block can only be known by its own figure: compare with
what its card says, by `dflash eval-acceptance --min-acceptance`.

## What the run level asks of a cause

- All readings, some 150, are estimated along one text; up to four that look better are run on all prompts.
- A reading explains a draft where it accepts at least 1.5 tokens a step and an eighth of the block (2 tokens for
  predictions from the anchor on: an untrained draft that echoes its anchor reaches 1.5 on text that repeats itself),
  gains more than 0.1 tokens and more than a tenth of the accepted drafts, and its paired interval lies above zero.
- The first prompts only choose: of the readings that gain enough there, the one that gains most. It is tested on at
  least 32 new prompts, made from other random ids, and has to gain enough there again. Given prompts are continued by
  sampling instead, which makes new text of them; what is then said holds for those prompts.
- The interval is that of the test, of one reading chosen beforehand: 95%, with Student's tails. It lies above zero by
  chance in about 2.5% of sound drafts at most, however many readings were tried.
- The test is two more runs, each of 32 prompts or as many as were asked for. Where no reading gains enough on the
  first prompts, as with most sound drafts, there is none.
- Only the reading that was tested is named.
- Where none does, a draft that has less than 7% of its drafts accepted is an error, and below 12% a warning (R06).
  Sound drafts at temperature 0: 34% and 25% (bundled), 31% (speculators, Qwen3-8B on GSM8K), 21 to 37% (vllm#43445,
  blocks of 16); SGLang's own test asks for 12% (2.8 of 16 on GSM8K). Drafts read wrongly or never trained: 0 to 6%.

## Totals

Cases: {done} of {all}.

"""
