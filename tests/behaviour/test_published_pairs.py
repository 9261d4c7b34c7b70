"""Every published pair, from config and headers: `validate` reports every true finding, and no false one.

Pairs are rows of tests/data/pairs.jsonl. `dflash_testing.published_pairs` describes the keys of a row.
"""

import json
import re
from math import prod
from pathlib import Path

import pytest

from dflash_cli import validate
from dflash_cli.checkpoints.description import describe
from dflash_cli.terminal import documentation
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.target import target_families
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_testing.command_line import invoke
from dflash_testing.pair_ways import write_target
from dflash_testing.paths import ROOT
from dflash_testing.published_pairs import ENGINES, PublishedPair, read_table
from dflash_testing.target_sizes import GPU_GB, in_full, read_sizes

PAIRS = read_table()
MOST_USED = (
    "z-lab/Qwen3-8B-DFlash-b16", "z-lab/Qwen3-Coder-30B-A3B-DFlash", "z-lab/Qwen3.6-27B-DFlash",
    "z-lab/Qwen3.6-35B-A3B-DFlash", "z-lab/gpt-oss-20b-DFlash",
)  # fmt: skip
BECAUSE_OF_TRAINING = {"C11", "C19", "C39", "S03", "S23", "S33"}
"""Warnings that ask for a missing setting, or tell how to start an engine."""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.draft} {pair.revision}".strip())
def test_a_pair(pair: PublishedPair, tmp_path: Path) -> None:
    draft, target = pair.write(tmp_path)
    if pair.is_read:
        assert describe(draft).kind == "draft"
    else:
        with pytest.raises(UnsupportedError) as refused:
            describe(draft)
        assert pair.not_converted in refused.value.message
        if "C01" in pair.errors:
            assert [name for name in ENGINES if f"{name} " in str(refused.value.hint)] == sorted(
                pair.served, reverse=True
            )
    check_findings(pair, draft, target)
    check_serving(pair, draft, target)
    check_conversion(pair, draft, target)


def check_findings(pair: PublishedPair, draft: Path, target: Path) -> None:
    """Require exactly the errors and warnings of the row."""
    report = validate(draft=str(draft), target=str(target), engine=tuple(ENGINES), num_speculative_tokens=pair.asked)
    found = {kind: {item.id for item in report.findings if item.severity == kind} for kind in ("error", "warning")}
    assert found["error"] == pair.errors.keys(), report.findings
    assert found["warning"] - {"P17"} == set(pair.warnings), report.findings
    assert report.fails() == bool(pair.errors)
    assert [verdict.name for verdict in report.verdicts if verdict.outcome != "stops"] == pair.served


def check_serving(pair: PublishedPair, draft: Path, target: Path) -> None:
    """Require a command for each engine that serves the pair, and a reason for the others."""
    asked = [] if pair.asked is None else ["-k", pair.asked]
    outcome = invoke("serve-command", draft, "--target", target, "--engine", ",".join(ENGINES), "--json", *asked)
    commands = json.loads(outcome.out)["serve_commands"] if outcome.out else []
    assert [item["engine"].split()[0] for item in commands] == pair.served, outcome.err
    assert (outcome.code == 0) == (pair.served == list(ENGINES))
    assert outcome.code == 0 or any(name in outcome.err for name in pair.errors)


def check_conversion(pair: PublishedPair, draft: Path, target: Path) -> None:
    """Convert to another dialect, or require the row's refusal. The native dialect cannot hold a reduced head."""
    to = "native" if pair.kind else "speculators" if pair.dialect == "native" else "vllm"
    command = ("convert", draft, draft.parent / "out", "--to", to, "--target", target, "--target-name", pair.of)
    outcome = invoke(*command, "--dry-run")
    refused = 3 if "P06" in pair.errors else 5
    assert outcome.code == (refused if pair.not_converted else 0), outcome.err
    assert pair.not_converted in outcome.err
    if pair.has_unknown_layout:
        assert invoke(*command, "--dry-run", "--layout", "anchor-first").code == 0


def test_the_most_used_pairs_are_clean() -> None:
    rows = [pair for pair in PAIRS if pair.draft in MOST_USED and not pair.revision]
    assert len(rows) == len(MOST_USED)
    for pair in rows:
        assert pair.errors == {}
        assert set(pair.warnings) <= BECAUSE_OF_TRAINING
        assert pair.served == list(ENGINES)


def test_measured_steps_are_in_their_logs() -> None:
    measured = [pair for pair in PAIRS if pair.steps]
    assert len(measured) >= 8
    for pair in measured:
        log = (ROOT / "docs" / "measurements" / pair.steps["log"]).read_text(encoding="utf-8")
        lines = "\n".join(pair.steps["lines"])
        assert all(line in log for line in pair.steps["lines"]), pair.draft
        numbers = set(re.findall(r"[\d.]+", lines))
        assert all(f"{time:.3g}" in numbers or f"{time:.2f}" in numbers for time in pair.steps["ms"].values())


def test_the_page_has_every_pair_once() -> None:
    page = documentation.text("targets").partition("## Published pairs")[2]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "/" in line.split(" | ")[0]]
    assert [row[0].removeprefix("| ") for row in rows] == [pair.name for pair in PAIRS]


def test_every_pair_has_a_step_time_or_a_reason() -> None:
    """A pair that runs and fits one GPU has a time, or sizes with which `pair_steps.py` measures it."""
    page, sizes = documentation.text("targets").partition("## Published pairs")[2], read_sizes()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    for pair, (*_, way, step) in zip(PAIRS, rows, strict=True):
        assert bool(pair.steps) == ("measurements/" in step)
        assert ("refused" in way) == (step == "does not run here")
        if not pair.steps and "refused" not in way:
            assert step == (sizes[pair.of].why_not or "not measured yet")


def test_targets_without_sizes_are_larger_than_one_gpu() -> None:
    rows = read_sizes()
    assert rows.keys() <= {pair.of for pair in PAIRS}
    for name, row in rows.items():
        is_large = row.gigabytes > GPU_GB
        assert is_large or row.sizes or row.unknown, name
        assert bool(row.sizes) == bool(row.source), name


def test_sizes_of_native_targets_give_the_published_number_of_weights(tmp_path: Path) -> None:
    """Within 1%. A wrong width, number of layers or number of experts differs by more."""
    rows, targets = read_sizes(), {pair.of: pair for pair in PAIRS}
    counted = 0
    for name, row in rows.items():
        if not row.sizes:
            continue
        source = write_target(tmp_path / name, in_full(targets[name], row).target_config())
        runtime, config = find_target_runtime(source, "auto")
        if runtime != "native":
            continue
        shapes = target_families()[config.model_type].expected_shapes(config)
        # A byte of _blocks has two weights, and the scales are not weights.
        each = {"_blocks": 2, "_scales": 0}
        weights = sum(prod(size) * each.get(tensor[-7:], 1) for tensor, size in shapes.items())
        assert weights / 1e9 == pytest.approx(row.billions, rel=0.01), name
        counted += 1
    assert counted >= 15


def test_every_error_has_a_reason() -> None:
    assert all(reason for pair in PAIRS for reason in pair.errors.values())
