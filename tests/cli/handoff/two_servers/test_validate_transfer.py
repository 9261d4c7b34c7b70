"""`dflash validate-handoff`: its output, exit codes and refused options."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from dflash_testing import checkpoints as support

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


def test_a_sound_pair_of_servers_passes() -> None:
    outcome = support.run_main(*write({}, {"port": 8000, "host": "h"}))
    assert (outcome.code, outcome.out) == (
        0,
        "vllm 0.33, MooncakeConnector: the draft's context arrives\n"
        "prefill.json to decode.json: 20 rules checked: 0 errors, 0 warnings\n",
    )
    assert "decode.json: arguments that are not looked at (2): port, host" in outcome.err


def test_a_context_that_is_lost_ends_with_3_and_says_why() -> None:
    command = write({"speculative_config": None}, {})
    outcome = support.run_main(*command)
    assert outcome.code == 3
    assert "K01 error   decode.json:speculative_config.model: a draft, which the prefill server has not" in outcome.out
    assert (
        "vllm 0.33, MooncakeConnector: the draft's context does not arrive, and acceptance falls (K01)" in outcome.out
    )
    document = json.loads(support.run_main(*command, "--json").out)
    assert (document["passed"], document["verdict"]["outcome"], document["verdict"]["reasons"]) == (
        False,
        "lost",
        ["K01"],
    )
    assert (document["kind"], document["servers"]["prefill"]["draft"]) == ("validate-handoff", None)
    assert support.run_main(*command, "--ignore", "k01").code == 0


def test_warnings_fail_where_they_are_to() -> None:
    command = write({"version": "0.32.0"}, {"version": "0.33.0"})
    outcome = support.run_main(*command)
    assert outcome.code == 0
    assert "not known whether the draft's context arrives (K08)" in outcome.out
    assert support.run_main(*command, "--strict").code == 3


def test_what_cannot_be_opened_is_said_and_the_rest_is_judged() -> None:
    elsewhere = {"model": "/nowhere/target", "speculative_config": {"method": "dflash", "model": "/nowhere/draft"}}
    outcome = support.run_main(*write(elsewhere, {**elsewhere, "kv_cache_dtype": "fp8"}))
    assert outcome.code == 3
    assert "K07" in outcome.out
    assert outcome.err.count("the draft /nowhere/draft could not be read here, and its layers were not judged") == 1


def test_a_draft_that_stands_for_its_target_is_a_draft() -> None:
    """vLLM serves a draft of the speculators dialect by its own name, with the target that it names."""
    support.run_main("convert", "tiny", "dflash-spec", "--to", "speculators", "--target-name", "my-org/target", "-q")
    alone = {"model": "dflash-spec", "speculative_config": None}
    document = json.loads(support.run_main(*write(alone, alone), "--json").out)
    served = document["servers"]["prefill"]
    assert (document["verdict"]["outcome"], served["target"], served["draft"]["num_draft_tokens"]) == (
        "arrives", "my-org/target", 7,
    )  # fmt: skip
    beside = support.run_main(*write(alone, {"speculative_config": None}))
    assert (beside.code, "K01 error   decode.json" in beside.out) == (3, True)


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
    outcome = support.run_main(*write({}, {}), *arguments)
    assert (outcome.code, outcome.out, outcome.field) == (2, "", field)


def test_an_unknown_release_is_refused() -> None:
    assert support.run_main(*write({}, {}), "-e", "vllm@0.23").code == 2


def test_files_that_are_missing() -> None:
    write({}, {})
    assert support.run_main("validate-handoff", "prefill.json", "no.json", "-e", "vllm").code == 4
    outcome = support.run_main("validate-handoff", "prefill.json", "--engine", "vllm")
    assert (outcome.code, outcome.error_id, outcome.field) == (2, "missing-argument", "DECODE")
    outcome = support.run_main("validate")
    assert (outcome.code, outcome.error_id, outcome.field) == (2, "missing-argument", "DRAFT")


def test_an_engine_in_a_file_that_is_another_one_is_seen() -> None:
    """vLLM's arguments read as SGLang's say no role and no draft."""
    write({}, {})
    outcome = support.run_main("validate-handoff", "prefill.json", "decode.json", "-e", "sglang")
    assert outcome.code == 3
    assert "no role, expected that of a decode server" in outcome.out
    assert "speculative_config, kv_transfer_config" in outcome.err


def test_help_and_explain_know_of_it() -> None:
    assert "PREFILL DECODE" in support.run_main("validate-handoff", "--help").out
    explained = support.run_main("explain", "K01").out
    assert "kv-transfer" in explained
    assert "SGLang 0.5.23 disaggregation" in " ".join(explained.split())
