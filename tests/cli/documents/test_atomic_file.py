"""Where results may be written: files whole or not at all, devices and pipes as they are, links stay links."""

import os
import threading
from pathlib import Path

import pytest

from dflash_cli.documents.atomic_file import atomic_text, check_output
from dflash_runtime.errors import UsageError


def test_what_exists_is_refused_without_force(tmp_path: Path) -> None:
    path = tmp_path / "out"
    check_output(path, force=False)
    path.write_text("mine")
    with pytest.raises(UsageError, match="out: exists already"):
        check_output(path, force=False)
    check_output(path, force=True)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "absent")
    with pytest.raises(UsageError, match="dangling: exists already"):
        check_output(dangling, force=False)


def test_a_missing_folder_is_refused_even_with_force(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a/b: no such directory") as raised:
        check_output(tmp_path / "a" / "b" / "c", force=True)
    assert raised.value.hint == f"make it first: mkdir -p {tmp_path / 'a' / 'b'}"


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
