"""Plant faults in drafts, one at a time, and record the findings of each level of `dflash validate`.

    python examples/plant_faults.py --out faults.jsonl --markdown docs/measurements/planted-faults.md

Every finished case is a line of the JSON Lines file, so an interrupted run continues with the next case.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from planted_faults.cases import PAIRS, SOUND, Case, cases
from planted_faults.verdicts import render
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis.pair_validation import validate_running
from dflash_cli.diagnosis.run_settings import RunSettings, SearchBudget
from dflash_cli.rules.report import Report
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.engine_config import EngineConfig

NUM_PROMPTS, NUM_TOKENS = 12, 48


def plant(case: Case, source: Path, path: Path) -> None:
    """Write a copy of the draft with the change."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    case.change(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: item.contiguous() for name, item in tensors.items()}, path / "model.safetensors")


def examine(key: str, device: str) -> dict[str, Any]:
    """Plant one case and run every level on it -> a row."""
    torch.set_num_threads(1)
    pair, case = cases()[key]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        plant(case, fetch_directory(PAIRS[pair], Role.DRAFT), draft)
        levels = {
            "headers": validate_at(draft, "headers", device, has_target=False),
            "pair": validate_at(draft, "headers", device),
            "weights": validate_at(draft, "weights", device),
            "run": validate_at(draft, "run", device),
        }
    search = getattr(levels["run"], "search", None)
    return {
        "key": key,
        "pair": pair,
        "name": case.name,
        "is_fault": case.is_fault,
        "right": case.right,
        "beside": case.beside,
        "acceptance_len": search.acceptance_len if search is not None else None,
        "levels": {
            level: [[item.id, item.severity, item.message] for item in report.findings]
            for level, report in levels.items()
        },
        "seconds": time.monotonic() - begin,
    }


def validate_at(draft: Path, level: Any, device: str, *, has_target: bool = True) -> Report:
    request = ValidationPlan(
        draft=draft,
        target=fetch_directory(TINY, Role.TARGET) if has_target else None,
        target_reference=TINY if has_target else None,
        level="headers" if level == "headers" else "weights",
    )
    if level != "run":
        return validate_draft(request)
    budget = SearchBudget(num_prompts=NUM_PROMPTS, max_new_tokens=NUM_TOKENS)
    return validate_running(
        request, RunSettings(EngineConfig(device=device, max_num_requests=32), budget, lambda *_: None)
    )


def run_cases(given: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run the selected cases without a row, until the time is over."""
    begin = time.monotonic()
    done = {row["key"] for row in rows}
    wanted = [key for index, key in enumerate(cases()) if index % given.sample == 0 or key.endswith(f"/{SOUND}")]
    todo = [key for key in wanted if key not in done and given.only in key]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        pending = [pool.apply_async(examine, (key, given.device)) for key in todo]
        for count, (key, item) in enumerate(zip(todo, pending, strict=True), start=1):
            left = given.budget - (time.monotonic() - begin)
            try:
                row = item.get(timeout=None if left == float("inf") else max(left, 0.1))
            except multiprocessing.TimeoutError:
                sys.stderr.write(f"time is over at {key}; run the command again to continue\n")
                return
            sys.stderr.write(f"{count}/{len(todo)} {key} {row['seconds']:.1f} s\n")
            yield row


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of the cases, with the current right causes of each."""
    by_key = {row["key"]: row for row in rows}
    return [
        by_key[key] | {"right": case.right, "beside": case.beside}
        for key, (_, case) in cases().items()
        if key in by_key
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file for state and result")
    parser.add_argument("--markdown", type=Path, help="file for the page with all cases")
    parser.add_argument("--device", default="cpu", help="device of the pairs (default: cpu)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--only", default="", help="run only cases with this text in their key (pair/name)")
    parser.add_argument("--sample", type=int, default=1, help="run every Nth case (default: 1)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which the run ends")
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    with given.out.open("a") as state:
        for row in run_cases(given, rows):
            rows.append(row)
            state.write(json.dumps(row) + "\n")
            state.flush()
    text = render(in_order(rows), all_cases=len(cases()), num_prompts=NUM_PROMPTS, num_tokens=NUM_TOKENS)
    if given.markdown is not None:
        given.markdown.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
