"""Errors of the system are one line and leave nothing. A conversion finds the files of killed conversions."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints import safetensors_writer
from dflash_cli.conversion import staging
from dflash_runtime.whole_files import hidden_path
from dflash_testing import checkpoints as support
from dflash_testing.command_line import IMPORT_PATHS, Outcome, invoke

REFUSALS = {
    errno.EROFS: 2, errno.EIO: 6, errno.EBUSY: 2, errno.EXDEV: 2, errno.EPERM: 2, errno.EACCES: 2, errno.ENOSPC: 6,
    errno.EDQUOT: 6, errno.EFBIG: 6,
}  # fmt: skip


def convert(tmp_path: Path, *more: str) -> Outcome:
    source = tmp_path / "source"
    if not source.exists():
        support.make_native(source)
    return invoke("convert", source, tmp_path / "out", "--to", "native", *more)


def names(directory: Path) -> list[str]:
    return sorted(item.name for item in directory.iterdir())


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


class TestRefusals:
    @pytest.mark.parametrize("number", sorted(REFUSALS))
    @pytest.mark.parametrize("place", ["mkdir", "copy", "rename"])
    def test_are_one_line_and_leave_nothing(
        self, place: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        support.make_native(tmp_path / "source")
        if place == "copy":
            monkeypatch.setattr(safetensors_writer, "MOVES", safetensors_writer.MOVES[-1:])
            monkeypatch.setattr(os, "write", refusing(number))
        elif place == "rename":
            monkeypatch.setattr(staging, "move_new", refusing(number))
        else:
            monkeypatch.setattr(Path, "mkdir", refusing(number))
        outcome = convert(tmp_path)
        assert outcome.code == REFUSALS[number], outcome
        assert "Traceback" not in outcome.err
        assert names(tmp_path) == ["source"]

    def test_a_limit_on_files_is_seen_before_copying(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (10_000, 10_000))
        monkeypatch.setattr(safetensors_writer, "MOVES", ())
        outcome = convert(tmp_path)
        assert (outcome.code, outcome.error_id) == (6, "file-limit")
        assert outcome.error is not None
        assert outcome.error.found == 24064

    def test_a_real_limit_on_files(self, tmp_path: Path) -> None:
        """The tensors alone do not exceed the limit, but the file with its header does."""
        source = support.make_native(tmp_path / "source")
        code = (
            "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (24100, 24100))\n"
            "from dflash_cli.main import main\nmain()\n"
        )
        args = [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "out"), "--to", "native"]
        env = {**os.environ, **IMPORT_PATHS}
        done = subprocess.run(args, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 6, done.stderr
        assert "--max-shard-size" in done.stderr
        assert "Traceback" not in done.stderr
        assert names(tmp_path) == ["source"]

    @pytest.mark.parametrize("place", ["mkdir", "copy", "rename"])
    def test_have_no_list_of_numbers(self, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever number the system gives, such as ETIMEDOUT of a network or EUCLEAN of a broken file system."""
        support.make_native(tmp_path / "source")
        owner, name = {"mkdir": (Path, "mkdir"), "rename": (staging, "move_new")}.get(
            place, (safetensors_writer, "write_all")
        )
        taken = {errno.EEXIST, *REFUSALS}
        for number in sorted(set(errno.errorcode) - taken):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, refusing(number))
                outcome = convert(tmp_path)
            assert (outcome.code, outcome.error_id) == (2, "output-not-writable"), errno.errorcode[number]
            assert names(tmp_path) == ["source"]


class TestRemains:
    def stage(self, tmp_path: Path, kind: str = "tmp", *, is_marked: bool = True) -> Path:
        remain = support.make_native(tmp_path / f".out.{kind}-0123abcd")
        if is_marked:
            (remain / ".writing").touch()
        return remain

    def test_the_files_of_a_dead_run_are_removed_and_named(self, tmp_path: Path) -> None:
        remain = self.stage(tmp_path)
        outcome = convert(tmp_path)
        assert (outcome.code, outcome.notices) == (0, ("unfinished-result-removed",))
        assert str(remain) in outcome.err
        assert names(tmp_path) == ["out", "source"]

    def test_a_long_name_is_told_from_another_with_the_same_beginning(self, tmp_path: Path) -> None:
        """Hidden names have the beginning of a long name, and a digest of all of it."""
        source = support.make_native(tmp_path / "source")
        mine, other = (tmp_path / ("n" * 250 + end) for end in "ab")
        for destination in (mine, other):
            left = hidden_path(destination, "tmp")
            support.make_native(left)
            (left / ".writing").touch()
        outcome = invoke("convert", source, mine, "--to", "native")
        assert (outcome.code, outcome.notices) == (0, ("unfinished-result-removed",))
        assert names(tmp_path) == sorted([left.name, mine.name, "source"])

    def test_a_dry_run_removes_nothing(self, tmp_path: Path) -> None:
        remain = self.stage(tmp_path)
        outcome = convert(tmp_path, "--dry-run")
        assert outcome.notices == ("unfinished-result-left",)
        assert remain.exists()

    def test_a_run_that_still_writes_keeps_its_own(self, tmp_path: Path) -> None:
        remain = tmp_path / ".out.tmp-0123abcd"
        remain.mkdir()
        with staging._marked(remain):
            outcome = convert(tmp_path)
            assert outcome.notices == ("conversion-running",)
            assert str(remain) in outcome.err
        assert remain.exists()

    def test_a_directory_without_a_marker_is_only_named(self, tmp_path: Path) -> None:
        remain = self.stage(tmp_path, is_marked=False)
        outcome = convert(tmp_path)
        assert outcome.notices == ("unfinished-result-left",)
        assert str(remain) in outcome.err
        assert remain.exists()

    def test_files_of_others_stay(self, tmp_path: Path) -> None:
        remain = self.stage(tmp_path)
        (remain / "thesis.txt").write_text("x")
        assert convert(tmp_path).code == 0
        assert (remain / "thesis.txt").read_text() == "x"

    def test_a_replaced_checkpoint_is_never_removed(self, tmp_path: Path) -> None:
        old = self.stage(tmp_path, "old")
        outcome = convert(tmp_path)
        assert outcome.notices == ("replaced-checkpoint-aside",)
        assert f"mv {old} {tmp_path / 'out'}" in outcome.err
        shutil.rmtree(tmp_path / "out")
        assert old.exists()

    def test_directories_of_other_names_are_ignored(self, tmp_path: Path) -> None:
        for name in (".out.tmp-mine", ".outer.tmp-0123abcd", "out.tmp-0123abcd", ".out.tmp-0123abcde"):
            (tmp_path / name).mkdir()
        assert convert(tmp_path).notices == ()

    def test_the_result_has_no_marker(self, tmp_path: Path) -> None:
        assert convert(tmp_path).code == 0
        assert not (tmp_path / "out" / ".writing").exists()


def test_three_at_once_leave_one_result(tmp_path: Path) -> None:
    """Three conversions to one destination without --force: one succeeds, and two are refused."""
    source = support.make_native(tmp_path / "source")
    wait = "import dflash_cli.conversion.execute as e, sys, time\nv = e.verify_roundtrip\n"
    wait += "def slow(*a):\n    v(*a)\n    print('written', flush=True)\n    sys.stdin.readline()\n"
    wait += "e.verify_roundtrip = slow\nfrom dflash_cli.main import main\nmain()\n"
    env = {**os.environ, **IMPORT_PATHS}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", wait, "convert", str(source), str(tmp_path / "out"), "--to"]
    dialects = ("native", "mlx", "vllm")
    runs = [subprocess.Popen([*command, to], text=True, env=env, **pipes) for to in dialects]
    assert [run.stdout.readline() for run in runs if run.stdout] == ["written\n"] * 3
    errors = [run.communicate("go\n", timeout=60)[1] for run in runs]
    codes = [run.returncode for run in runs]
    assert sorted(codes) == [0, 2, 2], errors
    assert sum(f"error: {tmp_path / 'out'}: " in error for error in errors) == 2
    assert names(tmp_path) == ["out", "source"]
    written = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert written["destination_dialect"] == dialects[codes.index(0)]
