"""An evaluation that is killed at any moment keeps every written answer, and resuming it gives the same result.

Runs are forks of one process that has imported all modules, so that kills hit the work and not the start.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_testing.command_line import IMPORT_PATHS

OPTIONS = ["--num-prompts", "8", "-n", "12", "--concurrency", "2", "--num-resamples", "0", "--json"]
HELPERS = [path for path in sys.path if Path(path, "dflash_testing").is_dir()]
FIGURES = ("num_drafts", "acceptance_len", "histogram", "definitions", "num_conversations", "num_failed", "categories")


def run_in_fork(arguments: list[str], output: Path) -> int:
    """Start the command line in a fork of this process, with its stdout in a file. Returns the process id."""
    from dflash_cli.main import main

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.argv = ["dflash", *arguments]
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def whole_lines(path: Path) -> bytes:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def kill_often(num_kills: int, seed: int, home: Path) -> None:
    """Kill and resume an evaluation until `num_kills` kills have hit it.

    Each run is checked after it ends: the kept answers, and the result if the run was not killed.
    """
    rows, found = home / "rows.jsonl", home / "found.json"
    arguments = ["eval-acceptance", *OPTIONS, "--output", str(rows), "--resume"]
    started = time.monotonic()
    assert os.waitpid(run_in_fork(arguments, found), 0)[1] == 0
    seconds = time.monotonic() - started
    expected, answers = json.loads(found.read_text()), sorted(whole_lines(rows).splitlines())
    rows.unlink()
    generator = random.Random(seed)
    hits = ends = 0
    while hits < num_kills or rows.exists() or not ends:
        before = whole_lines(rows)
        pid = run_in_fork(arguments, found)
        if hits < num_kills:
            time.sleep(generator.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        hits += os.WIFSIGNALED(status)
        after = whole_lines(rows)
        assert after.startswith(before), "an answer that was there is gone"
        assert {item.name for item in home.iterdir()} <= {"rows.jsonl", "found.json"} | partial(home)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            result = json.loads(found.read_text())
            assert {key: result[key] for key in FIGURES} == {key: expected[key] for key in FIGURES}
            assert sorted(after.splitlines()) == answers
            rows.unlink()
            ends += 1
    sys.stdout.write(json.dumps({"kills": hits, "ends": ends, "seconds": seconds}) + "\n")


def partial(home: Path) -> set[str]:
    """The names of hidden files beside the rows. A kill while the first line is written leaves one."""
    return {item.name for item in home.glob(".rows.jsonl.tmp-*")}


@pytest.mark.parametrize("num_kills", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_no_answer_is_lost_whenever_it_is_killed(num_kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(num_kills), "0", tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([IMPORT_PATHS["PYTHONPATH"], *HELPERS])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == num_kills
    assert counts["ends"] >= 1


if __name__ == "__main__":
    import torch

    import dflash_runtime.llm  # noqa: F401

    torch.set_num_threads(1)
    kill_often(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
