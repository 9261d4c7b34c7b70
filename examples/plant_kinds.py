"""Plant kinds of faults in drafts of three families, diagnose each draft, and record the cause that is named.

    python examples/plant_kinds.py --out kinds.jsonl --markdown docs/measurements/planted-kinds.md
    python examples/plant_kinds.py --out other.jsonl --faults FILE.py      # another set, with the same interface

A cell is a kind, a strength and a family. Every finished cell is a line of the JSON Lines file, so an interrupted run
continues with the next cell. A draft is diagnosed without an expected figure; if it lost more than a tenth of its
accepted tokens and no cause is named, also with the figure of the sound draft.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from planted_faults.kind_table import render
from planted_faults.kinds import FAMILIES, STRENGTHS, kinds
from planted_faults.shared import SharedRunner
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis import readings
from dflash_cli.diagnosis.likeliest_cause import diagnose_report
from dflash_cli.diagnosis.pair_validation import validate_running
from dflash_cli.diagnosis.run_level import RunSubject
from dflash_cli.diagnosis.run_report import RunReport
from dflash_cli.diagnosis.run_settings import ExpectedFigure, RunSettings, SearchBudget
from dflash_cli.rules.rule import rules_of
from dflash_cli.rules.subject import ValidationPlan, open_subject
from dflash_cli.rules.validator import apply_rules
from dflash_runtime.config import EngineConfig
from dflash_runtime.documents import copy_fields
from dflash_runtime.errors import DFlashError

PAIRS = Path(__file__).parent.parent / "tests" / "data" / "pairs"
BUDGET = SearchBudget(num_prompts=8, max_new_tokens=40, lead_len=24, num_resamples=1000)
SOUND = "as it is"
COSTS = 0.1


def directory(family: str, role: Role) -> Path:
    return fetch_directory(TINY, role) if family == "bundled" else PAIRS / family / role.value


def shorten() -> None:
    """A smaller search than a user's: fewer anchors, new prompts and rare ids."""
    readings.VERY_FEW_ANCHORS, readings.FEW_ANCHORS, readings.MANY_ANCHORS = 10, 32, 128
    readings.MIN_TEST_PROMPTS, readings.NUM_RARE_IDS, readings.MAX_ON_TOP = 20, 24, 12


def plant(fault: Any, family: str, strength: str, path: Path) -> None:
    """Write a copy of the family's draft with the fault."""
    source = directory(family, Role.DRAFT)
    path.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    tensors = {name: item.float() for name, item in stored.items()}
    fault.plant(config, tensors, strength)
    (path / "config.json").write_text(json.dumps(config))
    kept = {name: item.to(torch.bfloat16).contiguous().clone() for name, item in tensors.items()}
    save_file(kept, path / "model.safetensors")


def diagnose(draft: Path, family: str) -> tuple[RunReport, dict[str, Any]]:
    """The report without an expected figure, and the part of a row about it."""
    SharedRunner.sound = open_draft(directory(family, Role.DRAFT))
    target = directory(family, Role.TARGET)
    settings = RunSettings(
        EngineConfig(device="cpu", max_num_requests=32), BUDGET, lambda *_: None, make_runner=SharedRunner
    )
    plan = ValidationPlan(draft=draft, target=target, target_reference=str(target), level="weights")
    report = validate_running(plan, settings)
    return report, part_of(report)


def with_figure(report: RunReport, draft: Path, family: str, expected: float) -> dict[str, Any]:
    """The part of a row with the figure of the sound draft.

    A figure adds doubts and findings, but no reading: the search is the same.
    """
    assert report.search is not None
    search = replace(report.search, expected=ExpectedFigure(expected, "the sound draft"))
    plan = ValidationPlan(draft=draft, target=directory(family, Role.TARGET), level="weights")
    subject = copy_fields(RunSubject, open_subject(plan), search=search)
    kept = [item for item in report.findings if item.level != "run"]
    findings = [*kept, *apply_rules(rules_of("run"), subject)]
    return part_of(replace(report, findings=tuple(findings), search=search))


def part_of(report: RunReport) -> dict[str, Any]:
    cause = diagnose_report(report, draft="DRAFT", target="TARGET")
    better = report.search.improvement if report.search is not None else None
    return {
        "has_cause": cause.has_cause,
        "rule": cause.rule,
        "sentence": cause.sentence,
        "findings": [[item.id, item.severity, item.location, item.message] for item in report.findings],
        "improves": None if better is None else [better.reading, better.doubt],
    }


def examine(fault: Any, family: str, strength: str, sound: float | None) -> dict[str, Any] | None:
    """The row of a cell; None if the fault does not apply to the family."""
    begin = time.monotonic()
    row: dict[str, Any] = {"family": family, "name": fault.name, "strength": strength, "length": None, "loss": None}
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        try:
            plant(fault, family, strength, draft)
        except Exception as error:
            if type(error).__name__ != "NotApplicable":
                row["failed"] = repr(error)[:200]
                return row
            return None
        try:
            report, row["plain"] = diagnose(draft, family)
        except DFlashError as error:
            row["refused"] = str(error)[:300]
            return row
        if report.search is not None:
            row["length"] = report.search.acceptance_len
            if sound is not None:
                row["loss"] = 1 - (row["length"] - 1) / (sound - 1)
                if row["loss"] > COSTS and not row["plain"]["has_cause"]:
                    row["expected"] = with_figure(report, draft, family, sound)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def cells(faults: list[Any], every: bool) -> Iterator[tuple[Any, str, str]]:
    """Each kind in one strength and one family, in turn; then in the other strength and the next family."""
    for place in range(len(STRENGTHS)):
        for index, fault in enumerate(faults):
            families = [family for family in FAMILIES if family in fault.families]
            for family in families if every else [families[(index + place) % len(families)]]:
                yield fault, family, STRENGTHS[(index + place) % len(STRENGTHS)]


def load_faults(path: Path | None) -> list[Any]:
    if path is None:
        return list(kinds())
    spec = importlib.util.spec_from_file_location("other_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["other_faults"] = module
    spec.loader.exec_module(module)
    return list(module.FAULTS)


def key_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["family"], row["name"], row["strength"]


def sound_length(family: str, rows: list[dict[str, Any]], out: Path) -> float:
    """The acceptance length of the family's draft without a fault; its row is written first."""
    for row in rows:
        if key_of(row) == (family, SOUND, ""):
            return float(row["length"])

    class Nothing:
        name = SOUND
        plant = staticmethod(lambda *_: None)

    first = examine(Nothing, family, "", None)
    assert first is not None
    rows.append(first)
    with out.open("a") as state:
        state.write(json.dumps(first) + "\n")
    return float(first["length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file for state and result")
    parser.add_argument("--faults", type=Path, help="a file with FAULTS instead of the kinds")
    parser.add_argument("--families", default=",".join(FAMILIES), help="run only cells of these families")
    parser.add_argument("--only", default="", help="run only kinds with names that match this regular expression")
    parser.add_argument("--every", action="store_true", help="every family for each kind, not one family in turn")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which the run ends")
    parser.add_argument("--markdown", type=Path, help="file for the page with all cells")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shorten()
    begin = time.monotonic()
    faults = load_faults(given.faults)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {key_of(row) for row in rows}
    for fault, family, strength in cells(faults, given.every):
        skipped = family not in given.families.split(",") or not re.search(given.only, fault.name)
        if skipped or (family, fault.name, strength) in done or time.monotonic() - begin > given.budget:
            continue
        row = examine(fault, family, strength, sound_length(family, rows, given.out))
        if row is None:
            row = {"family": family, "name": fault.name, "strength": strength, "not_applicable": True}
        rows.append(row)
        with given.out.open("a") as state:
            state.write(json.dumps(row) + "\n")
    if given.markdown is not None:
        given.markdown.write_text(render(rows, faults))


if __name__ == "__main__":
    main()
