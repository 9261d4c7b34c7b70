"""Acceptance and answers that change with the number of requests at a time."""

from collections.abc import Iterator, Sequence

from dflash_cli.acceptance.intervals.statistics import value_text
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import TokenEquality
from dflash_runtime.phrases import plural

SLIGHT, MUCH, VERY_MUCH, ALIKE, MIN_STEPS = 0.02, 1.1, 1.33, 0.8, 200
"""A difference of at most a fiftieth is never a fault. Without a test, a fault needs a difference of a tenth, and a
fall with load this many verify steps on each side."""


def is_lower_under_load(item: Comparison, equalities: Sequence[TokenEquality]) -> bool:
    """Whether the run with more requests is lower by more than luck.

    Without a test it must be lower by a tenth, or by a third if answers differ: other texts have other acceptance.
    """
    if item.total.estimate is not None:
        return item.total.change == "lower" and not is_slight(item)
    alike = [found.num_same >= ALIKE * found.num_compared for found in equalities if found.other == item.other.name]
    ratio = MUCH if alike and all(alike) else VERY_MUCH
    counts = (item.base.counts, item.other.counts)
    has_steps = all(side is not None and side.num_drafts >= MIN_STEPS for side in counts)
    return has_steps and item.base.acceptance_len > ratio * item.other.acceptance_len


def is_slight(item: Comparison) -> bool:
    """Whether rounding can cause a difference of this size, however certain it is."""
    return abs(item.total.difference or 0) <= SLIGHT * item.base.acceptance_len


@rule("load")
def find_lower(evidence: Evidence) -> Iterator[ServedFinding]:
    """Acceptance that falls with more requests at a time."""
    for item in evidence.loads:
        if is_lower_under_load(item, evidence.equalities):
            change = value_text(item.total.difference, item.total.interval, "+.3f")
            yield ServedFinding(
                id="acceptance-falls-with-load",
                severity="error",
                seen=f"{item.other.name}: {change} tokens per step against {item.base.name}, on the same prompts",
                follows="requests of a batch change each other's drafts; the cause is not known from outside",
                next="repeat with --concurrency 1,2,4,8 to find where it begins, and report it to the engine",
            )
            return


@rule("load")
def find_unequal(evidence: Evidence) -> Iterator[ServedFinding]:
    """Greedy answers that change with more requests at a time."""
    for item in evidence.equalities:
        if item.shows_fault(is_quantised=evidence.facts.is_quantised):
            most = max(difference.gap_nats or 0 for difference in item.unexplained)
            yield ServedFinding(
                id="answers-change-with-load",
                severity="error",
                seen=f"{item.num_unexplained} of {plural(item.num_compared, 'greedy answer')} differ between "
                f"{item.base} and {item.other} by up to {most:.2f} nats",
                follows="requests of a batch change each other's answers; rounding does not explain the gap",
                next="start the server without the draft and repeat; report it to the engine",
            )
            return
