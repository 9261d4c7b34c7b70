"""Faults of the draft that its acceptance shows: shapes of the curve, drafts by lookup, and a draft of another target.

A weak draft knows its target: it is right about the first token in about half of the steps, and on some prompts more
often. A draft of another target guesses frequent tokens. docs/how-to/probe.md states the limits.
"""

import math
import re
from collections.abc import Iterator

from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_runtime.metrics import AcceptanceCounts

NEAR_ZERO_LEN, NEAR_ZERO_RATE, MIN_STEPS = 1.12, 0.1, 100
"""A draft of another layout has at most this length and rate of the first position, over this many steps."""
QUARTER, SIGMAS = 0.25, 3.0
"""Frequent tokens alone are right less often than this."""
SOUND_FIRST, SOUND_SHARE, MIN_STEPS_EACH = 0.5, 0.125, 10
"""A draft fits if it is right about the first token this often on more than this share of the prompts."""
RARE, BETWEEN, MIN_BAD, MAX_NAMES = 1e-3, 0.3, 2, 8
"""A draft fails on a prompt if a rate of QUARTER would give its few accepted first tokens with a probability below
RARE. All other prompts must accept BETWEEN of them or more, and half of these SOUND_FIRST."""
Rates = dict[str, tuple[int, int]]
KINDS = {"instruct", "thinking", "base", "coder", "chat", "it", "pt", "vl", "math", "reasoning"}
"""Words that tell models of one size apart."""


@rule("drafting")
def find_shapes(evidence: Evidence) -> Iterator[ServedFinding]:
    """Acceptance of the first run that stops, drops or falls by position or context."""
    run = evidence.runs[0]
    ids = {"zeros": "acceptance-stops", "decay": "acceptance-falls-with-context", "cliff": "acceptance-cliff"}
    width = run.widths.widest or round(run.widths.mean) if run.widths is not None else None
    for shape in run.shapes:
        id = ids.get(shape.name.split()[0])
        if id is None or (id == "acceptance-stops" and shape.name.endswith(f" {width}")):
            continue  # no draft token beyond the limit can be accepted
        yield ServedFinding(
            id=id,
            severity="warning",
            seen=f"{shape.name}: {shape.evidence}",
            follows=f"the cause is not known; likely: {shape.causes}",
            next=shape.test,
        )


def unlike_names(target: str | None, draft: str | None) -> list[str]:
    """Words in which the names of a target and its draft contradict each other: sizes, or kinds such as instruct."""
    words = [set(re.split(r"[-_/\s]+", (name or "").lower())) for name in (target, draft)]
    sizes = [{word for word in found if re.fullmatch(r"\d+(?:\.\d+)?[bm]", word)} for found in words]
    kinds = [found & KINDS for found in words]
    unlike = [sizes] if all(sizes) and not sizes[0] & sizes[1] else []
    unlike += [kinds] if kinds[0] - kinds[1] and kinds[1] - kinds[0] else []
    return [" and ".join("-".join(sorted(mine - other)) for mine, other in (pair, pair[::-1])) for pair in unlike]


@rule("drafting")
def find_lookup(evidence: Evidence) -> Iterator[ServedFinding]:
    """Drafts that come from earlier text, without a draft model."""
    facts = evidence.facts
    if facts.is_lookup:
        beside = f", although the draft {facts.draft} is configured" if facts.draft else ""
        yield ServedFinding(
            id="drafts-by-lookup",
            severity="warning",
            seen=f"the server drafts by {facts.method}{beside}",
            follows="it looks up earlier tokens of the text and runs no draft model: only text that repeats itself is "
            "drafted",
            next="name the draft model's method in the server's options, and remove the option of the lookup",
        )


def is_near_zero(counts: AcceptanceCounts) -> bool:
    """Whether hardly a step accepts its first draft token."""
    length = counts.acceptance_len
    if counts.num_drafts < MIN_STEPS or length is None or length > NEAR_ZERO_LEN:
        return False
    return _num_first(counts) <= NEAR_ZERO_RATE * counts.num_drafts


def _num_first(counts: AcceptanceCounts) -> int:
    return counts.per_pos_accepted[0] if counts.per_pos_accepted else counts.num_accepted_tokens


@rule("drafting")
def find_near_zero(evidence: Evidence) -> Iterator[ServedFinding]:
    """Hardly any accepted draft token."""
    counts = evidence.runs[0].total.counts
    if is_near_zero(counts):
        yield ServedFinding(
            id="acceptance-near-zero",
            severity="error",
            seen=f"{100 * _num_first(counts) / counts.num_drafts:.1f}% of {counts.num_drafts} steps accept the first "
            "draft token",
            follows="the draft is of no use here: wrong layout, tapped layers, mask token, rope or target. "
            "Which one is not known from outside",
            next="dflash validate DRAFT --target TARGET, then dflash diagnose DRAFT --target TARGET",
        )


@rule("drafting")
def find_low_everywhere(evidence: Evidence) -> Iterator[ServedFinding]:
    """A low first position on all prompts. It is a fault with a mark that no weak draft has, otherwise a fact."""
    facts, run = evidence.facts, evidence.runs[0]
    counts = run.total.counts
    is_low = any(shape.name == "flat and low" for shape in run.shapes)
    if not is_low or counts.num_drafts < MIN_STEPS or is_near_zero(counts) or _fits_some(run):
        return
    first = counts.per_pos_accepted[0] / counts.num_drafts
    marks = [f"the names differ: {words}" for words in unlike_names(facts.target, facts.draft)]
    if first + SIGMAS * math.sqrt(first * (1 - first) / counts.num_drafts) < QUARTER:
        marks.append("less than a quarter")
    if _falls_after_first(counts):
        marks.append("later positions are worse still")
    seen = f"{100 * first:.0f}% of {counts.num_drafts} steps accept the first draft token, on all prompts alike"
    yield ServedFinding(
        id="acceptance-low-everywhere",
        severity="warning" if marks else "info",
        seen="; ".join((seen, *marks)),
        follows="the draft does not know this target: trained for another one, another quantisation or template, or "
        "read in another way. Which one is not known from outside"
        if marks
        else "a weak draft or a draft of another target; which one is not known from outside",
        next="compare the names and revisions of draft and target, then dflash diagnose DRAFT --target TARGET",
    )


def _fits_some(run: ServerRun) -> bool:
    """Whether the draft is right on some prompts, so that it knows the target and the other texts are hard."""
    each = [lengths for answer in run.answers if len(lengths := answer.output.acceptance_lengths) >= MIN_STEPS_EACH]
    num_sound = sum(sum(length > 1 for length in lengths) >= SOUND_FIRST * len(lengths) for lengths in each)
    return num_sound > SOUND_SHARE * len(each)


def _falls_after_first(counts: AcceptanceCounts) -> bool:
    """Whether positions after an accepted one are surely accepted less often than the first position."""
    first, reached = counts.per_pos_accepted[0] / counts.num_drafts, sum(counts.per_pos_accepted[:-1])
    if not reached:
        return False
    later = sum(counts.per_pos_accepted[1:]) / reached
    error = math.sqrt(first * (1 - first) / counts.num_drafts + later * (1 - later) / reached)
    return first - later > SIGMAS * error


@rule("drafting")
def find_failing_prompts(evidence: Evidence) -> Iterator[ServedFinding]:
    """Two groups of prompts, the same in each run: the first draft token is hardly ever right, or usually is."""
    known = [run for run in evidence.runs if any(item.histogram for item in run.conversations)]
    bad: set[str] = set.intersection(*map(_bad_prompts, known)) if known else set()
    if len(bad) < MIN_BAD:
        return
    names = [item.name for item in known[0].conversations if item.digest in bad]
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    rates = _rates(known[0])
    low, usual = (100 * _rate(rates, chosen) for chosen in (bad, set(rates) - bad))
    yield ServedFinding(
        id="draft-fails-on-some-prompts",
        severity="warning",
        seen=f"{len(bad)} of {len(rates)} prompts accept the first draft token in {low:.0f}% of the steps, all others "
        f"in {usual:.0f}%: {shown}",
        follows="the draft knows the target, and not these texts: tokens that its vocabulary leaves out, a language or "
        "a kind of text that it was not trained on. Which one is not known from outside",
        next="look for what the named prompts and their answers share, and compare them with the draft's vocabulary",
    )


def _bad_prompts(run: ServerRun) -> set[str]:
    """Digests of the prompts with a bad draft; empty if prompts lie between the groups, as with an honest draft."""
    rates = _rates(run)
    bad = {digest for digest, (steps, first) in rates.items() if _at_most(first, steps, QUARTER) < RARE}
    others = sorted(first / steps for digest, (steps, first) in rates.items() if digest not in bad)
    are_apart = len(others) >= MIN_BAD and others[0] >= BETWEEN and others[len(others) // 2] >= SOUND_FIRST
    return bad if are_apart else set()


def _rates(run: ServerRun) -> Rates:
    """Steps and accepted first tokens of each prompt, by its digest."""
    counts = {item.digest: (item.num_steps, item.num_accepted(1)) for item in run.conversations if item.histogram}
    return {digest: found for digest, found in counts.items() if found[0] >= MIN_STEPS_EACH}


def _rate(rates: Rates, chosen: set[str]) -> float:
    """Share of the steps of these prompts that accept the first draft token."""
    return sum(rates[digest][1] for digest in chosen) / sum(rates[digest][0] for digest in chosen)


def _at_most(count: int, number: int, rate: float) -> float:
    """The probability of `count` successes or fewer in `number` trials."""
    each = (
        math.comb(number, item) * math.pow(rate, item) * math.pow(1 - rate, number - item) for item in range(count + 1)
    )
    return math.fsum(each)
