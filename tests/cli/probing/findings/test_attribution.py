"""Attribution of a low acceptance: for each rule, evidence to which it applies and evidence to which it does not."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.intervals.statistics import DEFINITIONS, Summary
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import Comparison, compare_results
from dflash_cli.probing.findings.attribution import attribute
from dflash_cli.probing.findings.evidence import Evidence
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.served.token_equality import TokenDifference, TokenEquality
from dflash_cli.probing.servers.inference_server import Asked
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.metrics import AcceptanceCounts

FACTS = ServerFacts(engine="vllm", release="0.33.0", model="m", is_drafting=True, num_draft_tokens=7)
STEPS = 20


def conversations(length: float, count: int = 40) -> tuple[ConversationCounts, ...]:
    """Conversations that differ much between prompts, but little between two results."""
    return tuple(
        ConversationCounts(
            digest=f"d{index}",
            name=f"p{index}",
            num_tokens=STEPS * (length + 0.2 * (length - 1) * ((index % 5) - 2)) + 0.2 * (index % 3),
            num_steps=STEPS,
        )
        for index in range(count)
    )


def run(length: float, name: str = "1 at a time", num_drafts: int = 800) -> ServerRun:
    counts = AcceptanceCounts(7, num_drafts, round(num_drafts * (length - 1)))
    total = Summary(
        counts=counts, num_requests=40, num_conversations=40, num_tokens=999,
        acceptance_len_interval=None, acceptance_len_no_interval=None,
        per_pos_intervals=(None,) * 7, histogram=(),
        definitions=dict.fromkeys(DEFINITIONS),
    )  # fmt: skip
    return ServerRun(
        name=name, facts=FACTS, asked=Asked(max_new_tokens=64), chat=False, concurrency=1, origin="answers",
        total=total, conversations=conversations(length), answers=(), counted=None, has_counters=False, failed=(),
        notes=(), seconds=1.0,
    )  # fmt: skip


def yardstick(length: float, *, rows: bool = True, **facts: Any) -> MeasuredResult:
    return MeasuredResult(
        name="own.json",
        source="test",
        acceptance_len=length,
        conversations=conversations(length) if rows else (),
        why_no_rows=None if rows else "totals only",
        facts=facts,
    )


def against(first: ServerRun, other: MeasuredResult) -> Comparison:
    return compare_results([first.as_result(), other])[0]


def equality(gap: float | None, *, num_unlike: int = 0) -> TokenEquality:
    item = TokenDifference(name="p", position=3, tokens=(4, 5), gap_nats=gap, is_near_tie=gap is not None and gap < 0.2)
    return TokenEquality(base="a", other="b", num_compared=40, num_unlike=num_unlike, differences=(item,))


def evidence(length: float = 3.4, own: MeasuredResult | None = None, **changes: Any) -> Evidence:
    first = run(length)
    yardsticks = [against(first, own)] if own is not None else []
    return replace(Evidence(facts=FACTS, runs=[first], yardsticks=yardsticks), **changes)


SLOW = run(3.0, "8 at a time").as_result()
CASES = {
    "not one token drafted": (evidence(runs=[run(1.0, num_drafts=0)]), ("engine", 1)),
    "fewer tokens drafted than for the yardstick": (
        evidence(2.4, yardstick(3.4, num_speculative_tokens=15)),
        ("settings", 2),
    ),
    "other tokens in the prompts": (
        evidence(2.4, yardstick(3.4), yardstick_equalities=[equality(0.1, num_unlike=40)]),
        ("settings", 3),
    ),
    "lower than the yardstick": (evidence(2.4, yardstick(3.4)), ("engine", 4)),
    "lower than totals of the yardstick, by much": (evidence(2.4, yardstick(3.4, rows=False)), ("engine", 4)),
    "lower with more requests": (evidence(loads=[against(run(3.4), SLOW)]), ("engine", 5)),
    "answers that differ by more than near-ties": (evidence(equalities=[equality(2.0)]), ("engine", 6)),
    "low here and there": (evidence(1.2, yardstick(1.2)), ("checkpoint", 7)),
    "less than wanted, here and there": (evidence(3.4, yardstick(3.4), minimum=4.0), ("checkpoint", 7)),
    "as the yardstick": (evidence(3.4, yardstick(3.41)), ("none", 8)),
    "above the yardstick": (evidence(3.4, yardstick(2.4)), ("none", 8)),
    "more drafted than for the yardstick, and not lower": (
        evidence(3.4, yardstick(3.4, num_speculative_tokens=15)),
        ("none", 8),
    ),
    "a little lower, however sure": (evidence(3.4, yardstick(3.44)), ("none", 8)),
    "lower than totals, by little": (evidence(3.2, yardstick(3.4, rows=False)), ("none", 8)),
    "near-ties alone": (evidence(3.4, yardstick(3.4), equalities=[equality(0.1)]), ("none", 8)),
    "differences that were not judged": (evidence(3.4, yardstick(3.4), equalities=[equality(None)]), ("none", 8)),
    "low, and no yardstick": (evidence(1.2), ("undecided", 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_rule_that_holds_decides(name: str) -> None:
    given, (owner, rule) = CASES[name]
    found = attribute(given)
    assert (found.owner, found.rule) == (owner, rule), found.evidence
    assert found.is_fault == (owner in ("engine", "settings", "checkpoint"))


def test_evidence_of_a_lower_server_names_both_lengths_and_known_faults() -> None:
    found = attribute(evidence(2.4, yardstick(3.4), known_faults=["C20 causal"]))
    assert all(part in found.evidence for part in ("2.410", "own.json 3.410", "C20 causal"))


def test_different_texts_change_the_hint_for_a_lower_server() -> None:
    alike = attribute(evidence(2.4, yardstick(3.4)))
    unlike = attribute(evidence(2.4, yardstick(3.4), yardstick_equalities=[equality(3.0)]))
    assert "dflash validate" in alike.hint
    assert "dflash validate" not in unlike.hint
    assert "target" in unlike.hint
