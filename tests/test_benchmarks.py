"""The benchmarks of speed run on the CPU with small shapes, and write the promised rows and tables."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import attention
import convert
import experts
import handoff
import handoff_steps
import host_time
import hosted
import load
import own_cache
import products
import row_budget
import short_prompts
import snapshot_policies
import step_time
import tensor_parallel
import trees
import tune_times
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.tuning.candidates import candidates_for
from dflash_cli.tuning.step_costs import read_step_costs
from dflash_kernels.suite import triton_kernels
from dflash_runtime import engine_setup
from dflash_runtime.device import acceptance_model
from dflash_runtime.scheduling import width
from dflash_runtime.scheduling.row_budget import BestBudget
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
from timing.floors import Rates
from timing.gauges import Gauges, Readings, Span
from timing.shapes import BLOCK, SHAPES
from timing.step_kinds import SeenStep, StepKinds

SMALL = ["--shape", "small", "--device", "cpu"]
RATES = Rates(bandwidth=4.3e12, operations=790e12, origin="stated")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a script's main in this process -> its exit code, and the rows it wrote."""
    monkeypatch.setattr(sys, "argv", [script.__file__, *SMALL, "--out", str(out), *arguments])
    code = script.main()
    return code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_experts_are_timed_in_each_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["experts.py", *SMALL, "--batches", "1", "--rows", "3", "--ways", ",".join(experts.WAYS)]
    )
    assert experts.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:6]] == [["3", way] for way in experts.WAYS]
    assert [line.split()[-2:] for line in lines[1:6]] == [["0.00", "0.00"]] * 4 + [["-", "0.00"]]  # errors in %
    assert [line.split()[:3] for line in lines[-2:]] == [[arm, "1", "False"] for arm in ("plain", "dflash")]
    floors = [float(line.split()[-1]) for line in lines[-2:]]
    assert floors[1] > 2 * floors[0]  # a block uses more experts than one row, and the draft is read too


@pytest.mark.slow
def test_shared_experts_are_timed_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "--shape", "small-shared", "--batches", "1", "--rows", "3", "--ways", "one_by_one,grouped"]
    monkeypatch.setattr(sys, "argv", ["experts.py", *given])
    assert experts.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines[1:3]] == [["0.00", "0.00"]] * 2


@pytest.mark.slow
def test_split_steps_are_timed_beside_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes over gloo: each arm has a row for one process, and one with the ratio to it."""
    given = ["--batches", "1", "--steps", "10", "--context", "20", "--arms", "plain,dflash"]
    code, rows = run(tensor_parallel, monkeypatch, tmp_path / "rows.jsonl", *given)
    assert code == 0
    assert [(row["arm"], row["all_reduce"], row["ranks"]) for row in rows] == [
        ("plain", "one GPU", 1), ("dflash", "one GPU", 1), ("plain", "gloo", 2), ("dflash", "gloo", 2),
    ]  # fmt: skip
    assert [row["ratio"] for row in rows] == [None, None, *(rows[n + 2]["ms"] / rows[n]["ms"] for n in range(2))]


def test_steps_are_timed_beside_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both parts have the requested number of steps, and the second one loads hand-offs."""
    out = tmp_path / "times.json"
    handoff_steps.main([*SMALL, "--prompt-len", "20", "--batch", "1", "--steps", "12", "--out", str(out)])
    times = json.loads(out.read_text())
    assert [len(times[part]["ms"]) for part in ("alone", "beside")] == [12, 12]
    assert set(times["alone"]["batch"]) == {1}
    assert set(times["beside"]["batch"]) == {1, 2}  # a loaded request decodes too
    assert len(times["loads"]) > 2
    assert "mean / alone" in capsys.readouterr().out


@pytest.mark.slow
def test_prompts_are_timed_alone_and_beside_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(short_prompts, "NUM_WARM", 1)
    monkeypatch.setattr(short_prompts, "NUM_TIMED", 2)
    out = tmp_path / "prompts.jsonl"
    given = ["--prompts", "5,40", "--beside", "0,2", "--arms", "plain,dflash", "--context", "20", "--out", str(out)]
    assert short_prompts.main([*SMALL, *given]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["arm"], row["beside"], row["tokens"]) for row in rows] == [
        (arm, beside, tokens) for arm in ("plain", "dflash") for beside in (0, 2) for tokens in (5, 40)
    ]
    assert all((row["plain_ms"] > 0) == (row["beside"] > 0) and row["way"] == "launched" for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_steps_are_timed_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.jsonl"
    given = ["--requests", "3", "--contexts", "20,50", "--waiting", "70", "--evicted", "64", "--steps", "12"]
    given += ["--shared", "40", "--sharing", "3"]
    assert host_time.main([*given, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["what"], row["tokens"]) for row in rows] == [
        ("decoding", 20), ("waiting", 20), ("decoding", 50), ("waiting", 50), ("shared", 40), ("no room", 70),
        ("full pool", 64),
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_snapshot_policies_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chosen policy has 0.8 of the hits without a limit in 5% of its states. States after every page have not."""
    out = tmp_path / "policies.jsonl"
    given = ["--conversations", "10", "--shares", "5", "--slots", "32", "--every-policy"]
    assert snapshot_policies.main([*given, "--out", str(out)]) == 0
    limit, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0.5 * limit["tokens"] < limit["cached"] < limit["tokens"]
    assert len(rows) == len(snapshot_policies.ARMS) + 1
    hits = {(row["policy"], row["answers"], row["replaced"]): row["hits"] for row in rows[:-1]}
    chosen = snapshot_policies.CHOSEN
    assert all(0 < value <= 1 for value in hits.values())
    assert hits[chosen.name, chosen.keeps_answers, chosen.replaces] > 0.8 > hits["every page", True, chosen.replaces]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_products_are_timed_in_their_chain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference kernels use the library only. The Triton kernels add a column per product and one for all."""
    out = tmp_path / "products.jsonl"
    assert products.main([*SMALL, "--rows", "2", "--out", str(out)]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert set(row["us"]) == {"library"}


@pytest.mark.interpreter
def test_products_of_the_triton_kernels_are_timed_one_by_one_and_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "pick_kernels", lambda *_: triton_kernels())
    monkeypatch.setattr(products, "NUM_LAYERS", 1)
    monkeypatch.setattr(products, "NUM_TURNS", 1)
    assert products.main([*SMALL, "--rows", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()[-1].split()) == 7


def test_attention_is_timed_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deliberately wrong result shows a large error."""
    monkeypatch.setattr(attention, "CAPACITY", 128)
    out = tmp_path / "attention.jsonl"
    given = [*SMALL, "--cases", "2x3@40,3x1@10-90", "--out", str(out)]
    assert attention.main(given) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["2x3@40", "3x1@10-90"]
    assert all(row["error"] < 1e-5 and row["us"] > 0 for row in rows)
    # One layer: queries and results of 4 heads, keys and values of 2 heads, 128 numbers of 4 bytes per head.
    monkeypatch.setattr(attention, "measure_rates", lambda *_: Rates(1e6, 1e6, "stated"))
    assert attention.main(given) == 0
    floor = json.loads(out.read_text().splitlines()[0])["floor_us"]
    assert floor == (2 * 4 * 6 + 2 * 2 * (80 + 6)) * 128 * 4
    lengths = attention.Case.parse("30x1@10-90").lengths()
    assert lengths == attention.Case.parse("30x1@10-90").lengths()
    assert min(lengths) >= 10
    assert 70 < max(lengths) <= 90
    monkeypatch.setattr(attention.Layers, "attend", lambda layers, kernels: layers._blocks[0, ..., :4, :])
    assert attention.main(given) == 0
    assert all(float(line.split()[-1]) > 50 for line in capsys.readouterr().out.splitlines()[-2:])


@pytest.mark.parametrize("case", ["2x3", "2x0@5", "0x1@5", "1x1@9-5", "1x1@0", "1x9@32760"])
def test_malformed_cases_of_attention_are_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        attention.main(["--cases", case])
    assert stop.value.code == 2
    assert f"'{case}'" in capsys.readouterr().err


def test_a_conversion_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = convert.convert(tiny_directory() / "draft", tmp_path / "out", "speculators", "roundtrip")
    assert found.keys() >= {"copy_s", "hash_s", "verify_s", "peak_megabytes"}
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_block_touches_most_experts() -> None:
    """Expected number of experts used: 128 experts, 8 per row."""
    weights = {"model.layers.0.mlp.experts.down_proj.weight": torch.zeros(128), "model.norm.weight": torch.zeros(1)}
    shape = experts.SHAPES["qwen3-30b-a3b"]
    touched = [(experts.read_bytes(shape, weights, rows) - 4) / 4 for rows in (1, 16, 512)]
    assert [round(count) for count in touched] == [8, 82, 128]


@pytest.mark.slow
def test_hosted_targets_are_timed_beside_native_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shapes", "small,small-moe,small-hybrid", "--device", "cpu", "--batches", "1", "--arms", "dflash"]
    monkeypatch.setattr(sys, "argv", ["hosted.py", *arguments])
    assert hosted.main() == 0
    cells = [line.split() for line in capsys.readouterr().out.splitlines()[-9:]]
    ways = [(shape, way) for shape in ("small", "small-moe") for way in hosted.OVER_PAGES]
    assert [(row[0], row[1]) for row in cells] == [*ways, ("small-hybrid", "transformers-cache")]
    assert all(row[-2:] == ["0", "0"] for row in cells)
    assert [row[6] for row in cells if row[1] == "native"] == ["1.00", "1.00"]


def test_targets_with_their_own_cache_are_timed_beside_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--families", "lfm2,never_published,mamba", "--one-by-one"]
    monkeypatch.setattr(sys, "argv", ["own_cache.py", *arguments, "--requests", "2", "--tokens", "9"])
    assert own_cache.main() == 0
    said = capsys.readouterr()
    assert "never_published" in said.err
    rows = [line.split() for line in said.out.splitlines()[1:-1]]
    assert [(row[0], row[1:3], row[3:5]) for row in rows] == [
        ("lfm2", ["at", "once"], ["any", "length"]), ("mamba", ["one", "token"], ["any", "length"]),
    ]  # fmt: skip
    assert all(float(row[-1]) == pytest.approx(float(row[7]) / float(row[5]), abs=0.01) for row in rows)


def test_step_times_of_every_k_are_readable_by_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    arguments = ["--batches", "1,2", "--context", "8", "--steps", "6", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["tune_times.py", *SMALL, *arguments])
    assert tune_times.main() == 0
    costs = read_step_costs(out, BLOCK - 1)
    assert costs.drafting.keys() == set(candidates_for([1, 3, 7], BLOCK - 1))
    assert all(times.keys() == {1, 2} for times in (costs.plain, *costs.drafting.values()))


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
    arguments = ("--device", "cuda:0", "--batches", "1,4", "--context", "64", "--steps", "22", "--trees", "8=4,64=6")
    code, rows = run(trees, monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert code == 0, [row for row in rows if row["kind"] == "failure"]
    assert [row["graphs"] for row in rows] == [True] * 14
    for row in rows:
        assert row["nodes"] > 10


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


FAKE_VLLM = """
import json
import time
from pathlib import Path
from types import SimpleNamespace as Some

__version__ = "0.0"
SamplingParams = Some
num_drafts = num_steps = 0
now = 0.0
time.perf_counter = lambda: now  # times must not depend on the machine's load


class LLM:
    def __init__(self, **settings):
        self.config = settings.get("speculative_config")
        if self.config:
            block = json.loads(Path(self.config["model"], "config.json").read_text())["block_size"]
            assert len(self.config["synthetic_acceptance_rates"]) == self.config["num_speculative_tokens"] == block - 1
            assert self.config.get("enable_adaptive_verification", True) is True
        print("many words of its own")

    def generate(self, prompts, params, use_tqdm):
        global num_drafts, num_steps, now
        assert all(item.ignore_eos for item in params)
        if len(prompts) == 3:
            raise RuntimeError("three are too many")
        began, answers = now, []
        for place, item in enumerate(params):  # with a draft, the second request takes twice as many steps
            steps = item.max_tokens // 4 * (place + 1) if self.config else item.max_tokens
            num_drafts += steps
            stats = Some(
                arrival_time=time.time(), first_token_latency=0.5, first_token_ts=began,
                last_token_ts=began + 0.002 * steps,
            )
            answers.append(Some(outputs=[Some(token_ids=[0] * item.max_tokens)], metrics=stats))
        now = max(answer.metrics.last_token_ts for answer in answers)
        num_steps += round((now - began) / 0.002)
        return answers

    def get_metrics(self):
        drafts = num_drafts if self.config else 0
        return [
            Some(name="vllm:spec_decode_num_drafts", value=drafts),
            Some(name="vllm:spec_decode_num_accepted_tokens", value=3 * drafts),
            Some(name="vllm:iteration_tokens_total", count=num_steps),
            Some(name="a vector"),
        ]
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> str:
    """A folder with a package that imitates vLLM. A step takes 2 ms and, with a draft, accepts 3 draft tokens.

    Beside it is a torch without devices, which loads at once.
    """
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    return str(tmp_path / "site")


def test_vllm_is_measured_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_vllm: str
) -> None:
    arguments = ("--batches", "1,3,2", "--context", "8", "--steps", "16", "--block", "8")
    arms = "vllm-plain,vllm-dflash,vllm-adaptive"
    more = ("--arms", arms, "--acceptance", "4", "--prefill", "16", "--vllm-path", fake_vllm)
    monkeypatch.setattr(step_time, "Gauges", SteadyGauges)
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments, *more)
    assert code == 1, "one batch size fails"
    assert ["three are too many" in row["error"] for row in rows if row["kind"] == "failure"] == [True] * 3
    steps = [row for row in rows if row["kind"] == "step"]
    assert [(row["arm"], row["batch"]) for row in steps] == [
        ("vllm plain", 1), ("vllm plain", 2), ("vllm dflash", 1), ("vllm dflash", 2), ("vllm adaptive", 1),
        ("vllm adaptive", 2),
    ]  # fmt: skip
    assert [row["acceptance_achieved"] for row in steps] == [None, None, 4, 4, 4, 4]
    for row in steps:
        assert row["ms"] == pytest.approx(2)  # though the last steps have one request of two
        assert (row["vllm"], row["block"], row["power_samples"]) == ("0.0", 8, 3)
        assert row["joules_per_step"] == pytest.approx(1)
        assert row["joules_per_token"] == pytest.approx(500 / row["tokens_per_second"])
    assert [row["arm"] for row in rows if row["kind"] == "prefill"] == ["vllm plain"]


@pytest.mark.parametrize("name", ["small", "small-hybrid"])
def test_a_written_pair_is_the_one_that_our_engine_runs(tmp_path: Path, name: str) -> None:
    shape, device = replace(SHAPES[name], block=8), torch.device("cpu")
    pair_files.write_pair(shape, tmp_path, device)
    read, built = pair_files.read_pair(shape, tmp_path, 64, device), pairs.build_pair(shape, 64, device)
    given = {"eos_token_ids", "dtype", "rope", "layer_kinds"}
    for found, own in zip((read.pair.target, read.pair.draft), (built.pair.target, built.pair.draft), strict=True):
        assert found is not None
        assert own is not None
        shared = {name: getattr(own.config, name) for name in given if hasattr(own.config, name)}
        assert found.config.rope.theta == own.config.rope.theta
        assert replace(found.config, **shared) == own.config
    assert read.pair.limits.num_draft_tokens == built.pair.limits.num_draft_tokens == 7
    weights = ((read.target_weights(), built.target_weights()), (read.draft_weights, built.draft_weights))
    for stored, drawn in weights:
        assert stored.keys() == drawn.keys()
        assert all(torch.equal(stored[name], drawn[name]) for name in drawn)
    with pytest.raises(FileExistsError):
        pair_files.write_pair(replace(shape, layers=8), tmp_path, device)


class SteadyGauges(Gauges):
    """A GPU that always takes 500 W."""

    def over(self, spans: Sequence[Span]) -> Readings:
        assert all(begin < end for begin, end in spans)
        return Readings(500.0, 1700.0, len(spans))


def test_both_programs_answer_the_same_load_from_the_same_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_vllm: str
) -> None:
    monkeypatch.setattr(load, "Gauges", SteadyGauges)
    pair_files.write_pair(SHAPES["small"], tmp_path / "pair", torch.device("cpu"))
    monkeypatch.setattr(pairs, "drawn_weights", None)  # neither program may draw weights again
    monkeypatch.setattr(pair_files, "drawn_weights", None)
    arguments = ("--requests", "5", "--max-prompt", "70", "--max-answer", "40", "--pair", str(tmp_path / "pair"))
    arms = ("--arms", "dflash,vllm-dflash,vllm-adaptive", "--vllm-path", fake_vllm, "--acceptance", "4")
    code, rows = run(load, monkeypatch, tmp_path / "rows.jsonl", *arguments, *arms)
    assert code == 0
    assert [row["arm"] for row in rows] == ["dflash", "vllm-dflash", "vllm-adaptive"]
    for row in rows:
        assert row["files"] == str(tmp_path / "pair")
        assert row["num_tokens"] == sum(load.make_load(SHAPES["small"], 5, 70, 40).output_lengths)
        assert row["acceptance_achieved"] == pytest.approx(4, abs=1)
        assert row["power_samples"] == 1
        assert row["joules_per_token"] == pytest.approx(500 * row["seconds"] / row["num_tokens"])
        assert row["joules_per_step"] == pytest.approx(500 * row["seconds"] / row["num_steps"])
    assert [row.get("acceptance_note") for row in rows] == [None, *["synthetic, by its own mode"] * 2]
    assert rows[1]["first_token_p50_s"] >= 0.5


def test_vllm_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no libcudart')")
    arguments = ("--requests", "2", "--arms", "vllm-plain", "--vllm-path", str(tmp_path))
    code, rows = run(load, monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert code == 1
    assert rows[0]["error"] == "RuntimeError: vllm: ImportError: no libcudart"
    assert rows[0]["arm"] == "vllm-plain"
    assert rows[0]["error"] in capsys.readouterr().err


@pytest.mark.slow
def test_arms_of_other_engines_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (
        "--batches",
        "1",
        "--context",
        "24",
        "--steps",
        "5",
        "--arms",
        "transformers,reference,vllm-plain,vllm-dflash",
    )
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments, "--acceptance", "6.5")
    assert code == 0
    assert [row["batch"] for row in rows if row["kind"] == "step"] == [1, 8, 1]
    assert rows[-1]["acceptance_achieved"] == pytest.approx(6.5, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "gloo"])
def test_hand_offs_are_timed_between_two_processes(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert handoff.main(["--backend", backend, "--megabytes", "0,1", "--rounds", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["megabytes"] >= size for row, size in zip(rows, (0, 1), strict=True)] == [True, True]
    assert all(row["backend"] == backend and row["ms"] > 0 for row in rows)
