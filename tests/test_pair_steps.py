"""`examples/benchmarks/pair_steps.py` on the CPU with small targets, from its list to its record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pair_steps
from dflash_testing.published_pairs import TABLE, PublishedPair, read_table
from dflash_testing.target_sizes import TargetSizes
from timing.real_pairs import make_target

SIZES = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4}
DRAFT = {"layers": 1, "taps": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 96}
OF = "Qwen/Qwen3-8B"
FIRST, SHORT, ANCHOR, BAD = (
    "RedHatAI/Qwen3-8B-speculator.dflash", "z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dflash_qwen3_8b_block7",
    "deepseek-ai/dflash_qwen3_4b_block7",
)  # fmt: skip
LARGE, REFUSED = "z-lab/Qwen3.5-397B-A17B-DFlash", "RedHatAI/Qwen3-8B-speculator.dflash2"


def small(pair: PublishedPair) -> PublishedPair:
    """The pair with a small draft. A block of the bad one has fewer rows than the forced acceptance."""
    if pair.draft == REFUSED:
        return pair
    reduced = {"draft_vocab": 256} if pair.draft == FIRST else {}
    return replace(pair, shape={**DRAFT, **reduced, "block": 2 if pair.draft == BAD else pair.shape["block"]})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the table with six pairs, and small sizes. Four of the pairs can be measured."""
    wanted = (FIRST, SHORT, ANCHOR, BAD, LARGE, REFUSED)
    pairs = [small(pair) for pair in read_table() if pair.draft in wanted]
    sizes = TargetSizes(of=[OF], billions=1, sizes=SIZES, source="this test")
    rows = {OF: sizes, "Qwen/Qwen3-4B": sizes, "Qwen/Qwen3.5-397B-A17B": TargetSizes(of=[], billions=397)}
    path = tmp_path / "pairs.jsonl"
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["draft"] in wanted), encoding="utf-8")
    for name, value in {
        "TABLE": path, "LOG": tmp_path / "pair-steps.md", "STEPS": 5, "read_table": lambda: pairs,
        "read_sizes": lambda: rows,
    }.items():  # fmt: skip
        monkeypatch.setattr(pair_steps, name, value)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["pair_steps.py", *arguments])
    return pair_steps.main()


def test_what_would_be_measured_is_listed(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--list") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert all(lines[name].split()[1] == "native" for name in (FIRST, SHORT, ANCHOR, BAD))
    assert lines[LARGE].endswith("does not fit one H200: 794 GB")
    assert "layer 43" in lines[REFUSED]


def test_steps_are_timed_and_recorded(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts of one target share its weights, and a shape that fails does not stop the others."""
    made: list[str] = []

    def counted(pair: Any, placement: Any) -> Any:
        made.append(pair.of)
        return make_target(pair, placement)

    monkeypatch.setattr(pair_steps, "make_target", counted)
    out = tmp_path / "steps.jsonl"
    assert run(monkeypatch, "--device", "cpu", "--batches", "1", "--context", "8", "--out", str(out)) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    times = [row for row in rows if row["kind"] == "step"]
    assert [(row["pairs"], row["draft_kind"]) for row in times] == [
        ([SHORT], "DFlash"), ([FIRST], "DFlash"), ([ANCHOR], "DSpark"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["acceptance_achieved"] > 1.5 for row in times)
    assert [row["what"] for row in rows if row["kind"] == "failure"] == [f"{BAD}, batch 1"]
    assert made == [OF]
    assert f"{BAD}, batch 1 failed: ValueError" in capsys.readouterr().err

    before = {row["draft"]: row for row in map(json.loads, table.read_text().splitlines())}
    assert run(monkeypatch, "--record", str(out)) == 0
    after = {row["draft"]: row for row in map(json.loads, table.read_text().splitlines())}
    steps = after[ANCHOR]["steps"]
    assert steps["ms"] == {"1": float(f"{times[-1]['ms']:.3g}")}
    assert steps["lines"][0] in pair_steps.LOG.read_text().splitlines()
    assert before[BAD] == after[BAD]
    assert before.keys() == after.keys()


def test_the_log_has_every_recorded_line() -> None:
    pairs = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    assert pair_steps.LOG.read_text(encoding="utf-8") == pair_steps.log_text(pairs)


def test_every_shape_is_in_one_part() -> None:
    """Shapes of one target stay together, and no part has many more shapes than another."""
    shapes = [
        pair_steps.SameShape(_Pair(target), (f"{target}{index}",))  # type: ignore[arg-type]
        for target, number in {"a": 3, "b": 1, "c": 2, "d": 1, "e": 1}.items()
        for index in range(number)
    ]
    parts = [pair_steps.part_of(shapes, index, 2) for index in (1, 2)]
    assert sorted(shape.names for part in parts for shape in part) == sorted(shape.names for shape in shapes)
    assert [len(part) for part in parts] == [4, 4]
    assert not {shape.pair.target_shape for shape in parts[0]} & {shape.pair.target_shape for shape in parts[1]}


class _Pair:
    def __init__(self, target_shape: str) -> None:
        self.target_shape = target_shape
