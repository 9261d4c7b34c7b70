"""Outputs: files are complete or absent, devices and pipes are written directly, links stay links."""

import os
import threading
from pathlib import Path

import pytest

from dflash_cli.documents.atomic_file import atomic_text, check_output
from dflash_runtime.errors import UsageError
from dflash_testing.refusals import refuses


def test_existing_outputs_are_refused_without_force(tmp_path: Path) -> None:
    path = tmp_path / "out"
    check_output(path, force=False)
    path.write_text("mine")
    with refuses(UsageError, "output-exists", path=path):
        check_output(path, force=False)
    check_output(path, force=True)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "absent")
    with refuses(UsageError, "output-exists", path=dangling):
        check_output(dangling, force=False)


def test_a_folder_that_takes_no_files_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the system, because root may write everywhere. A device needs no writable folder."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refuses(UsageError, "permission-denied", path=tmp_path):
        check_output(tmp_path / "out", force=True)
    check_output(Path(os.devnull), force=False)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with refuses(UsageError, "output-is-directory", path=tmp_path):
        check_output(tmp_path, force=True)
    check_output(tmp_path, force=True, is_folder=True)


def test_a_missing_folder_is_refused_even_with_force(tmp_path: Path) -> None:
    parent = tmp_path / "a" / "b"
    with refuses(UsageError, "no-parent-directory", path=parent) as caught:
        check_output(parent / "c", force=True)
    assert f"mkdir -p {parent}" in str(caught.value.hint)


@pytest.mark.parametrize("below", ["c", "b/c"])
def test_a_folder_that_is_a_file_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with refuses(UsageError, "parent-is-a-file", path=tmp_path / "a") as caught:
        check_output(tmp_path / "a" / below, force=True)
    assert "mkdir" not in str(caught.value.hint)


def test_a_directory_is_no_text_file(tmp_path: Path) -> None:
    with refuses(UsageError, "output-is-directory", path=tmp_path), atomic_text(tmp_path):
        pass


def test_an_error_of_the_block_keeps_its_own_file_name(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(FileNotFoundError) as caught, atomic_text(tmp_path / "out"):
        absent.read_text()
    assert caught.value.filename == str(absent)


def test_a_failed_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def fail() -> None:
        with atomic_text(path) as stream:
            stream.write("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    with atomic_text(link) as stream:
        stream.write("new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output(pipe, force=False)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with atomic_text(pipe) as stream:
        stream.write("through")
    reader.join(timeout=10)
    assert read == ["through"]
    assert pipe.is_fifo()
