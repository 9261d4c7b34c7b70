"""The commands that run a pair, on DFlash 2 and DSpark drafts: results, confidences in rows, replay of a dump."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.tuning.step_parts import silence_draft
from dflash_runtime.drafts.draft import WalkingDraft
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import invoke
from dflash_testing.pairs import bundled_llm, bundled_prompts
from dflash_testing.walking_drafts import KINDS, draft_model, walking_folder

SMALL = ("--num-prompts", 3, "-n", 16, "--device", "cpu")
PREDICTING = [kind for kind in KINDS if kind != "dflash2"]
"""Drafts with a confidence head."""


def run(*arguments: object) -> dict[str, Any]:
    outcome = invoke(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    return document


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the answers `KIND.jsonl` and the result `KIND.json` of each kind."""
    folder = tmp_path_factory.mktemp("evaluated")
    for kind in KINDS:
        rows = folder / f"{kind}.jsonl"
        found = run("eval-acceptance", walking_folder(kind), "--target", "tiny", *SMALL, "--output", rows)
        rows.with_suffix(".json").write_text(json.dumps(found))
    return folder


def result_of(folder: Path, kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a kind, and its answers."""
    return json.loads((folder / f"{kind}.json").read_text()), answers_of(folder / f"{kind}.jsonl")


def answers_of(path: Path) -> list[dict[str, Any]]:
    """The answers of a file in the order of their prompts."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return sorted(rows, key=lambda row: row["index"])


@pytest.mark.parametrize("kind", KINDS)
def test_generated_text_is_that_of_plain_decoding(kind: str) -> None:
    found = run(
        "generate", "def f(", "--draft", walking_folder(kind), "--target", "tiny", "-n", 12, "--device", "cpu",
        "--check-lossless", "--trace", 1,
    )  # fmt: skip
    assert found["lossless"]["is_lossless"]
    (row,) = found["rows"]
    drafted = [len(step["drafted"]) for step in row["trace"]]
    assert set(drafted) == {found["num_speculative_tokens"]}
    if kind in PREDICTING:
        assert [len(step) for step in row["draft_confidences"]] == drafted
        assert [step["confidences"] for step in row["trace"]] == row["draft_confidences"]
        assert all(0 < value < 1 for step in row["draft_confidences"] for value in step)
    else:
        assert "draft_confidences" not in row
        assert all("confidences" not in step for step in row["trace"])


@pytest.mark.parametrize("kind", PREDICTING)
def test_an_evaluation_compares_confidence_with_acceptance(evaluated: Path, kind: str) -> None:
    """A token counts if the target accepted all tokens before it."""
    result, rows = result_of(evaluated, kind)
    seen: dict[int, list[tuple[float, bool]]] = {}
    for row in rows:
        for length, values in zip(row["acceptance_lengths"], row["draft_confidences"], strict=True):
            for place, value in enumerate(values):
                if place < length:
                    seen.setdefault(place, []).append((value, place + 1 < length))
    found = result["draft_confidence"]
    for place, pairs in seen.items():
        values, accepted = zip(*pairs, strict=True)
        assert found["per_pos_judged"][place] == len(pairs)
        assert found["per_pos_mean"][place] == pytest.approx(sum(values) / len(pairs))
        assert found["per_pos_accepted_share"][place] == pytest.approx(sum(accepted) / len(pairs))
    every = [pair for pairs in seen.values() for pair in pairs]
    assert sum(found["per_pos_judged"]) == len(every)
    assert found["mean"] == pytest.approx(sum(value for value, _ in every) / len(every))
    assert found["accepted_share"] == pytest.approx(result["num_accepted_tokens"] / len(every))


def test_a_draft_without_a_confidence_head_has_no_comparison(evaluated: Path) -> None:
    result, rows = result_of(evaluated, "dflash2")
    assert result["draft_confidence"] is None
    assert not any("draft_confidences" in row for row in rows)


def test_a_continued_evaluation_has_the_confidences_of_its_file(evaluated: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((evaluated / "dspark.jsonl").read_bytes())
    draft = walking_folder("dspark")
    again = run("eval-acceptance", draft, "--target", "tiny", *SMALL, "--output", rows, "--resume")
    assert again["draft_confidence"] == result_of(evaluated, "dspark")[0]["draft_confidence"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_steps_of_the_live_run(evaluated: Path, kind: str, tmp_path: Path) -> None:
    draft = walking_folder(kind)
    run("dump", "tiny", "--taps-from", draft, *SMALL, "--output", tmp_path / "dump")
    replay = ("eval-acceptance", draft, "--mode", "replay", "--dump", tmp_path / "dump", "--head-from", "tiny")
    found = run(*replay, "--device", "cpu", "--output", tmp_path / "rows.jsonl")
    result, live = result_of(evaluated, kind)
    assert found["per_pos_accepted"] == result["per_pos_accepted"]
    for one, other in zip(answers_of(tmp_path / "rows.jsonl"), live, strict=True):
        assert one["acceptance_lengths"] == other["acceptance_lengths"]
        assert one["rejected_ids"] == other["rejected_ids"]
        for values, wanted in zip(one.get("draft_confidences", ()), other.get("draft_confidences", ()), strict=True):
            assert values == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tune_and_bench_run_it(kind: str) -> None:
    draft, num_drafts = walking_folder(kind), KINDS[kind].block_size - (kind != "anchor-first")
    rest = ("--target", "tiny", "--device", "cpu", "-n", 8, "--concurrency", 1)
    benched = run("bench", draft, *rest, "--rounds", 1)
    assert benched["num_speculative_tokens"] == num_drafts
    few = ("--num-prompts", 2, "--rounds", 2, "--num-resamples", 100)
    tuned = run("tune", draft, *rest, *few, "-k", 4, "--what-if", "draft=int4")
    assert {item["num_speculative_tokens"] for item in tuned["candidates"]} == {4, num_drafts}
    assert [item["what_if"] for item in tuned["what_ifs"]] == ["draft=int4"]


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_timed_without_the_draft(kind: str, draft_sampling: str) -> None:
    """The stub that takes the draft's place chooses its tokens itself, so the step has no other way to choose them."""
    llm = bundled_llm(draft_model(kind), 7, draft_sampling=draft_sampling)
    silent = silence_draft(llm.pair)
    assert isinstance(silent.draft, WalkingDraft)
    prompts, params = bundled_prompts()[:2], SamplingParams(max_new_tokens=5, temperature=0.8, seed=1)
    (output, _) = LLM(silent).generate(prompts, params)
    assert output.acceptance_lengths
