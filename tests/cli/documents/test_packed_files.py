"""Text files that the user names are read alike: plain, packed with gzip, and after a byte order mark."""

import codecs
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.acceptance.dumps.response_lines import read_lines
from dflash_cli.acceptance.journal import stored_settings
from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.documents import reading
from dflash_cli.documents.reading import read_input, read_text
from dflash_cli.generation.datasets.places import find_files
from dflash_cli.generation.datasets.table_files import read_records
from dflash_cli.generation.prompts import gather_rows
from dflash_cli.handoff.two_servers.launch import read_launch
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_runtime.errors import DFlashError, RequestError, UsageError
from dflash_testing.refusals import refuses

ROWS = [{"prompt": "é", "id": "a"}, {"prompt": "two"}]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS)


def prompts_of(path: Path | str) -> list[Any]:
    return [row.value for row in gather_rows([], str(path))]


def records_of(path: Path) -> list[Any]:
    return [record.values for record in read_records([path])]


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "prompts": ("a.jsonl", LINES, prompts_of),
    "rows": ("a.jsonl", LINES, records_of),
    "a list of rows": ("a.json", json.dumps(ROWS), records_of),
    "a table": ("a.csv", "prompt,id\né,a\ntwo,\n", records_of),
    "a result": ("a.json", json.dumps({"acceptance_len": 2.0}), lambda path: ResultFile(path).document),
    "rows of a result": ("a.jsonl", LINES, lambda path: ResultFile(path).rows),
    "responses": ("a.jsonl", LINES, lambda path: list(map(dict, (line for _, line in read_lines(path))))),
    "arguments of a server": (
        "a.json", '{"model": "org/target"}',
        lambda path: read_launch(path, next(iter(ENGINE_SERVERS.values())).keys).arguments,
    ),
    "a template": ("a.lark", "start: x", read_text),
}  # fmt: skip
"""A name, a text, and a reader of such files."""

FORMS: dict[str, Callable[[bytes], bytes]] = {
    "a mark": lambda data: codecs.BOM_UTF8 + data,
    "gzip": gzip.compress,
    "gzip of a mark": lambda data: gzip.compress(codecs.BOM_UTF8 + data),
    "two parts of gzip": lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:]),
}

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-9],
    "a wrong sum": lambda data: data[:-8] + bytes(8),
    "changed bytes": lambda data: data[:10] + b"\xff\xff" + data[12:],
    "an end of something else": lambda data: data + b"and so on",
    "only a start": lambda data: data[:2],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", READERS)
def test_each_form_is_read_as_the_plain_text(kind: str, form: str, tmp_path: Path) -> None:
    name, text, read = READERS[kind]
    plain, other = tmp_path / name, tmp_path / "other" / (f"{name}.gz" if "gzip" in form else name)
    other.parent.mkdir()
    plain.write_bytes(text.encode())
    other.write_bytes(FORMS[form](text.encode()))
    assert read(other) == read(plain)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_gzip_file_is_refused_in_one_line(kind: str, damage: str, tmp_path: Path) -> None:
    name, text, read = READERS[kind]
    path = tmp_path / f"{name}.gz"
    path.write_bytes(DAMAGE[damage](gzip.compress(text.encode() * 50)))
    with pytest.raises(DFlashError) as caught:
        read(path)
    assert (caught.value.id, str(caught.value.path)) == ("not-gzip", str(path))
    assert caught.value.exit_code == (3 if kind == "responses" else 2)
    assert "\n" not in caught.value.message


def test_the_unpacked_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(10**6)))
    assert read_input(path, 10**6) == bytes(10**6)
    with refuses(UsageError, "json-too-large", path=path, found=10**6):
        read_input(path, 10**6 - 1)
    monkeypatch.setattr(reading, "MAX_ROWS_BYTES", 10**5)
    path.write_bytes(gzip.compress(b" " * 10**6))
    with refuses(RequestError, "json-too-large"):
        prompts_of(path)


@pytest.mark.parametrize("form", FORMS)
def test_stdin_is_read_as_a_file(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, expected in ((LINES, ["é", "two"]), ("", None)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(FORMS[form](data.encode()))))
        if expected is None:
            with refuses(RequestError, "no-rows", path="stdin"):
                prompts_of("-")
        else:
            assert prompts_of("-") == expected


def test_another_encoding_on_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, prompts in (([], "-"), (["-"], None)):
        stdin = io.TextIOWrapper(io.BytesIO(b'{"prompt": "\xe9"}\n'), errors="surrogateescape")
        monkeypatch.setattr("sys.stdin", stdin)
        with refuses(RequestError, "not-utf-8", path="stdin", found="byte 0xe9"):
            gather_rows(arguments, prompts)


def test_packed_files_of_a_data_set_are_found_and_read_once(tmp_path: Path) -> None:
    for name in ("main/test.jsonl.gz", "main/test.jsonl", "main/train.jsonl.gz", "other/test.csv.gz", "notes.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(LINES.encode()) if name.endswith(".gz") else LINES.encode())
    found = find_files(str(tmp_path), subset="main", split="test", is_subset_asked=True)
    assert found.names == ("main/test.jsonl",)
    found = find_files(str(tmp_path), subset="main", split="train", is_subset_asked=True)
    assert found.names == ("main/train.jsonl.gz",)
    assert [item.values["prompt"] for item in read_records(found.paths)] == ["é", "two"]
    (alone,) = find_files(str(tmp_path / "main/train.jsonl.gz"), subset=None, split="x", is_subset_asked=False).names
    assert alone == "train.jsonl.gz"


def test_a_file_that_a_run_continues_is_not_unpacked(tmp_path: Path) -> None:
    """Its lines are counted in bytes, and new lines are appended."""
    path = tmp_path / "answers.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"kind": "answers", "settings": {}}\n'))
    with refuses(UsageError, path=path):
        stored_settings(path)
