"""Rows of a file: JSON Lines, JSON, CSV or Parquet."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_cli.documents.reading import bounded_lines, open_text, read_text, unpacked_name
from dflash_runtime.checkpoint.stored.strict_json import MAX_ROWS_BYTES, loads, regular_size, too_large_json
from dflash_runtime.errors import CheckpointError, RequestError, UnsupportedError


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
            if regular_size(path) > MAX_ROWS_BYTES:
                raise too_large_json(path.stat().st_size, path, MAX_ROWS_BYTES)
            rows = list(READERS[unpacked_name(path.name).suffix](path))
        except CheckpointError as error:
            raise RequestError(error.message, id=error.id, found=error.found, hint=error.hint) from error
        except (OSError, csv.Error) as error:
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
    with open_text(path) as stream:
        for number, line in bounded_lines(stream, str(path)):
            yield number, _parse(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of objects, or the only list in an object."""
    document = _parse(read_text(path, MAX_ROWS_BYTES, error=RequestError), str(path))
    lists = [item for item in document.values() if isinstance(item, list)] if isinstance(document, dict) else [document]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise RequestError("expected exactly one list of rows", id="no-list-of-rows", path=path)
    yield from enumerate(lists[0], start=1)


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with open_text(path, newline="") as lines:
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
        num_bytes = num_rows = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):  # a small file may hold many rows
            num_bytes += batch.nbytes
            if num_bytes > MAX_ROWS_BYTES:
                raise too_large_json(num_bytes, path, MAX_ROWS_BYTES)
            yield from enumerate(batch.to_pylist(), start=num_rows + 1)
            num_rows += batch.num_rows
    except ArrowException as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"not a readable Parquet file: {reason}", id="cannot-be-read", path=path) from error


def _parse(text: str, where: str) -> Any:
    try:
        return loads(text)
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}", id="invalid-json", path=where) from error


READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Readers by suffix. If the same rows exist with several suffixes, the first suffix here is read."""
