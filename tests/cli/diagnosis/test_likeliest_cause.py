"""The one cause that a report names, from findings and the results of readings. No model runs."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis.likeliest_cause import diagnose_report
from dflash_cli.diagnosis.reading_results import ReadingSearch
from dflash_cli.diagnosis.run_report import RunReport
from dflash_cli.diagnosis.weight_rewrites import Spot
from dflash_cli.rules.rule import Finding, all_rules
from dflash_cli.rules.subject import ValidationPlan, open_subject
from dflash_cli.rules.validator import report_of
from dflash_runtime.documents import copy_fields
from dflash_testing.searches import result


def report_of_search(search: ReadingSearch, *findings: Finding) -> RunReport:
    plan = ValidationPlan(draft=fetch_directory(TINY, Role.DRAFT))
    report = report_of(open_subject(plan), list(findings), [])
    return copy_fields(RunReport, report, level="run", notes=(), search=search)


def finding(rule: str, location: str, **changes: Any) -> Finding:
    severity: Any = changes.pop("severity", "info")
    of_rule = next(item for item in all_rules() if item.id == rule)
    changes |= {"fact": of_rule.fact, "follows_from": of_rule.follows_from}
    return Finding(rule, severity, location, "a message", level="weights", outcome="drops", **changes)


@pytest.mark.parametrize(
    ("harmful", "named"),
    [(("self_attn.v_proj", 1), 1), (("self_attn.v_proj", 2), 2), (("self_attn.v_proj", None), None), (None, None)],
)
def test_noise_is_named_only_where_the_draft_is_better_without_the_matrix(
    harmful: Spot | None, named: int | None
) -> None:
    """Sound matrices look like noise too. Low acceptance alone does not tell which matrix is broken."""
    places = [f"model.safetensors:layers.{layer}.self_attn.v_proj.weight" for layer in (1, 2)]
    low = replace(finding("R06", "config.json", severity="error"), level="run")
    search = ReadingSearch(16, 1000, 1.01, (), 60, harmful=frozenset({harmful} if harmful is not None else ()))
    report = report_of_search(search, finding("N37", places[0], also=(places[1],)), low)
    diagnosis = diagnose_report(report, draft="d", target="t")
    assert (diagnosis.rule, diagnosis.has_cause) == ("R06" if named is None else "N37", named is not None)
    assert named is None or f"layers.{named}." in diagnosis.sentence.partition(";")[0]


@pytest.mark.parametrize(
    ("harmful", "rule"), [("markov_head.markov_w2.weight", "N37"), ("fc", "R06"), ("self_attn.v_proj", "R06")]
)
def test_noise_in_a_table_is_named_if_its_head_harms(harmful: str, rule: str) -> None:
    """Leaving out one table leaves out the whole head."""
    low = replace(finding("R06", "config.json", severity="error"), level="run")
    search = ReadingSearch(16, 1000, 1.4, (), 60, harmful=frozenset({(harmful, None)}))
    report = report_of_search(search, finding("N37", "model.safetensors:markov_head.markov_w1.weight"), low)
    assert diagnose_report(report, draft="d", target="t").rule == rule


def test_a_finding_on_the_same_tensor_comes_before_a_reading() -> None:
    """A finding on another tensor comes after it. A remark is a cause only if acceptance is low."""
    spots = frozenset({("mlp.down_proj", 1)})
    search = ReadingSearch(16, 1000, 3.1, (result(3.1, 5.2, 1.5, "weights", touches=spots, is_scale=True),), 60)
    for place, rule in (("layers.1.mlp.down_proj.weight", "N34"), ("layers.0.mlp.down_proj.weight", None)):
        report = report_of_search(search, finding("N34", f"model.safetensors:{place}"))
        assert diagnose_report(report, draft="d", target="t").rule == rule
    high = ReadingSearch(16, 1000, 6.1, (), 60)
    report = report_of_search(high, finding("N34", "model.safetensors:layers.1.mlp.down_proj.weight"))
    assert diagnose_report(report, draft="d", target="t").has_cause is False


@pytest.mark.parametrize(("severity", "rule"), [("info", None), ("warning", "N38"), ("error", "N38")])
def test_a_reading_that_only_moves_values_refutes_a_remark_that_they_are_lost(severity: str, rule: str | None) -> None:
    """The rows of v_proj look cut off in k_proj. Exchanged back, the draft accepts all it should."""
    spots = frozenset({("self_attn.k_proj", 1), ("self_attn.v_proj", 1)})
    search = ReadingSearch(16, 1000, 1.2, (result(1.2, 6.1, 4.5, "weights", touches=spots),), 60)
    seen = finding("N38", "model.safetensors:layers.1.self_attn.k_proj.weight", severity=severity)
    assert diagnose_report(report_of_search(search, seen), draft="d", target="t").rule == rule


def test_a_finding_counts_in_each_of_its_places() -> None:
    spots = frozenset({("self_attn.v_proj", 2), ("self_attn.o_proj", 2)})
    search = ReadingSearch(16, 1000, 3.1, (result(3.1, 5.2, 1.5, "weights", touches=spots, is_scale=True),), 60)
    also = ("model.safetensors:layers.2.self_attn.o_proj.weight",)
    report = report_of_search(search, finding("N41", "model.safetensors:layers.0.mlp.up_proj.weight", also=also))
    assert diagnose_report(report, draft="d", target="t").rule == "N41"


def test_an_order_is_named_before_a_size_beside_other_layers() -> None:
    spots = frozenset({("mlp.down_proj", 1)})
    size = replace(finding("N36", "model.safetensors:layers.1.mlp.down_proj.weight"), outcome="serves")
    for is_scale, rule in ((True, "N36"), (False, None)):
        tested = result(3.1, 5.2, 1.5, "weights", touches=spots, is_scale=is_scale)
        report = report_of_search(ReadingSearch(16, 1000, 3.1, (tested,), 60), size)
        assert diagnose_report(report, draft="d", target="t").rule == rule


def test_a_size_is_the_cause_of_a_scale_if_it_chooses_one_tensor() -> None:
    """The reading is named beside few values (N33), and beside two sizes, which choose no part."""
    spots = frozenset({("mlp.up_proj", 1), ("mlp.down_proj", 1)})
    best = result(3.1, 5.2, 1.5, "weights", touches=spots, is_scale=True)
    up, down = (f"model.safetensors:layers.1.mlp.{part}_proj.weight" for part in ("up", "down"))
    for rule, also, named in (("N36", (), "N36"), ("N36", (down,), None), ("N33", (), None)):
        item = replace(finding(rule, up, also=also), outcome="serves")
        report = report_of_search(ReadingSearch(16, 1000, 3.1, (best,), 60), item)
        assert diagnose_report(report, draft="d", target="t").rule == named


def test_a_look_that_another_look_explains_is_no_cause() -> None:
    """Rounding (N42) leaves rows of one sign (N40) in its own matrices only."""
    low = [replace(finding("R06", "config.json", severity="error"), level="run")]
    search = ReadingSearch(16, 1000, 1.1, (), 60)
    up, down = (f"model.safetensors:layers.1.mlp.{part}_proj.weight" for part in ("up", "down"))
    for coarse, rule, place in (((down, up), "N42", down), ((down,), "N40", up)):
        found = [finding("N40", up), finding("N42", coarse[0], also=coarse[1:]), *low]
        diagnosis = diagnose_report(report_of_search(search, *found), draft="d", target="t")
        assert diagnosis.rule == rule
        assert diagnosis.sentence.startswith(place)
    spread = [finding("N40", down, also=(up,)), finding("N42", down), *low]
    assert diagnose_report(report_of_search(search, *spread), draft="d", target="t").sentence.startswith(up)


def test_a_look_without_another_cause_names_none() -> None:
    """The few values (N33) cost nothing by themselves, and the zeros (N43) follow from them."""
    low = replace(finding("R06", "config.json", severity="error"), level="run")
    place = "model.safetensors:layers.1.mlp.up_proj.weight"
    found = [finding("N43", place), replace(finding("N33", place), outcome="serves"), low]
    search = ReadingSearch(16, 1000, 1.1, (), 60)
    assert diagnose_report(report_of_search(search, *found), draft="d", target="t").has_cause is False
    assert diagnose_report(report_of_search(search, found[0], low), draft="d", target="t").rule == "N43"


def test_looks_explain_others_in_one_direction() -> None:
    """No two looks explain each other, so that one of them always remains."""
    left = {rule.fact: {*rule.follows_from} for rule in all_rules() if rule.fact is not None}
    assert {item for found in left.values() for item in found} <= left.keys()
    assert len(left) == sum(rule.fact is not None for rule in all_rules())
    while left:
        ends = [item for item, explaining in left.items() if not explaining & left.keys()]
        assert ends
        left = {item: explaining for item, explaining in left.items() if item not in ends}


def test_a_size_beside_other_layers_is_no_cause_without_a_reading() -> None:
    """With three layers, one layer may have been scaled, or the other two."""
    low = ReadingSearch(16, 1000, 1.1, (), 60)
    size = replace(finding("N36", "model.safetensors:layers.2.self_attn.v_proj.weight"), outcome="serves")
    assert next(rule for rule in all_rules() if rule.id == "N36").outcome is None
    found = [size, replace(finding("R06", "config.json", severity="error"), level="run")]
    assert diagnose_report(report_of_search(low, *found), draft="d", target="t").has_cause is False
    assert diagnose_report(
        report_of_search(low, replace(size, outcome="drops"), found[1]), draft="d", target="t"
    ).has_cause
