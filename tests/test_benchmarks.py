"""Benchmarks of parts of the runtime run on the CPU with small shapes, and write the promised rows and tables."""

import json
import sys
from pathlib import Path

import pytest
import torch

import attention
import convert
import experts
import handoff
import handoff_steps
import host_time
import hosted
import own_cache
import products
import short_prompts
import snapshot_policies
import tensor_parallel
import tune_times
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.tuning.candidates import candidates_for
from dflash_cli.tuning.step_costs import read_step_costs
from dflash_kernels.attention.attention_config import AttentionShape, BalancedShape
from dflash_kernels.suite import triton_kernels
from dflash_testing.benchmarks import SMALL, run
from timing.floors import Rates
from timing.shapes import BLOCK, SHAPES


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


@pytest.mark.slow
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


@pytest.mark.triton
def test_a_sweep_runs_other_tilings_of_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The heads of full layers, in parts and in equal shares."""
    monkeypatch.setattr(attention, "CAPACITY", 64)
    monkeypatch.setattr(attention, "pick_kernels", lambda *_: triton_kernels())
    wanted = [AttentionShape(16, 16, 2, 1), BalancedShape(16, 16, 2, 1, num_whole=2)]
    every = list(attention.tilings(attention.Case.parse("3x4@30"), SHAPES["small-gemma"], torch.device("cpu")))
    assert {type(item) for item in every} == {AttentionShape, BalancedShape}
    monkeypatch.setattr(attention, "tilings", lambda *_: wanted)
    out = tmp_path / "attention.jsonl"
    given = ["--shape", "small-gemma", "--device", "cpu", "--cases", "3x4@30", "--full", "--sweep", "--out", str(out)]
    assert attention.main(given) == 0
    first, *tried = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["kind"] == "attention"
    assert [row["tiling"] for row in tried] == [str(item) for item in wanted]
    assert all(row["error"] < 1e-5 for row in tried)


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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "gloo"])
def test_hand_offs_are_timed_between_two_processes(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert handoff.main(["--backend", backend, "--megabytes", "0,1", "--rounds", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["megabytes"] >= size for row, size in zip(rows, (0, 1), strict=True)] == [True, True]
    assert all(row["backend"] == backend and row["ms"] > 0 for row in rows)
