"""Files and directories are complete under their name, or absent."""

import errno
import os
import threading
from pathlib import Path

import pytest

from dflash_runtime.whole_files import NotWritten, hidden_path, written_whole


@pytest.mark.parametrize("existing", ["file", "nothing"])
def test_a_file_appears_when_the_block_ends(existing: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if existing == "file":
        path.write_text("old")
    with written_whole(path) as partial:
        partial.write_text("new")
        assert path.exists() == (existing == "file")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_replaces_one_that_has_files(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").touch()
    with written_whole(path) as partial:
        partial.mkdir()
        (partial / "new").touch()
        assert [item.name for item in path.iterdir()] == ["old"]
    assert [item.name for item in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_failed_block_leaves_what_was_there(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def fail() -> None:
        with written_whole(path) as partial:
            if kind == "file":
                partial.write_text("new")
            else:
                partial.mkdir()
                (partial / "new").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_rename_names_the_output(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (path / "old").mkdir(parents=True)

    def write() -> None:
        with written_whole(path) as partial:
            partial.touch()

    with pytest.raises(NotWritten) as caught:
        write()
    assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_once_do_not_share_a_hidden_path(tmp_path: Path) -> None:
    path, gate = tmp_path / "out", threading.Barrier(4)

    def write(text: str) -> None:
        with written_whole(path) as partial:
            partial.mkdir()
            gate.wait(10)
            (partial / "text").write_text(text)

    writers = [threading.Thread(target=write, args=(str(number),)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (path / "text").read_text() in "0123"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("letter", ["n", "\u00e9", "\udcff"])
def test_a_long_hidden_name_is_no_longer_than_its_own(letter: str, tmp_path: Path) -> None:
    for count in (1, 60, 100, 101, 127):
        name = letter * count
        found, other = hidden_path(tmp_path / name, "tmp"), hidden_path(tmp_path / f"{name}x", "tmp")
        assert len(os.fsencode(found.name)) <= max(len(os.fsencode(name)), 114)
        assert found.name.rpartition(".")[0] != other.name.rpartition(".")[0]


def test_a_hidden_path_is_next_to_its_own(tmp_path: Path) -> None:
    found = hidden_path(tmp_path / "out", "tmp")
    assert found.parent == tmp_path
    assert found.name.startswith(".out.tmp-")
