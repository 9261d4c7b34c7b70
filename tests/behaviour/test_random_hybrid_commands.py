"""Commands that run a pair, on random hybrid targets with drafts of every family: `tune` with what-ifs, and `bench`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_testing import checkpoints as support
from dflash_testing import families
from dflash_testing.command_line import run_main
from dflash_testing.hosted_models import make_model

SHAPE = support.Shape(hidden=32, inner=48, vocab=97, draft_vocab=97, mask=96, theta=10_000.0)
TIMES = {
    "source": "made",
    "plain": {"1": [10.0, 10.1]},
    "resized": {"2": {"1": [12.0, 12.1]}, "3": {"1": [13.0, 13.1]}},
}
PAIRS = ["qwen3_5_moe_text dflash2", "qwen3_next dspark"]
MORE = ["qwen3_5_text reduced", "qwen3_5_text dspark", "qwen3_5_moe_text reduced", "qwen3_next dflash2"]


def make_draft(path: Path, kind: str) -> Path:
    if kind == "reduced":
        return support.make_speculators(path, replace(SHAPE, draft_vocab=40))
    if kind == "dflash2":
        return families.write_draft(path, families.dflash2_native(SHAPE), SHAPE)
    return families.write_draft(path, families.dspark_native(SHAPE, sample_from_anchor=False), SHAPE)


@pytest.fixture(scope="module", params=[*PAIRS, *(pytest.param(pair, marks=pytest.mark.slow) for pair in MORE)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a draft, a target and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = request.param.split()
    make_model(folder / "target", target, initializer_range=0.15)
    make_draft(folder / "draft", draft)
    rows = [{"prompt_token_ids": [5 + place, 50, 60, 7]} for place in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "times.json").write_text(json.dumps(TIMES))
    return folder


def run(pair: Path, command: str, *more: object) -> dict[str, Any]:
    common = ("--target", pair / "target", "--prompts", pair / "prompts.jsonl", "--device", "cpu", "--json")
    outcome = run_main(command, pair / "draft", *common, *more)
    assert outcome.code == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    assert document["measured"]["target_runtime"] == "native"
    return document


def test_tune_chooses_and_rounds(pair: Path) -> None:
    what_ifs = ["draft=int4", "kv=fp8", "target=int4"]
    found = run(
        pair, "tune", "-n", 12, "--num-resamples", 100, "--step-times", pair / "times.json",
        "--what-if", ",".join(what_ifs),
    )  # fmt: skip
    names = [(item["num_speculative_tokens"], item["way"]) for item in found["candidates"]]
    assert names == [(2, "resized"), (2, "narrowed"), (3, "whole")]
    assert [item["what_if"] for item in found["what_ifs"]] == what_ifs


def test_bench_times_plain_and_drafting_steps(pair: Path) -> None:
    found = run(pair, "bench", "-n", 10, "--num-prompts", 1, "--concurrency", 1, "--rounds", 1)
    assert [item["batch"] for item in found["batches"]] == [1]


@pytest.mark.slow
def test_an_evaluation_in_every_mode_has_the_same_steps(pair: Path) -> None:
    few = ("--num-prompts", 4, "-n", 12)
    live = run(pair, "eval-acceptance", *few)
    for more in (("--disaggregated",), ("--concurrency", 1), ("--recurrent-rows", "at-once"), ("--no-prefix-cache",)):
        assert run(pair, "eval-acceptance", *few, *more)["per_pos_accepted"] == live["per_pos_accepted"]


def test_text_is_lossless(pair: Path) -> None:
    outcome = run_main(
        "generate", "-d", pair / "draft", "-t", pair / "target", "-p", pair / "prompts.jsonl", "-n", 16,
        "--num-prompts", 3, "--device", "cpu", "--check-lossless", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["lossless"]["is_lossless"]
