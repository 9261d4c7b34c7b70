"""A conversion that is interrupted, killed or out of disk space leaves a whole destination or none."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints import safetensors_writer
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_runtime.errors import CapacityError, CheckpointError, DFlashError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import IMPORT_PATHS
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses

OLD = support.Shape(vocab=40, draft_vocab=40)


def script(source: Path, out: Path, before: str) -> list[str]:
    """A conversion in a process of its own, after some preparation."""
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "import dflash_cli.conversion.staging as staging\nimport dflash_cli.conversion.execute as execute\n"
        "from dflash_cli.main import main\n"
        f"{before}\n"
        f"sys.argv = ['dflash', 'convert', {str(source)!r}, {str(out)!r}, '--to', 'native', '--force']\n"
        "main()\n"
    )
    return [sys.executable, "-c", code]


def run(arguments: list[str]) -> subprocess.Popen[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


SLOW = "def slow(*args):\n    print('copying', flush=True)\n    time.sleep(60)\nexecute.write_tensors = slow"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("exists", [False, True])
def test_an_ended_run_leaves_nothing(number: signal.Signals, exists: bool, tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source")
    if exists:
        support.make_native(tmp_path / "out", OLD)
    with run(script(source, tmp_path / "out", SLOW)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copying\n"
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert sorted(item.name for item in tmp_path.iterdir()) == (["out", "source"] if exists else ["source"])
    if exists:
        assert open_draft(tmp_path / "out").config.vocab_size == 40


@pytest.mark.parametrize("step", range(4))
def test_a_killed_run_leaves_the_old_or_the_new_one_whole(step: int, tmp_path: Path) -> None:
    """The process ends itself without warning before the n-th file operation of the swap."""
    source = support.make_native(tmp_path / "source")
    support.make_native(tmp_path / "out", OLD)
    die = (
        "steps = iter(range(9))\n"
        "def dying(call):\n"
        "    def wrapped(*args, **kwargs):\n"
        f"        if next(steps) == {step}:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return call(*args, **kwargs)\n"
        "    return wrapped\n"
        "staging.move_new = dying(staging.move_new)\n"
        "staging.remove_checkpoint = dying(staging.remove_checkpoint)\n"
        "rmtree = staging.shutil.rmtree\n"
        "staging.shutil.rmtree = dying(rmtree)"
    )
    with run(script(source, tmp_path / "out", die)) as process:
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    whole = []
    for path in tmp_path.iterdir():
        try:
            draft = open_draft(path)
            assert draft.select_tensors()
            whole.append((path.name.split("-")[0], draft.config.vocab_size))
        except DFlashError:
            pass
    found = set(whole) - {("source", 32)}
    assert (
        found
        == [
            {("out", 40), (".out.tmp", 32)},
            {(".out.old", 40), (".out.tmp", 32)},
            {("out", 32), (".out.old", 40)},
            {("out", 32)},
        ][step]
    )


@pytest.mark.parametrize("num_kills", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments(num_kills: int, tmp_path: Path) -> None:
    """The destination is whole or absent after each kill. The next run names the remains beside it."""
    arguments = [sys.executable, "-m", "dflash_testing.killing", str(tmp_path), str(num_kills), "7"]
    paths = [*IMPORT_PATHS["PYTHONPATH"].split(os.pathsep), str(ROOT / "tests" / "helpers")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert json.loads(done.stdout)["kills"] == num_kills


class TestFullDisk:
    @pytest.mark.parametrize("exists", [False, True])
    def test_while_copying(self, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = support.make_native(tmp_path / "source")
        if exists:
            support.make_native(tmp_path / "out", OLD)

        def full(*args: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(safetensors_writer, "MOVES", (full,))
        plan = plan_conversion(open_draft(source), ConversionSpec(to="native"))
        with pytest.raises(CapacityError) as caught:
            convert_draft(plan, tmp_path / "out", force=exists)
        assert caught.value.exit_code == 6
        assert sorted(item.name for item in tmp_path.iterdir()) == (["out", "source"] if exists else ["source"])

    def test_a_real_one(self, tmp_path: Path) -> None:
        """`/dev/full` answers every write as a full disk does."""
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        with Path("/dev/full").open("wb", buffering=0) as out, pytest.raises(OSError, match="No space left"):
            safetensors_writer.write_all(out.fileno(), b"data")


class TestMoves:
    """Every way of moving bytes gives the same file, and a system that lacks one is served by the next."""

    @pytest.mark.parametrize("at", range(len(safetensors_writer.MOVES)))
    def test_each_way(self, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(safetensors_writer, "MOVES", safetensors_writer.MOVES[at:])
        source = support.make_native(tmp_path / "source")
        support.convert(source, tmp_path / "out", "native")
        support.assert_same_tensors(source, tmp_path / "out")

    @pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
    @pytest.mark.parametrize("after", [0, 100])
    def test_falls_back(self, number: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where the first way fails in the middle of a file."""
        first = safetensors_writer.MOVES[0]
        moved = 0

        def lacking(source: int, out: int, position: int, count: int) -> int:
            nonlocal moved
            if moved >= after:
                raise OSError(number, "not here")
            moved += (done := first(source, out, position, min(count, 50)))
            return done

        monkeypatch.setattr(safetensors_writer, "MOVES", (lacking, *safetensors_writer.MOVES[1:]))
        source = support.make_native(tmp_path / "source")
        support.convert(source, tmp_path / "out", "native")
        support.assert_same_tensors(source, tmp_path / "out")

    def test_a_source_that_shrinks(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        plan = plan_conversion(open_draft(source), ConversionSpec(to="native"))
        with (source / "model.safetensors").open("r+b") as stream:
            stream.truncate(5000)
        with refuses(CheckpointError, path=source / "model.safetensors") as caught:
            convert_draft(plan, tmp_path / "out")
        assert "5000" in caught.value.message
        assert [item.name for item in tmp_path.iterdir()] == ["source"]

    def test_progress_counts_every_byte(self, tmp_path: Path) -> None:
        plan = plan_conversion(open_draft(support.make_native(tmp_path / "source")), ConversionSpec(to="native"))
        counts: dict[str, int] = {}

        def progress(stage: str, count: int, total: int) -> None:
            counts[stage] = counts.get(stage, 0) + count

        convert_draft(plan, tmp_path / "out", progress=progress)
        assert counts["copy"] == counts["verify"] == plan.num_bytes
        assert counts["hash"] > 2 * plan.num_bytes
