"""`dflash validate-handoff`: its output, exit codes and refused options."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_testing.command_line import Outcome, run_main

CHECKPOINTS = {
    "model": "tiny",
    "speculative_config": {"method": "dflash", "model": "tiny", "num_speculative_tokens": 7},
}


def write(prefill: Mapping[str, object], decode: Mapping[str, object]) -> list[str]:
    for role, own in (("prefill", prefill), ("decode", decode)):
        transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
        Path(f"{role}.json").write_text(json.dumps({**CHECKPOINTS, "kv_transfer_config": transfer, **own}))
    return ["validate-handoff", "prefill.json", "decode.json", "--engine", "vllm"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def judge(*command: str) -> tuple[Outcome, dict[str, Any]]:
    """The run of a command with --json, and its document."""
    outcome = run_main(*command, "--json")
    return outcome, json.loads(outcome.out)


def test_a_sound_pair_of_servers_passes() -> None:
    command = write({}, {"port": 8000, "host": "h"})
    outcome, document = judge(*command)
    assert (outcome.code, document["kind"], document["passed"], document["engine"]) == (
        0, "validate-handoff", True, "vllm 0.33",
    )  # fmt: skip
    assert (document["verdict"]["outcome"], document["num_rules"], document["findings"]) == ("arrives", 20, [])
    assert run_main(*command).notices == ("arguments-ignored",)
    assert all(word in document["notes"][0] for word in ("decode.json", "2", "port, host"))


def test_the_page_has_the_findings_the_verdict_and_the_counts() -> None:
    lines = run_main(*write({"speculative_config": None}, {})).out.splitlines()
    assert lines[0].startswith("K01 error   decode.json:speculative_config.model: ")
    assert lines[-2].startswith("vllm 0.33, MooncakeConnector: ")
    assert all(part in lines[-1] for part in ("prefill.json", "decode.json", "20 ", "1 error", "0 warnings"))


def test_a_lost_context_ends_with_3_and_names_the_rule() -> None:
    command = write({"speculative_config": None}, {})
    outcome, document = judge(*command)
    assert outcome.code == 3
    assert (document["passed"], document["verdict"]["outcome"], document["verdict"]["reasons"]) == (
        False,
        "lost",
        ["K01"],
    )
    assert (document["num_errors"], document["num_warnings"]) == (1, 0)
    assert (document["servers"]["prefill"]["draft"], document["servers"]["decode"]["file"]) == (None, "decode.json")
    assert run_main(*command, "--ignore", "k01").code == 0


def test_warnings_fail_the_pair_with_strict() -> None:
    command = write({"version": "0.32.0"}, {"version": "0.33.0"})
    outcome, document = judge(*command)
    assert (outcome.code, document["passed"]) == (0, True)
    assert (document["verdict"]["outcome"], document["verdict"]["reasons"]) == ("unknown", ["K08"])
    outcome, document = judge(*command, "--strict")
    assert (outcome.code, document["passed"]) == (3, False)


def test_checkpoints_that_cannot_be_opened_are_noted_and_the_rest_is_checked() -> None:
    elsewhere = {"model": "/nowhere/target", "speculative_config": {"method": "dflash", "model": "/nowhere/draft"}}
    command = write(elsewhere, {**elsewhere, "kv_cache_dtype": "fp8"})
    outcome, document = judge(*command)
    assert outcome.code == 3
    assert {item["id"] for item in document["findings"]} == {"K07"}
    assert run_main(*command).notices == ("draft-not-read", "target-not-read")
    assert "/nowhere/draft" in document["notes"][0]


def test_a_draft_as_the_model_counts_as_the_draft() -> None:
    """vLLM serves a draft of the speculators dialect by its own name, with the target that it names."""
    run_main("convert", "tiny", "dflash-spec", "--to", "speculators", "--target-name", "my-org/target", "-q")
    alone = {"model": "dflash-spec", "speculative_config": None}
    document = json.loads(run_main(*write(alone, alone), "--json").out)
    served = document["servers"]["prefill"]
    assert (document["verdict"]["outcome"], served["target"], served["draft"]["num_draft_tokens"]) == (
        "arrives", "my-org/target", 7,
    )  # fmt: skip
    beside, document = judge(*write(alone, {"speculative_config": None}))
    assert (beside.code, document["findings"][0]["id"]) == (3, "K01")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--target", "tiny"], "--target"),
        (["-e", "vllm,sglang"], "--engine"),
        (["-e", "llama.cpp"], "--engine"),
        (["--ignore", "K99"], "--ignore"),
    ],
)
def test_options_that_are_refused(arguments: list[str], field: str) -> None:
    outcome = run_main(*write({}, {}), *arguments)
    assert (outcome.code, outcome.out, outcome.field) == (2, "", field)


def test_an_unknown_release_is_refused() -> None:
    assert run_main(*write({}, {}), "-e", "vllm@0.23").code == 2


def test_files_that_are_missing() -> None:
    write({}, {})
    assert run_main("validate-handoff", "prefill.json", "no.json", "-e", "vllm").code == 4
    outcome = run_main("validate-handoff", "prefill.json", "--engine", "vllm")
    assert (outcome.code, outcome.error_id, outcome.field) == (2, "missing-argument", "DECODE")
    outcome = run_main("validate")
    assert (outcome.code, outcome.error_id, outcome.field) == (2, "missing-argument", "DRAFT")


def test_arguments_of_another_engine_are_noted() -> None:
    """Read as SGLang's, vLLM's arguments state neither a role nor a draft."""
    write({}, {})
    outcome, document = judge("validate-handoff", "prefill.json", "decode.json", "-e", "sglang")
    assert outcome.code == 3
    assert {("K09", f"{role}.json:disaggregation_mode") for role in ("prefill", "decode")} <= {
        (item["id"], item["location"]) for item in document["findings"]
    }
    assert all("speculative_config, kv_transfer_config" in note for note in document["notes"])


def test_help_and_explain_describe_it() -> None:
    assert "PREFILL DECODE" in run_main("validate-handoff", "--help").out
    explained = run_main("explain", "K01").out
    assert "kv-transfer" in explained
    assert "SGLang 0.5.23 disaggregation" in " ".join(explained.split())
