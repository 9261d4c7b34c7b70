"""An output that the system does not write ends a command in one line, with the documented exit code."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.documents.atomic_file import atomic_text, make_folder, write_whole
from dflash_cli.main import _foreseen
from dflash_runtime.whole_files import NotWritten
from dflash_testing import checkpoints as support
from dflash_testing import hub_server as hub
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import drawn_evaluation, write_evaluation

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and /dev/full")
RUN = ("--num-prompts", "1", "-n", "4")
FILES: dict[str, tuple[str, ...]] = {
    "lock": ("lock", "tiny", "-o"),
    "generate": ("generate", "x", "-n", "2", "-o"),
    "eval-acceptance": ("eval-acceptance", "tiny", *RUN, "-o"),
    "report": ("report", "result.json", "--format", "svg", "-o"),
    "card": ("card", "result.json", "-o"),
    "export": ("export", "result.json", "--to", "vllm-rates", "-o"),
    "validate": ("validate", "tiny", "--format", "junit", "-o"),
    "gate": ("eval-acceptance", "tiny", *RUN, "--min-acceptance", "1", "--gate-out"),
}
FOLDERS: dict[str, tuple[str, ...]] = {
    "dump": ("dump", "tiny", "--taps", "1", *RUN, "-o"),
    "tune": ("tune", "tiny", *RUN, "-k", "3", "--output"),
    "convert": ("convert", "tiny", "--to", "speculators", "--target", "tiny", "--target-name", "a/b"),
    "generate": ("generate", "x", "-n", "2", "--handoff-out"),
}

WORK = (
    "dflash_cli.checkpoints.lock.lock_checkpoint",
    "dflash_cli.generation.loaded_pair.load_session",
    "dflash_cli.comparing.stored_evaluation.read_evaluations",
    "dflash_cli.conversion.execute.convert_draft",
)
"""The functions that do the work of the commands above."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_evaluation(tmp_path / "result.json", drawn_evaluation())
    return tmp_path


def fails(*arguments: str) -> str:
    """Require one line and exit code 2 or 6, and return the id of the error."""
    done = run_main(*arguments)
    assert done.error is not None, done
    assert done.code == done.error.exit_code
    assert done.code in (2, 6)
    assert "\n" not in done.error.message
    return done.error.id


@LINUX
@pytest.mark.parametrize("command", FILES)
def test_a_file_where_the_system_makes_none(command: str) -> None:
    """The system says that root may write in /proc, and then makes no file there."""
    expected = "output-not-writable" if os.access("/proc", os.W_OK) else "permission-denied"
    assert fails(*FILES[command], "/proc/dflash-output") == expected


@LINUX
@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_where_the_system_makes_none(command: str) -> None:
    fails(*FOLDERS[command], "/proc/dflash-output")
    assert not Path("/proc/dflash-output").exists()


@LINUX
@pytest.mark.parametrize("arguments", [*FILES.values(), *FOLDERS.values()], ids=[*FILES, *FOLDERS])
@pytest.mark.parametrize("place", ["/proc/dflash-output", "n" * 256])
def test_an_output_is_tried_before_the_work(
    place: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint is loaded, hashed or opened, and no result is read."""

    def work(*args: object, **kwargs: object) -> None:
        raise AssertionError("the output was not checked first")

    for place_of_work in WORK:
        monkeypatch.setattr(place_of_work, work)
    fails(*arguments, place)


@pytest.mark.parametrize("arguments", [*FILES.values(), *FOLDERS.values()], ids=[*FILES, *FOLDERS])
def test_a_dash_makes_no_file(arguments: tuple[str, ...]) -> None:
    """In `generate -o` it means stdout, and nowhere the name of a file."""
    done = run_main(*arguments, "-")
    is_stdout = arguments == FILES["generate"]
    assert (done.code, done.error_id) == ((0, None) if is_stdout else (2, "output-is-dash")), done
    assert not Path("-").exists()


@LINUX
@pytest.mark.parametrize("name", ["n" * 242, "n" * 255, "\u00e9" * 127, "\U0001f600" * 63])
@pytest.mark.parametrize("arguments", [FILES["lock"], FILES["generate"], ("convert", "tiny", "--to", "native")])
def test_a_name_as_long_as_the_system_takes(arguments: tuple[str, ...], name: str) -> None:
    """The hidden name beside the output is no longer."""
    before = {item.name for item in Path().iterdir()}
    for more in ((), ("--force",)):
        done = run_main(*arguments, name, *more)
        assert done.code == 0, done
        assert {item.name for item in Path().iterdir()} - before == {name}


@LINUX
@pytest.mark.parametrize("command", FILES)
def test_a_device_without_room(command: str) -> None:
    assert fails(*FILES[command], "/dev/full") == "disk-full"


@pytest.mark.parametrize("arguments", [*FILES.values(), *FOLDERS.values()], ids=[*FILES, *FOLDERS])
def test_a_path_in_a_file_or_with_a_long_name(arguments: tuple[str, ...]) -> None:
    assert fails(*arguments, "result.json/out") == "parent-is-a-file"
    assert fails(*arguments, "n" * 300) == "name-too-long"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[hub.LocalHub]:
    with hub.serving() as started:
        started.add("acme/draft", support.make_native(tmp_path / "original"))
        yield started


@LINUX
def test_a_pull_into_a_folder_that_cannot_be_made(server: hub.LocalHub, tmp_path: Path) -> None:
    environment = hub.environment(server, tmp_path / "home")
    for place, said in (("/proc/dflash-output", "/proc"), ("n" * 300, "too long")):
        done = hub.run("pull", "acme/draft", "-o", place, env=environment)
        assert done.code == 2
        (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert said in line
        assert "Traceback" not in done.err


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE])
@pytest.mark.parametrize("call", ["iterdir", "stat", "open"])
def test_a_disk_that_is_lost_ends_in_one_line(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a command reads or asks of a file when the system loses it."""
    source, real = support.make_native(tmp_path / "source"), getattr(Path, call)

    def lose(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == source or source in path.parents:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, call, lose)
    for arguments in (
        ("inspect", source),
        ("lock", source, "-t", "tiny"),
        ("convert", source, "out", "--to", "native"),
    ):
        done = run_main(*arguments)
        assert done.error is not None, done
        assert done.code == 4, done
        assert "\n" not in done.error.message
        assert not Path("out").exists()


def test_errors_of_writers_name_the_output_and_stay_errors_of_the_system(tmp_path: Path) -> None:
    """Python code may catch them as OSError, whatever the system says."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="loop") as caught:
        write_whole(loop / "x", b"")
    assert type(caught.value) is NotWritten
    with pytest.raises(NotWritten):
        make_folder(loop / "x")
    with pytest.raises(NotWritten), atomic_text(tmp_path / ("n" * 256)) as output:
        output.write("x")
    other = _foreseen(NotWritten(10**6, "no such thing", "out"))
    assert other is not None
    assert (other.exit_code, other.id, other.path) == (2, "output-not-writable", "out")
    assert _foreseen(FileNotFoundError(2, "a bug")) is None
