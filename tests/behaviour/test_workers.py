"""Two Ray workers run the bundled pair, one of them is killed, and the result equals the result of one process.

These tests need processes of their own. `tests/cli/workers` has the other tests of workers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_testing.command_line import IMPORT_PATHS
from dflash_testing.processes import are_gone

OPTIONS = ["eval-acceptance", "tiny", "-n", "32", "--num-prompts", "40", "--num-resamples", "200", "--json"]
LIMIT_S = 240.0


def start(*options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_cli", *OPTIONS, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **IMPORT_PATHS},
        text=True,
    )


def descendants(process: int) -> dict[int, str]:
    """Return the id and command line of every process below this process."""
    found: dict[int, tuple[int, str]] = {}
    for line in subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()[1:]:
        pid, parent, *words = line.split()
        found[int(pid)] = int(parent), " ".join(words)
    below = {process}
    while more := {pid for pid, (parent, _) in found.items() if parent in below} - below:
        below |= more
    return {pid: found[pid][1] for pid in below - {process}}


def num_answers(rows: Path) -> int:
    return rows.read_bytes().count(b"\n") - 1 if rows.exists() else 0


def wait_for_answers(rows: Path, run: "subprocess.Popen[str]", count: int = 5) -> dict[int, str]:
    until = time.monotonic() + LIMIT_S
    while num_answers(rows) < count and run.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return descendants(run.pid)


def answers(rows: Path) -> dict[tuple[int, int], dict[str, Any]]:
    records = map(json.loads, rows.read_text().splitlines()[1:])
    return {(record["index"], record["turn"]): record for record in records}


def figures(out: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(out)
    return {**document, "measured": None, "seconds": None}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "3"]], ids=["greedy", "sampled"])
def test_a_worker_that_is_killed_changes_nothing(sampling: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    expected, _ = start("--output", str(alone), *sampling).communicate(timeout=LIMIT_S)
    run = start("--output", str(together), "--workers", "2", *sampling)
    started = wait_for_answers(together, run)
    worker = next(pid for pid, command in started.items() if "PromptWorker" in command)
    os.kill(worker, signal.SIGKILL)
    out, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, err
    assert figures(out) == figures(expected)
    assert answers(together) == answers(alone)
    assert json.loads(out)["measured"]["workers"]["num_lost"] == 1
    assert "its process has ended" in err
    assert are_gone(started)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_process_and_is_gone_on_with(number: int, code: int, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    rows = tmp_path / "rows.jsonl"
    run = start("--output", str(rows), "--workers", "2")
    started = wait_for_answers(rows, run)
    run.send_signal(number)
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == code
    assert "give the same command with --resume" in err
    assert are_gone(started)
    num_kept = num_answers(rows)
    resumed, _ = start("--output", str(rows), "--resume").communicate(timeout=LIMIT_S)
    expected, _ = start().communicate(timeout=LIMIT_S)
    assert 5 <= num_kept < 40
    assert figures(resumed) == figures(expected)
