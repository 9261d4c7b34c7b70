"""Rows of a file: JSON Lines, JSON, CSV or Parquet."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_runtime.errors import RequestError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file, with its file and line, such as `test.jsonl:3`."""

    where: str
    values: Mapping[str, Any]


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return the rows of all files, in order.

    Raises:
        RequestError: a file cannot be read, a row is not an object, or all files are empty.
        UnsupportedError: a Parquet file, but pyarrow is not installed.
    """
    records: list[Record] = []
    for path in paths:
        try:
            rows = list(READERS[path.suffix](path))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RequestError(f"cannot be read: {error}", id="cannot-be-read", path=path) from error
        for number, row in rows:
            if not isinstance(row, dict):
                raise RequestError(
                    f"found a row of type {type(row).__name__}, expected an object with named columns",
                    id="row-not-an-object",
                    path=f"{path}:{number}",
                    found=row,
                )
            records.append(Record(f"{path}:{number}", row))
    if not records:
        raise RequestError(f"{', '.join(map(str, paths))}: found no rows", id="no-rows")
    return records


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parse(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of objects, or the only list in an object."""
    document = _parse(path.read_text(encoding="utf-8"), str(path))
    lists = [item for item in document.values() if isinstance(item, list)] if isinstance(document, dict) else [document]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise RequestError("expected exactly one list of rows", id="no-list-of-rows", path=path)
    yield from enumerate(lists[0], start=1)


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        yield from enumerate(csv.DictReader(lines), start=1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    if find_spec("pyarrow") is None:
        raise UnsupportedError(
            "Parquet files need pyarrow, which is not installed",
            id="missing-package",
            path=path,
            found="pyarrow",
            hint="pip install 'dflash-cli[datasets]'",
        )
    from pyarrow import ArrowException, parquet

    try:
        yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
    except ArrowException as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"not a readable Parquet file: {reason}", id="cannot-be-read", path=path) from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}", id="invalid-json", path=where) from error


READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Readers by suffix. If the same rows exist with several suffixes, the first suffix here is read."""
