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
    """A row of a file, and where it stands: `test.jsonl:3`."""

    where: str
    values: Mapping[str, Any]


def read_records(paths: Sequence[Path]) -> list[Record]:
    """The rows of all files, in order.

    Raises:
        RequestError: a file that cannot be read, a row that is no object, or no rows at all.
        UnsupportedError: Parquet without pyarrow.
    """
    records: list[Record] = []
    for path in paths:
        try:
            rows = list(READERS[path.suffix](path))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RequestError(f"{path}: cannot be read: {error}") from error
        for number, row in rows:
            if not isinstance(row, dict):
                raise RequestError(f"{path}:{number}: found a row that is no object, expected one with named columns")
            records.append(Record(f"{path}:{number}", row))
    if not records:
        raise RequestError(f"{', '.join(map(str, paths))}: no rows")
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
        raise RequestError(f"{path}: found no list of rows, expected one")
    yield from enumerate(lists[0], start=1)


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        yield from enumerate(csv.DictReader(lines), start=1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    if find_spec("pyarrow") is None:
        raise UnsupportedError(
            f"{path}: reading Parquet needs pyarrow, which is not installed", hint="pip install 'dflash-cli[datasets]'"
        )
    from pyarrow import ArrowException, parquet

    try:
        yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
    except ArrowException as error:
        raise RequestError(f"{path}: no Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where}: not valid JSON: {error}") from error


READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""By the end of a file's name; of several kinds of one content the first is read."""
