"""Plant kinds of faults in drafts of three families, diagnose each draft, and record the cause that is named.

    python examples/plant_kinds.py --out kinds.jsonl --markdown docs/measurements/planted-kinds.md
    python examples/plant_kinds.py --out other.jsonl --faults FILE.py --jobs 15 --markdown other.md    # another set

A cell is a kind, a strength and a family. Every finished cell is a line of the JSON Lines file, so an interrupted run
continues with the next cell. Each kind comes once in one family before any comes again. A draft is diagnosed without
an expected figure; if it lost more than a tenth of its accepted tokens, also with the figure of the sound draft.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from planted_faults.kind_table import render
from planted_faults.kinds import FAMILIES, STRENGTHS
from planted_faults.shared import SharedRunner
from planted_faults.walking_kinds import WALKING, every_kind
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis import readings
from dflash_cli.diagnosis.likeliest_cause import diagnose_report
from dflash_cli.diagnosis.pair_validation import validate_running
from dflash_cli.diagnosis.reading_doubts import falls_short
from dflash_cli.diagnosis.run_level import RunSubject
from dflash_cli.diagnosis.run_report import RunReport
from dflash_cli.diagnosis.run_settings import ExpectedFigure, RunSettings, SearchBudget
from dflash_cli.rules.rule import rules_of
from dflash_cli.rules.subject import ValidationPlan, open_subject
from dflash_cli.rules.validator import apply_rules
from dflash_runtime.documents import copy_fields
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import DFlashError

PAIRS = Path(__file__).parent.parent / "tests" / "data" / "pairs"
Cell = tuple[str, str, str]
"""Family, kind and strength."""

BUNDLED = (*WALKING, "reduced")
"""Families with a bundled draft of their own for the bundled target."""

BUDGET = SearchBudget(num_prompts=8, max_new_tokens=40, lead_len=24)
SOUND = "as it is"
COSTS = 0.1


def directory(family: str, role: Role) -> Path:
    if family in BUNDLED:
        return fetch_directory(f"{TINY}:{family}" if role is Role.DRAFT else TINY, role)
    return fetch_directory(TINY, role) if family == "bundled" else PAIRS / family / role.value


def own_prompts(family: str) -> list[list[int]]:
    """The prompts of the hybrid pair, which ask for values that they state; empty for other pairs."""
    if family != "hybrid":
        return []
    lines = (PAIRS / family / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_token_ids"] for line in lines]


def shorten() -> None:
    """A smaller search than a user's: fewer anchors, new prompts and rare ids."""
    readings.VERY_FEW_ANCHORS, readings.FEW_ANCHORS, readings.MANY_ANCHORS = 12, 32, 128
    readings.MIN_TEST_PROMPTS, readings.NUM_RARE_IDS, readings.MAX_ON_TOP = 32, 24, 12


def plant(fault: Any, family: str, strength: str, path: Path) -> None:
    """Write a copy of the family's draft with the fault."""
    source = directory(family, Role.DRAFT)
    path.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    tensors = {name: item.float() if item.is_floating_point() else item for name, item in stored.items()}
    fault.plant(config, tensors, strength)
    (path / "config.json").write_text(json.dumps(config))
    kept = {name: _narrow(item).contiguous().clone() for name, item in tensors.items()}
    save_file(kept, path / "model.safetensors")


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of a published draft; integers stay."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def diagnose(draft: Path, family: str) -> tuple[RunReport, dict[str, Any]]:
    """The report without an expected figure, and the part of a row about it."""
    SharedRunner.sound, SharedRunner.given = open_draft(directory(family, Role.DRAFT)), own_prompts(family)
    target = directory(family, Role.TARGET)
    settings = RunSettings(
        EngineConfig(device="cpu", max_num_requests=32), BUDGET, lambda *_: None, make_runner=SharedRunner
    )
    plan = ValidationPlan(draft=draft, target=target, target_reference=str(target), level="weights")
    report = validate_running(plan, settings)
    return report, part_of(report)


def with_figure(report: RunReport, draft: Path, family: str, expected: float) -> dict[str, Any]:
    """The part of a row with the figure of the sound draft.

    A figure adds a doubt and findings, but no reading: the search is the same.
    """
    assert report.search is not None
    figure = ExpectedFigure(expected, "the sound draft")
    tried = [replace(item, doubt=item.doubt or falls_short(item, figure)) for item in report.search.readings]
    search = replace(report.search, expected=figure, readings=tuple(tried))
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
                if row["loss"] > COSTS:
                    row["expected"] = with_figure(report, draft, family, sound)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def cells(faults: list[Any], every: bool, families: Collection[str]) -> Iterator[tuple[Any, str, str]]:
    """Each kind in one strength and one family, in turn; then in the other strength and the next family."""
    for place in range(len(STRENGTHS)):
        for index, fault in enumerate(faults):
            able = [family for family in families if family in fault.families]
            for family in able if every or not able else [able[(index + place) % len(able)]]:
                yield fault, family, STRENGTHS[(index + place) % len(STRENGTHS)]


def load_faults(path: Path | None) -> list[Any]:
    if path is None:
        return list(every_kind())
    spec = importlib.util.spec_from_file_location("other_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["other_faults"] = module
    spec.loader.exec_module(module)
    return list(module.FAULTS)


def key_of(row: dict[str, Any]) -> Cell:
    return row["family"], row["name"], row["strength"]


def sound_row(family: str) -> dict[str, Any]:
    """The row of the family's draft without a fault."""

    class Nothing:
        name = SOUND
        plant = staticmethod(lambda *_: None)

    row = examine(Nothing, family, "", None)
    assert row is not None
    return row


def prepare(faults: Path | None, lengths: dict[str, float], factors: str | None) -> None:
    """Load the faults and use one thread, once per process."""
    global BUDGET
    torch.set_num_threads(1)
    shorten()
    BUDGET = replace(BUDGET, factors=None if factors is None else frozenset(factors.split(",")))
    _process.update(faults={fault.name: fault for fault in load_faults(faults)}, lengths=lengths)


_process: dict[str, Any] = {}


class TooLong(BaseException):
    """A cell exceeded its time limit. No handler of exceptions catches it."""


def run_cell(cell: Cell, limit_s: int) -> dict[str, Any]:
    """The row of a cell, in a prepared process. A cell that exceeds the limit has `too_long` instead of a diagnosis."""
    family, name, strength = cell
    key = {"family": family, "name": name, "strength": strength}

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        if name == SOUND:
            return sound_row(family)
        row = examine(_process["faults"][name], family, strength, _process["lengths"].get(family))
        return row or {**key, "not_applicable": True}
    except TooLong:
        return {**key, "too_long": limit_s, "length": None, "loss": None}
    except Exception as error:
        return {**key, "failed": repr(error)[:200], "length": None, "loss": None}
    finally:
        signal.alarm(0)


def run_cells(cells: list[Cell], given: argparse.Namespace, lengths: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Rows of cells as they finish. Each of `--jobs` processes keeps the families that it has loaded."""
    begin = time.monotonic()
    if given.jobs == 1:
        prepare(given.faults, lengths, given.factors)
        for cell in cells:
            if time.monotonic() - begin > given.budget:
                return
            yield run_cell(cell, given.limit)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context, prepare, (given.faults, lengths, given.factors)) as pool:
        waiting, running = list(reversed(cells)), set[Future[dict[str, Any]]]()
        while waiting or running:
            # Only cells that can start at once are handed over, so that the budget ends the run.
            while waiting and len(running) < given.jobs and time.monotonic() - begin <= given.budget:
                running.add(pool.submit(run_cell, waiting.pop(), given.limit))
            if not running:
                return
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()


def main() -> None:
    given = read_arguments()
    faults = load_faults(given.faults)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {key_of(row) for row in rows}
    families = given.families.split(",")

    def run(wanted: list[Cell]) -> None:
        lengths = {row["family"]: row["length"] for row in rows if row["name"] == SOUND}
        for row in run_cells([cell for cell in wanted if cell not in done], given, lengths):
            rows.append(row)
            done.add(key_of(row))
            with given.out.open("a") as state:
                state.write(json.dumps(row) + "\n")
            print(f"{len(rows)} {' / '.join(key_of(row))}: {row.get('seconds', 0)} s", file=sys.stderr, flush=True)

    run([(family, SOUND, "") for family in families])
    run([
        (family, fault.name, strength)
        for fault, family, strength in cells(faults, given.every, families)
        if re.search(given.only, fault.name)
    ])  # fmt: skip
    judged = json.loads(given.judged.read_text()) if given.judged is not None else None
    page = render(rows, faults, judged, given.factors)
    if given.markdown is not None:
        given.markdown.write_text(page)
    print(page.partition("## Every cell")[0])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file for state and result")
    parser.add_argument("--faults", type=Path, help="a file with FAULTS instead of the kinds")
    parser.add_argument(
        "--families", default=",".join(FAMILIES), help="run only cells of these families; others: " + ", ".join(BUNDLED)
    )
    parser.add_argument("--only", default="", help="run only kinds with names that match this regular expression")
    parser.add_argument("--factors", help="try only readings of these factors, separated by commas")
    parser.add_argument("--every", action="store_true", help="every family for each kind, not one family in turn")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread and about 1.5 GB")
    parser.add_argument("--limit", type=int, default=400, help="seconds after which a cell is recorded as too long")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell starts")
    parser.add_argument("--markdown", type=Path, help="file for the page with all cells")
    parser.add_argument(
        "--judged", type=Path, help='JSON object with judgements by hand: {"family/name/strength": "right"}'
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
