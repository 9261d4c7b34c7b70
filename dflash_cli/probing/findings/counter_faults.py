"""Counters that include other clients, count wrongly or too coarsely, or contradict each other."""

from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.probing.findings.draft_fit import MIN_STEPS
from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.replicas import FOREIGN, RESTARTED
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun

EACH_STEP = 0.85
"""A surplus of accepted tokens, as a share of the steps, that the target's own token of each step explains."""
BONUS_COUNTED = """the target's own token of each step is counted as an accepted draft token, so the accepted tokens \
in all are too high, and so are dashboards that show them. Positions are right and are used where they are known"""
PART_COUNTED = """one of the counters lacks a part of the server, such as one of its engines; dashboards that show it \
are wrong. Figures by position are left out where they come from it"""
NOTED = {
    "other-clients-counted": FOREIGN,
    "steps-of-other-clients": FOREIGN,
    "counter-miscounts": ServedFinding(
        id="counters-miscount",
        severity="warning",
        seen="",
        follows="this counter is wrong, and the other counters agree with the answers, so no other client is the "
        "reason. Dashboards that show it, such as tokens per second, are wrong",
        next="add up the answers in place of this counter, and report it to the engine",
    ),
    "requests-not-counted": ServedFinding(
        id="counters-incomplete",
        severity="warning",
        seen="",
        follows="the counters are late, or another server gives the answers; a restart would make counters fall",
        next="repeat the probe with --concurrency 1, which reads the counters after each answer; behind a "
        "balancer, probe each replica at its own address",
    ),
    "counters-rounded": ServedFinding(
        id="counters-rounded",
        severity="info",
        seen="",
        follows="figures come from the answers alone; a server that has run for long has too few digits",
        next="restart the server for exact counters, or add up answers in place of its metrics",
    ),
    "server-restarted": RESTARTED,
}
"""Id of a run's note -> the finding that it supports, which quotes the note."""


@rule("counters")
def find_noted(evidence: Evidence) -> Iterator[ServedFinding]:
    """The findings of the runs' notes. Requests of other clients explain all other notes."""
    seen = {note.id: f"{run.name}: {note}" for run in evidence.runs for note in run.notes}
    found = [replace(finding, seen=seen[id]) for id, finding in NOTED.items() if id in seen]
    yield from found[:1] if found and found[0].id == FOREIGN.id else found


@rule("counters")
def find_contradicting(evidence: Evidence) -> Iterator[ServedFinding]:
    """Two counters, or sums of answers, that cannot both be right."""
    for run in evidence.runs:
        counted = run.counted
        found = None if counted is None else counted.contradiction
        told = _bonus_in_answers(run)
        if found is not None or told is not None:
            counts_bonus = told is not None or (counted is not None and counted.counts_bonus)
            yield ServedFinding(
                id="counters-contradict",
                severity="warning",
                seen=f"{run.name}: the server counted {found}" if found is not None else f"{run.name}: {told}",
                follows=BONUS_COUNTED if counts_bonus else PART_COUNTED,
                next="compare the samples of each label at /metrics, and report it to the engine",
            )
            return


def _bonus_in_answers(run: ServerRun) -> str | None:
    """The sums of answers, if accepted tokens and steps are more than the answers' tokens by about one per step."""
    accepted, steps = (sum(values) for values in zip(*run.sums.values(), strict=True)) if run.sums else (0, 0)
    drafted = [answer.output for answer in run.answers if answer.output.prompt_token_ids in run.sums]
    surplus = accepted + steps - sum(len(output.token_ids) - 1 for output in drafted)
    past_end = len(drafted) * (run.facts.num_draft_tokens or 0)
    if steps < MIN_STEPS or not past_end or surplus <= past_end or surplus < EACH_STEP * steps:
        return None
    tokens = sum(len(output.token_ids) for output in drafted)
    return f"answers tell {accepted} accepted tokens and at least {steps} steps for {tokens} tokens"
