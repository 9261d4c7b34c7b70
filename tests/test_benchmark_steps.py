"""Decode steps and loads are timed on the CPU with small shapes, and the promised rows are written."""

import re
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest
import torch

import load
import row_budget
import step_time
import trees
from dflash_runtime import engine_setup
from dflash_runtime.device import acceptance_model
from dflash_runtime.scheduling import row_budget as scheduled_budget
from dflash_runtime.scheduling import width
from dflash_runtime.scheduling.row_budget import BestBudget
from dflash_testing.benchmarks import run
from timing import (
    accounting,
    draft_kinds,
    engine_arms,
    forced_kinds,
    gauges,
    pair_files,
    pairs,
    plan,
    report,
    shape_configs,
)
from timing.gauges import Readings
from timing.shapes import BLOCK, SHAPES
from timing.step_kinds import SeenStep, StepKinds


def test_step_times_are_written_as_json_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--batches", "2", "--context", "24,40", "--steps", "5", "--prefill", "32,3x16", "--acceptance", "6.5")
    pair_files.write_pair(SHAPES["small"], tmp_path / "pair", torch.device("cpu"))
    monkeypatch.setattr(pairs, "drawn_weights", None)  # all arms read the files
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments, "--pair", str(tmp_path / "pair"))
    assert code == 0
    for row in rows:
        assert row["schema"] == report.SCHEMA
        assert {"date", "machine", "versions", "command"} <= row.keys()
        assert row["versions"]["torch"] == metadata.version("torch")
    steps = [row for row in rows if row["kind"] == "step"]
    arms = ("plain", "dflash")
    assert [(row["arm"], row["context"]) for row in steps] == [(arm, context) for context in (24, 40) for arm in arms]
    for row in steps:
        assert row["files"] == str(tmp_path / "pair")
        assert row["acceptance"] == ("real" if row["arm"] == "plain" else "synthetic")
        most = 1 if row["arm"] == "plain" else BLOCK
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
        assert 1.999 / max(row["rounds"]) <= row["tokens_per_second"] / 1000 <= 2.001 * most / min(row["rounds"])
    assert [(row["of"], row["batch"]) for row in rows if row["kind"] == "ceiling"] == [("plain", 2), ("dflash", 2)]
    prefills = [row for row in rows if row["kind"] == "prefill"]
    assert [(row["arm"], row["prompts"], row["tokens"]) for row in prefills[1:3]] == [
        ("dflash", 1, 32),
        ("plain", 3, 16),
    ]
    assert capsys.readouterr().out.splitlines()[-len(steps) - 1].split()[:3] == ["arm", "batch", "context"]


def test_drafts_of_every_kind_are_timed_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft_kinds, "ROUNDS", 3)
    given = ("--arms", "drafts", "--drafts", ",".join(draft_kinds.KINDS), "--blocks", "4", "--batches", "2")
    code, rows = run(
        step_time,
        monkeypatch,
        tmp_path / "rows.jsonl",
        *given,
        "--context",
        "24",
        "--steps",
        "6",
        "--acceptance",
        "2.5",
    )
    assert code == 0
    drafts = [row for row in rows if row["kind"] == "draft"]
    assert [row["arm"] for row in drafts] == list(draft_kinds.KINDS)
    assert len({row["acceptance_achieved"] for row in drafts}) == 1  # forced from one table
    for row in drafts:
        assert len(row["rounds"]) == len(row["ratios"]) == 3
        times = zip(row["rounds"], drafts[0]["rounds"], strict=True)
        assert row["ratios"] == pytest.approx([mine / first for mine, first in times])
        assert row["least_ms"] <= row["ms"] <= row["most_ms"]
    assert set(drafts[0]["ratios"]) == {1.0}
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[: len(drafts) + 1]] == ["draft", *draft_kinds.KINDS]


def test_steps_of_a_target_with_experts_say_how_many_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ceilings are left out: the experts of a row are not known beforehand."""
    given = ("--shape", "small-experts", "--batches", "2", "--context", "8", "--steps", "5", "--acceptance", "2")
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *given, "--arms", "ceilings,plain,dflash")
    assert code == 0
    plain, dflash = (row for row in rows if row["kind"] == "step")
    assert not [row for row in rows if row["kind"] == "ceiling"]
    own = SHAPES["small-experts"].experts
    assert own is not None
    assert (plain["experts"], dflash["experts"]) == (own.distinct(2), own.distinct(2 * BLOCK))
    assert 0 < plain["experts_ms"] < dflash["experts_ms"] < dflash["floor_ms"]
    assert "experts ms" in capsys.readouterr().out


def test_trees_are_timed_beside_blocks_with_forced_acceptance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every draft is accepted, so the expected numbers of tokens are the drawn ones: 5 at most from a tree of 4."""
    monkeypatch.setattr(draft_kinds, "ROUNDS", 2)
    given = ("--batches", "2", "--context", "24", "--steps", "4", "--widths", "4,16", "--block", "16")
    code, rows = run(trees, monkeypatch, tmp_path / "rows.jsonl", *given, "--trees", "4=5,20=16")
    assert code == 0
    assert [row["arm"] for row in rows] == ["plain", "block 4", "block 16", "tree 4", "tree 20"]
    assert [row["rows"] for row in rows] == [1, 4, 16, 5, 21]
    assert [row["acceptance_achieved"] for row in rows] == [None, 4, 16, 5, 16]
    for row in rows:
        assert row["acceptance_expected"] == pytest.approx(row["acceptance_achieved"] or 1)
        assert row["tokens_per_second"] == pytest.approx(2000 * row["acceptance_expected"] / row["ms"])
    block = max(row["tokens_per_second"] for row in rows[1:3])
    assert [row["block_gain"] * block for row in rows] == pytest.approx([row["tokens_per_second"] for row in rows])
    assert capsys.readouterr().out.split()[:3] == ["arm", "batch", "rows"]


def test_a_row_budget_is_timed_beside_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step times are stated: a CPU measures none. A perfect feature gives rows to the request that needs them."""
    times = width.StepTimes({2: {1: 6.0, 2: 8.0, 4: 12.0, 8: 20.0}})
    monkeypatch.setattr(
        engine_setup, "find_row_budget", lambda pair, runner: BestBudget(times) if pair.config.row_budget else None
    )
    monkeypatch.setattr(row_budget, "WARM_STEPS", 12)
    monkeypatch.setattr(row_budget, "FEATURES", ("perfect", "uninformative"))
    monkeypatch.setattr(acceptance_model, "REFIT_STEPS", 4)
    monkeypatch.setattr(scheduled_budget, "FIRST_STEPS", 4)
    given = ("--batches", "2", "--context", "16", "--block", "8", "--steps", "20", "--high", "7.5", "--low", "1.02")
    code, rows = run(row_budget, monkeypatch, tmp_path / "rows.jsonl", *given, "--most-one", "0")
    assert code == 0, rows
    found = {row["arm"]: row for row in rows}
    assert [*found] == [
        row_budget.WHOLE, row_budget.ADAPTIVE, *(f"budget, {name}" for name in row_budget.FEATURES), row_budget.AGAIN
    ]  # fmt: skip
    assert {row["acceptance"] for row in rows} == {"synthetic"}
    whole, perfect = found[row_budget.WHOLE], found["budget, perfect"]
    assert (whole["rows_per_request"], whole["tokens_per_step"]) == (8, pytest.approx(7.5 + 1.02))
    assert perfect["rows_per_request"] < 6
    assert found["budget, uninformative"]["tokens_per_step"] < perfect["tokens_per_step"]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1000 * row["tokens_per_step"] / row["ms"])
    assert capsys.readouterr().out.split()[:3] == ["requests", "batch", "arm"]


def test_forced_confidences_belong_to_the_forced_outcome() -> None:
    """65,536 blocks of each kind. The share accepted among tokens of one confidence has an error of about 0.01.

    With odds scaled to each kind, a measured confidence is calibrated: Bayes' rule with the rate of the kind.
    """
    means = (12.0, 1.3)
    drawn = {
        feature: forced_kinds.KindTables.draw(means, BLOCK - 1, feature) for feature in get_args(forced_kinds.Feature)
    }
    place = torch.arange(BLOCK - 1)
    for feature, tables in drawn.items():
        rows, remaining = torch.tensor([4, 7]), torch.tensor([300, 900])
        accepted, confidences = tables.blocks(rows, remaining)
        assert accepted.tolist() == [tables.drawn(4, [300])[0], tables.drawn(7, [900])[0]]
        assert torch.equal(accepted, drawn["perfect"].blocks(rows, remaining)[0])
        assert confidences.shape == (2, BLOCK - 1)
        for mean, counts, values in zip(means, tables.accepted, tables.confidences, strict=True):
            assert float(counts.double().mean()) + 1 == pytest.approx(mean, abs=0.001)
            is_taken, is_judged = place < counts[:, None], place <= counts[:, None]
            rate = float(is_taken[is_judged].double().mean())
            for value in values.unique()[3:-3]:
                share = float(is_taken[is_judged & (values == value)].double().mean())
                usual = sum(forced_kinds.CONFIDENCES) / len(forced_kinds.CONFIDENCES)
                odds = float(value / (1 - value)) * rate / (1 - rate) * (1 - usual) / usual
                assert share == pytest.approx(rate if feature == "uninformative" else odds / (1 + odds), abs=0.03)
            if feature == "perfect":
                assert torch.equal(values > 0.5, is_taken)


def test_each_kind_drafts_as_many_tokens() -> None:
    base = shape_configs.model_configs(SHAPES["small"])[1]
    configs = [draft_kinds.kind_config(base, kind, 8) for kind in draft_kinds.KINDS]
    assert {config.num_draft_tokens for config in configs} == {7}
    assert [config.block_size for config in configs] == [7 if config.sample_from_anchor else 8 for config in configs]


def test_an_arm_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--batches", "1", "--context", "8", "--steps", "5", "--arms", "dflash,plain", "--acceptance", "99")
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert code == 1
    assert [row["arm"] for row in rows if row["kind"] in ("failure", "step")] == ["dflash", "plain"]
    (failure,) = (row for row in rows if row["kind"] == "failure")
    assert (failure["batch"], failure["context"], failure["graphs"]) == (1, 8, False)
    assert failure["error"].startswith("ValueError: ")
    assert "99" in failure["error"]
    assert failure["error"] in capsys.readouterr().err


def test_a_profiled_step_has_nodes_idle_time_and_a_waterfall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for the profiler and the device name, because a CUDA device is missing here."""
    kernels = [accounting.Interval("nvjet", 0, 900), accounting.Interval("_block_attention_kernel", 900, 1000)]
    monkeypatch.setattr(engine_arms, "profile_steps", lambda step, count: accounting.account(kernels, 1))
    monkeypatch.setattr(plan.Plan, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    arguments = ("--batches", "1", "--context", "8", "--steps", "5", "--arms", "ceilings,dflash", "--no-eager")
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments, "--profile")
    assert code == 0
    row = rows[-1]
    assert row["nodes"] == 2
    assert row["idle_ms"] == pytest.approx(row["ms"] - 1)
    names = [name for name, _ in row["waterfall"]]
    assert names[:3] == ["floor by the data sheet", "floor at measured rates", "matrix products alone, cuBLAS"]
    assert [value for _, value in row["waterfall"]][3:] == pytest.approx([0.9, 1.0, 1.0, row["ms"]])
    shown = capsys.readouterr().out
    assert re.search(r"\b1\.00 ms in 2 ", shown)
    assert re.search(r"\+ gaps: measured +\d", shown)


@pytest.mark.gpu
def test_trees_are_timed_as_captured_steps_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step with a tree has at most four nodes more than a step with a block of as many rows."""
    arguments = ("--device", "cuda:0", "--batches", "1,4", "--context", "64", "--steps", "22", "--trees", "15=4,64=6")
    code, rows = run(trees, monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert code == 0, [row for row in rows if row["kind"] == "failure"]
    assert [row["graphs"] for row in rows] == [True] * 14
    nodes = {(row["batch"], row["arm"]): row["nodes"] for row in rows}
    for batch in (1, 4):
        assert 10 < nodes[batch, "tree 15"] <= nodes[batch, "block 16"] + 4


@pytest.mark.gpu
def test_a_row_budget_is_timed_as_captured_steps_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--device", "cuda:0", "--batches", "4", "--context", "64", "--steps", "20")
    code, rows = run(row_budget, monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert code == 0, [row for row in rows if row["kind"] == "failure"]
    assert [row["graphs"] for row in rows] == [True] * 12
    assert all(row["rows_per_request"] == BLOCK for row in rows if row["arm"] == row_budget.WHOLE)
    assert all(1 <= row["rows_per_request"] <= BLOCK for row in rows)


@pytest.mark.gpu
def test_everything_is_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--device", "cuda:0", "--batches", "1,4", "--context", "64", "--steps", "20", "--prefill", "256,4x64")
    code, rows = run(step_time, monkeypatch, tmp_path / "steps.jsonl", *arguments, "--acceptance", "4")
    assert code == 0, [row for row in rows if row["kind"] == "failure"]
    steps = [row for row in rows if row["kind"] == "step" and row["graphs"]]
    assert {row["batch"] for row in steps} == {1, 4}
    for row in steps:
        assert row["nodes"] > 10
        assert 0 < row["busy_ms"] < 2 * row["ms"]
    options = ("--device", "cuda:0", "--requests", "12", "--max-num-requests", "4", "--max-prompt", "256")
    code, rows = run(load, monkeypatch, tmp_path / "load.jsonl", *options, "--max-answer", "64", "--acceptance", "4")
    assert code == 0, [row for row in rows if row["kind"] == "failure"]
    assert all(row["peak_memory_bytes"] > 0 for row in rows)
    measured = [row for row in (*steps, *rows) if row["power_samples"]]
    assert measured, "the loads take longer than 50 ms"
    assert all(row["watts"] > 20 and row["mhz"] > 100 and row["joules_per_step"] > 0 for row in measured)


def test_every_request_of_a_load_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--requests", "8", "--max-prompt", "80", "--max-answer", "34", "--max-num-requests", "4")
    code, rows = run(
        load, monkeypatch, tmp_path / "rows.jsonl", *arguments, "--arms", "plain,dflash", "--acceptance", "6",
        "--steps",
    )  # fmt: skip
    assert code == 0
    assert [row["arm"] for row in rows] == ["plain", "dflash"]
    made = load.make_load(SHAPES["small"], 8, 80, 34)
    for row in rows:
        assert row["kind"] == "load"
        assert row["num_tokens"] == sum(made.output_lengths)
        assert len(row["first_token_s"]) == 8
        assert row["first_token_p50_s"] <= row["first_token_p95_s"] <= row["seconds"]
        assert row["num_preemptions"] == 0
        assert row["step_p50_ms"] <= row["step_p95_ms"] <= row["step_p99_ms"]
        kinds = row["kinds"]
        num_rows = sum(kind["mean_prompt_rows"] * kind["steps"] for kind in kinds)
        assert num_rows == pytest.approx(sum(map(len, made.prompts)))
        assert {kind["prompt_rows"] for kind in kinds} > {"0"}
        assert kinds[0]["mean_block_rows"] == kinds[0]["mean_requests"] * (1 if row["arm"] == "plain" else 16)
        assert sum(kind["seconds"] for kind in kinds) == pytest.approx(
            sum(kind["device_ms"] * kind["steps"] for kind in kinds) / 1000
        )
    assert rows[1]["num_steps"] < rows[0]["num_steps"]


@pytest.mark.parametrize(("count", "name"), [(0, "0"), (1, "1-64"), (64, "1-64"), (65, "65-128"), (5000, "4097+")])
def test_steps_are_grouped_by_rows_of_prompts(count: int, name: str) -> None:
    kinds = StepKinds([SeenStep(1, 1, count, 2.0, None), SeenStep(3, 2, count, 4.0, None)])
    (row,) = kinds.rows()
    assert (row["requests"], row["prompt_rows"]) == ("1-15", name)
    assert (row["mean_block_rows"], row["device_ms"], row["seconds"]) == (3.5, 3.0, 0.006)


FAKE_SMI = """#!/bin/sh
case "$*" in *"-i 3 "*"-lms"*) ;; *) echo "no such GPU"; exit 1 ;; esac
echo "2026/11/02 10:00:00.900, 999.00, 999"
echo "2026/11/02 10:00:01.000, 400.00, 1700"
echo "2026/11/02 10:00:01.050, [N/A], [N/A]"
sleep 0.1
echo "2026/11/02 10:00:01.100, 600.00, 1800"
echo "2026/11/02 10:00:01.300, 999.00, 999"
exec sleep 60
"""


def test_power_is_the_mean_of_samples_in_the_measured_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two samples are in the span, and the second comes late."""
    (tmp_path / "nvidia-smi").write_text(FAKE_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    began = datetime(2026, 11, 2, 10, 0, 1).timestamp()
    with gauges.Gauges(torch.device("cuda", 1)) as measured:
        found = measured.over([(began, began + 0.2)])
        assert found == Readings(500, 1750, 2)
        assert measured.over([(began - 9, began - 8)]) == Readings()  # without samples
    assert found.fields(step=0.01, token=None) == {
        "watts": 500, "mhz": 1750, "power_samples": 2, "joules_per_step": 5, "joules_per_token": None,
    }  # fmt: skip
    with gauges.Gauges(torch.device("cuda", 0)) as refused:
        assert refused.over([(began, began + 1)]) == Readings()
    assert "no such GPU" in capsys.readouterr().err
