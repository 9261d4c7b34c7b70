"""Every rule on two servers fires on a pair that breaks it, and is silent on the sound pair."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.handoff.two_servers.transfer_report import TransferReport, validate_transfer
from dflash_cli.rules.rule import PLACEHOLDER, all_rules
from dflash_testing.server_pairs import TransferCase, over, write_pair
from dflash_testing.transfer_cases import CASES, SILENT


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def judge(case: TransferCase, folder: Path, models: Path, *, is_sound: bool = False) -> TransferReport:
    files = write_pair(case, folder, models, is_sound=is_sound)
    return validate_transfer(*files, parse_engines(case.engine)[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_transfer_rule_fires(case: TransferCase, tmp_path: Path, models: Path) -> None:
    report = judge(case, tmp_path, models)
    found = [item.message for item in report.findings if (item.id, item.location) == (case.rule, case.at)
             and item.severity == case.severity]  # fmt: skip
    assert [message for message in found if all(value in message for value in case.values)], report.findings
    assert report.verdict.outcome == case.outcome, report.verdict
    assert report.passed == (not report.fails()) == (case.severity != "error")
    assert not [item.fix for item in report.findings if PLACEHOLDER.search(item.fix)]
    sound = judge(case, tmp_path, models, is_sound=True)
    assert case.rule not in {item.id for item in sound.findings}, sound.findings


@pytest.mark.parametrize("case", SILENT, ids=lambda case: f"{case.rule}-{case.engine}")
def test_a_rule_is_silent_just_past_its_limit(case: TransferCase, tmp_path: Path, models: Path) -> None:
    report = judge(case, tmp_path, models)
    assert case.rule not in {item.id for item in report.findings}, report.findings


def test_pushing_beside_latent_keys_takes_equal_ranks(tmp_path: Path, models: Path) -> None:
    sound = next(case for case in SILENT if (case.rule, case.engine) == ("K19", "vllm@0.33"))
    report = judge(replace(sound, both=over("NixlPushConnector")), tmp_path, models)
    assert "K19" in {item.id for item in report.findings}


def test_every_transfer_rule_has_a_case() -> None:
    assert {rule.id for rule in all_rules() if rule.level == "kv-transfer"} == {case.rule for case in CASES}


@pytest.mark.parametrize("engine", ["vllm", "vllm@0.24", "sglang"])
def test_a_sound_pair_passes(engine: str, tmp_path: Path, models: Path) -> None:
    report = judge(TransferCase(rule="", engine=engine), tmp_path, models)
    assert report.findings == ()
    assert report.verdict.outcome == "arrives"
    assert report.notes == ()


def test_no_rule_on_servers_runs_on_a_draft() -> None:
    from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
    from dflash_cli.rules.subject import ValidationPlan
    from dflash_cli.rules.validator import validate_draft

    request = ValidationPlan(draft=fetch_directory(TINY, Role.DRAFT), engines=parse_engines("vllm,sglang"))
    assert not [item.id for item in validate_draft(request).findings if item.level == "kv-transfer"]
