"""Signals, readers that end, closed streams and full disks, with the real entry point."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import pytest

from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import ReaderGone
from dflash_cli.terminal.tables import print_table
from dflash_testing.command_line import IMPORT_PATHS, Outcome, run_main
from dflash_testing.forking import Fork
from dflash_testing.paths import ROOT

DFLASH = [sys.executable, "-c", "from dflash_cli.main import main; main()"]
ENV = {**os.environ, **IMPORT_PATHS, "NO_COLOR": "1"}
FULL = Path("/dev/full")
SCRIPT = Path(sys.executable).with_name("dflash")
ENDLESS = ["generate", "x", "-n", "2000", "--ignore-eos", "--threads", "1"]


def started(command: Sequence[str | Path], env: Mapping[str, str] = ENV) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def shell(line: str) -> Outcome:
    """A line for bash in which `dflash` is the command, under `pipefail`."""
    function = f'dflash() {{ "{sys.executable}" -c "from dflash_cli.main import main; main()" "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", function + line], capture_output=True, text=True, env=ENV, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("number", "word"),
    [pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.slow), (signal.SIGTERM, "terminated")],
)
def test_an_interrupted_evaluation_says_how_to_continue(number: signal.Signals, word: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["eval-acceptance", "--output", rows, "--concurrency", "1", "-n", "64", "--num-resamples", "0"]
    done = Fork(*options, "--threads", 1).end(when=lambda: num_lines(rows) >= 3, number=number)
    assert done.code == 128 + number
    kept = num_lines(rows) - 1
    said, hint = done.err.splitlines()[-2:]
    assert said.startswith(f"error: {word}: {kept} of 64 ")
    assert re.search(r"acceptance length \d", said)
    assert {str(rows), "--resume"} <= set(hint.replace(";", " ").split())
    assert done.out == ""


def test_text_that_is_interrupted_ends_its_line() -> None:
    process = Fork(*ENDLESS)
    first = process.stdout.read(1)
    done = process.end(when=lambda: True)
    assert done.code == 130
    assert (first + done.out).endswith("\n")
    assert done.err.splitlines()[-1].startswith("error: interrupted: 0 of 1 ")


@pytest.mark.slow
def test_an_interruption_while_loading_is_said() -> None:
    with started([*DFLASH, "generate", "x"]) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert first.startswith("loading ")
    assert (process.returncode, out) == (130, "")
    assert err.splitlines() == ["error: interrupted"]


@pytest.mark.parametrize("entry", ["from dflash_cli.__main__ import main; main()", None], ids=["script", "-m"])
def test_an_interruption_while_modules_are_imported_ends_without_a_traceback(entry: str | None, tmp_path: Path) -> None:
    """A Typer with a slow import replaces a slow disk."""
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(30)\n")
    path = os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])
    arguments = ["-c", entry] if entry is not None else ["-m", "dflash_cli"]
    with started([sys.executable, *arguments, "--version"], {**ENV, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-signal.SIGINT, "")


def test_the_installed_commands_are_quiet_from_the_first_import_on() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts.values()) == {"dflash_cli.__main__:main"}


def test_an_ignored_interruption_stays_ignored() -> None:
    """A job in the background of a shell has SIGINT ignored."""
    done = shell("trap '' INT; dflash inspect tiny & p=$!; sleep 0.4; kill -INT $p; wait $p")
    assert done.code == 0


@pytest.mark.parametrize(
    "line", ["dflash explain | head -1", "dflash --help | head -c 1", "dflash explain --json | head -c 1"]
)
def test_a_reader_that_ends_early_is_not_an_error(line: str) -> None:
    done = shell(line)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("streams", ["2>&1", "2>/dev/null"])
def test_a_verdict_survives_a_reader_that_has_gone(streams: str, tmp_path: Path) -> None:
    """`true` reads nothing. Two files of totals cannot be judged, which still gives the exit code."""
    totals = {"model_id": "m", "request_throughput": 1, "spec_decode_acceptance_length": 3.0,
              "spec_decode_num_drafts": 10, "spec_decode_accepted_tokens": 20,
              "spec_decode_per_position_acceptance_rates": [1, 0.7, 0.3]}  # fmt: skip
    path = tmp_path / "totals.json"
    path.write_text(json.dumps(totals))
    assert shell(f"dflash compare {path} {path} --gate no-regression {streams} | true").code == 3


class Gone(StringIO):
    """A stream whose reader has gone."""

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_every_writer_survives_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    console.configure()
    console.stop_without_reader()
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    print_table(("a",), [("1",)], title="title")
    console.show({}, lambda: console.result("text"))
    console.warn("text")
    with pytest.raises(ReaderGone):
        console.stop_without_reader()
    console.configure()
    console.stop_without_reader()


def test_a_text_with_a_reader_that_ends_early_is_not_an_error() -> None:
    process = Fork(*ENDLESS)
    assert process.stdout.read(1)
    process.stdout.close()
    done = process.wait()
    assert done.code == 0
    assert [text for text in done.err.splitlines() if not text.startswith("loading ")] == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("dflash inspect tiny >&-", 0),
        ("dflash inspect tiny <&- >&- 2>&-", 0),
        ("dflash inspect absent 2>&-", 4),
        ("dflash generate - <&-", 2),
        ("dflash generate -p - <&-", 2),
    ],
)
def test_closed_streams_are_empty_ones(line: str, code: int) -> None:
    done = shell(line)
    assert done.code == code
    assert "Traceback" not in done.err


def test_an_opened_file_never_becomes_stdout(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["eval-acceptance", "--num-prompts", 2, "-n", 8, "--threads", 1, "--output", rows]
    done = Fork(*options, is_stdout_closed=True).wait()
    assert done.code == 0
    assert all(isinstance(json.loads(line), dict) for line in rows.read_text().splitlines())
    assert num_lines(rows) == 3


needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize(
    "line",
    ["dflash inspect tiny > /dev/full", pytest.param("dflash generate x -n 4 > /dev/full", marks=pytest.mark.slow)],
)
def test_a_full_stdout_is_named(line: str) -> None:
    done = shell(line)
    assert done.code == 6
    assert any(text.startswith("error: stdout: ") for text in done.err.splitlines())


@needs_full
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "-n", "4", "--output"],
        ["eval-acceptance", "--num-prompts", "1", "-n", "4", "--output"],
    ],
    ids=" ".join,
)
def test_a_full_disk_is_named(arguments: list[str]) -> None:
    done = run_main(*arguments, FULL)
    assert (done.code, done.error_id) == (6, "disk-full")
    assert done.error is not None
    assert (str(done.error.path), "--resume" in str(done.error.hint)) == ("/dev/full", False)
    assert FULL.is_char_device()


@pytest.mark.slow
def test_a_run_resumes_from_the_answers_on_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files replaces the full disk. Only the answers that were cut off are asked again."""
    rows = tmp_path / "rows.jsonl"
    options = ["--num-prompts", "8", "-n", "16", "--concurrency", "1", "--num-resamples", "0", "--output", str(rows)]
    done = shell(f"ulimit -f 4; dflash eval-acceptance {' '.join(options)}")
    assert done.code == 6
    assert done.err.splitlines()[-1].startswith(f"error: {rows}: ")
    whole = rows.read_bytes()[: rows.read_bytes().rfind(b"\n") + 1]
    assert 1 < whole.count(b"\n") < 9
    assert run_main("eval-acceptance", *options, "--resume").code == 0
    assert rows.read_bytes().startswith(whole)
    assert num_lines(rows) == 9


@pytest.mark.parametrize("option", ["--output"])
def test_pipes_and_links_are_written_to(option: str, tmp_path: Path) -> None:
    """All outputs use the same code; see test_atomic_file."""
    pipe, real, link = tmp_path / "pipe", tmp_path / "real", tmp_path / "link"
    os.mkfifo(pipe)
    real.write_text("old")
    link.symlink_to(real)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    small = ["eval-acceptance", "--num-prompts", "1", "-n", "8"]
    assert run_main(*small, option, pipe).code == 0
    reader.join(timeout=10)
    assert pipe.is_fifo()
    assert run_main(*small, option, link, "--force").code == 0
    assert link.is_symlink()
    assert real.read_text().split(":")[0] == read[0].split(":")[0]


@pytest.mark.slow
def test_a_pipe_that_loses_its_reader_is_named(tmp_path: Path) -> None:
    """Only stdout may lose its reader without an error."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = shell(f"head -c 1 < {pipe} > {tmp_path / 'first'} & dflash eval-acceptance --num-prompts 4 --output {pipe}")
    assert done.code != 0
    assert done.err.splitlines()[-1].startswith(f"error: {pipe}: ")


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs the installed script")
def test_the_installed_script_ends_as_main_does() -> None:
    """The console script that pip writes, with the code of this tree."""
    assert shell(f"{SCRIPT} explain | head -1").code == 0
    assert shell(f"{SCRIPT} inspect tiny >&-").code == 0
    with started([SCRIPT, "generate", "x"]) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1].splitlines()[-1] == "error: interrupted"
    assert process.returncode == 130


def test_a_second_interruption_while_the_first_is_reported_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`timeout -s INT` sends two signals: to the process and to its group."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_cli.terminal.console.error", interrupt)
    assert run_main("inspect", "no/such/folder").code == 130
