"""Every command that runs a pair, on the trained hybrid pair: the native target, one acceptance, one text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_testing.command_line import invoke
from dflash_testing.hybrid_pair import HYBRID_PAIR

DRAFT, TARGET, PROMPTS = (HYBRID_PAIR / name for name in ("draft", "target", "prompts.jsonl"))
PAIR = (DRAFT, "--target", TARGET)
ON_CPU = ("--device", "cpu")
FEW = ("--prompts", PROMPTS, "--num-prompts", 4, *ON_CPU)
NUM_TOKENS = 24


def run(*arguments: object, code: int = 0) -> dict[str, Any]:
    outcome = invoke(*arguments, "--json")
    assert outcome.code == code, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    return document


def evaluate(rows: Path, *more: object) -> dict[str, Any]:
    return run("eval-acceptance", *PAIR, *FEW, "-n", NUM_TOKENS, "--output", rows, *more)


def answers_of(path: Path) -> list[dict[str, Any]]:
    """The answers of a file in the order of their prompts."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return sorted(rows, key=lambda row: row["index"])


def traces_of(path: Path) -> list[Any]:
    return [(row["token_ids"], row["acceptance_lengths"]) for row in answers_of(path)]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The result of an evaluation, and the file of its answers."""
    rows = tmp_path_factory.mktemp("evaluated") / "rows.jsonl"
    return evaluate(rows), rows


def test_the_native_target_runs(evaluated: tuple[dict[str, Any], Path]) -> None:
    result, _ = evaluated
    assert result["measured"]["target_runtime"] == "native"
    assert result["settings"]["recurrent_rows"] == "exact"
    assert result["acceptance_len"] > 4


def test_generated_text_is_that_of_transformers(tmp_path: Path) -> None:
    """The texts are lossless, and equal plain decoding by transformers' code with transformers' cache."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(line + "\n" for line in PROMPTS.read_text().splitlines()[:4]))
    asked = ("-t", TARGET, "-p", file, "-n", NUM_TOKENS, *ON_CPU)
    found = run("generate", "-d", DRAFT, *asked, "--check-lossless")
    assert found["lossless"]["is_lossless"]
    plain = run("generate", "-k", 0, *asked, "--target-runtime", "transformers-cache")
    assert [row["token_ids"] for row in found["rows"]] == [row["token_ids"] for row in plain["rows"]]


@pytest.mark.parametrize("more", [("--recurrent-rows", "at-once"), ("--disaggregated",)])
def test_other_ways_of_running_give_the_same_traces(
    evaluated: tuple[dict[str, Any], Path], more: tuple[object, ...], tmp_path: Path
) -> None:
    result = evaluate(tmp_path / "rows.jsonl", *more)
    assert traces_of(tmp_path / "rows.jsonl") == traces_of(evaluated[1])
    assert result["settings"]["recurrent_rows"] == ("at-once" if "at-once" in more else "exact")


def test_an_evaluation_is_resumed(evaluated: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(line + "\n" for line in evaluated[1].read_text().splitlines()[:3]))
    result = evaluate(rows, "--resume")
    assert result["per_pos_accepted"] == evaluated[0]["per_pos_accepted"]
    assert traces_of(rows) == traces_of(evaluated[1])


def test_a_run_with_other_recurrent_rows_is_not_resumed(evaluated: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(evaluated[1].read_bytes())
    outcome = invoke(
        "eval-acceptance", *PAIR, *FEW, "-n", NUM_TOKENS, "--output", rows, "--resume", "--recurrent-rows", "at-once"
    )
    assert outcome.code == 2
    assert "recurrent_rows" in outcome.err


def test_a_replay_has_the_steps_of_the_live_run(evaluated: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    run("dump", "--target", TARGET, "--taps-from", DRAFT, *FEW, "-n", NUM_TOKENS, "--output", tmp_path / "dump")
    found = run(
        "eval-acceptance", DRAFT, "--mode", "replay", "--dump", tmp_path / "dump", "--head-from", TARGET, *ON_CPU,
        "--output", tmp_path / "rows.jsonl",
    )  # fmt: skip
    assert found["per_pos_accepted"] == evaluated[0]["per_pos_accepted"]
    lengths = [row["acceptance_lengths"] for row in answers_of(tmp_path / "rows.jsonl")]
    assert lengths == [row["acceptance_lengths"] for row in answers_of(evaluated[1])]


@pytest.mark.slow
def test_workers_give_the_same_traces(evaluated: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    evaluate(tmp_path / "rows.jsonl", "--workers", 2)
    assert traces_of(tmp_path / "rows.jsonl") == traces_of(evaluated[1])


@pytest.mark.slow
def test_a_sound_pair_has_no_error() -> None:
    found = run("validate", *PAIR, "--level", "run", "--prompts", PROMPTS, *ON_CPU)
    assert found["search"]["target_runtime"] == "native"
    assert not [item for item in found["findings"] if item["severity"] == "error"]


@pytest.mark.slow
def test_a_sound_pair_is_diagnosed() -> None:
    found = run("diagnose", *PAIR, "--prompts", PROMPTS, *ON_CPU)
    assert not found["has_cause"]
    assert found["report"]["search"]["target_runtime"] == "native"


@pytest.mark.slow
def test_wrong_taps_are_found(tmp_path: Path) -> None:
    """The draft reads layers of the target that it was not trained on."""
    config = json.loads((DRAFT / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 2, 3]
    wrong = tmp_path / "draft"
    wrong.mkdir()
    (wrong / "config.json").write_text(json.dumps(config))
    shutil.copy(DRAFT / "model.safetensors", wrong)
    found = run(
        "validate", wrong, "--target", TARGET, "--level", "run", "--prompts", PROMPTS, "--num-prompts", 6, "-n", 8,
        *ON_CPU, code=3,
    )  # fmt: skip
    assert found["search"]["target_runtime"] == "native"
    assert "target_layer_ids" in json.dumps(found["findings"])
