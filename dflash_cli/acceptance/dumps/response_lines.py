"""Responses of an engine as JSON Lines, one object a line, read with the line's number in every message.

They are parsed by Python's own reader: a line may hold millions of numbers, and strictness about each would take
minutes. What is not finite is found where the numbers are used.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import is_int
from dflash_runtime.scheduling.request import FinishReason


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line that is not blank.

    Raises:
        CheckpointError: the file cannot be read, or a line is no object.
    """
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, parse_line(line, f"{file}:{number}")
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=file) from error


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """One response.

    Raises:
        CheckpointError: it is no object, as where a file was cut off.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}", path=where) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"found a JSON {type(value).__name__}, expected an object", path=where)
    return value


def token_list(value: object, name: str, where: str) -> tuple[int, ...]:
    """Token ids of a response.

    Raises:
        CheckpointError: it holds something else.
    """
    if not isinstance(value, list) or not all(is_int(item) for item in value):
        found = "missing" if value is None else f"found {str(value)[:40]}"
        raise CheckpointError(f"{name}: {found}, expected a list of token ids", path=where)
    return tuple(value)


def finish_reason_of(value: object) -> FinishReason:
    """An engine's word for why an answer ended."""
    return FinishReason.STOP if value == "stop" else FinishReason.LENGTH
