"""Files that the user names: regular files of a limited size, and lines of a limited length."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_cli.acceptance.journal import Journal
from dflash_cli.checkpoints.lock import read_lock
from dflash_cli.comparing.measured_result import read_result
from dflash_cli.documents import reading
from dflash_cli.documents.reading import bounded_lines, read_input, read_text
from dflash_cli.generation.datasets.table_files import read_records
from dflash_cli.handoff.two_servers.launch import read_launch
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_runtime.checkpoint.stored.strict_json import MAX_DEPTH, loads
from dflash_runtime.errors import CheckpointNotFound, DFlashError, RequestError, UsageError
from dflash_testing.deadline import deadline
from dflash_testing.refusals import refuses

READERS: dict[str, Callable[[Path], object]] = {
    "lock": read_lock,
    "result": read_result,
    "journal": lambda path: Journal(path, {}, [], resume=True).__enter__(),
    "launch": lambda path: read_launch(path, next(iter(ENGINE_SERVERS.values())).keys),
    "dataset": lambda path: read_records([path]),
}


@pytest.mark.parametrize("name", [name for name in READERS if name != "journal"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_directory_is_refused_at_once(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    make(path)
    with deadline(10), pytest.raises(DFlashError) as caught:
        READERS[name](path)
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith(f"{path}: ")


@pytest.mark.parametrize("name", READERS)
def test_a_deep_value_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a":' + "[" * 100_000)
    with pytest.raises(DFlashError) as caught:
        READERS[name](path)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message


def test_sizes_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_input(path, 5) == b"12345"
    with refuses(UsageError, "json-too-large", path=path, found=5):
        read_input(path, 4)
    with refuses(CheckpointNotFound, "no-such-file", path=tmp_path / "b"):
        read_input(tmp_path / "b")
    with refuses(RequestError, "not-a-regular-file", path="/dev/zero"):
        read_input(Path("/dev/zero"), error=RequestError)
    path.write_bytes(b"a\xff")
    with refuses(UsageError, "not-utf-8", path=path, found="byte 0xff"):
        read_text(path)


def test_lines_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_JSON_BYTES", 4)
    monkeypatch.setattr(reading, "MAX_ROWS_BYTES", 12)
    assert list(bounded_lines(io.StringIO("abc\n\n \nd"), "x")) == [(1, "abc\n"), (4, "d")]
    with refuses(RequestError, "json-too-large", path="x:2"):
        list(bounded_lines(io.StringIO("abc\nabcde\n"), "x"))
    with refuses(RequestError, "json-too-large", path="x:4"):
        list(bounded_lines(io.StringIO("abc\n" * 9), "x"))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "9" * 5000, '"\\ud800"', b"\xff", "", "{]"]
)
def test_json_from_outside_has_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(text)


def test_json_of_other_programs_may_have_nan_and_repeated_keys() -> None:
    assert str(loads('{"a": NaN, "b": [1], "b": [2.5]}')) == "{'a': nan, 'b': [2.5]}"
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
