"""Read the JSON Lines file with an engine's responses. Every error names the line.

Python's json module parses the lines: a line may hold millions of numbers, and the strict reader would take minutes.
Numbers that are not finite are found where the numbers are used.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_cli.documents.reading import open_lines
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import MISSING, CheckpointError
from dflash_runtime.json_values import is_int, json_kind
from dflash_runtime.scheduling.request import FinishReason


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of each line that is not blank.

    Raises:
        CheckpointError: the file cannot be read, or a line is not a JSON object.
    """
    with open_lines(file, error=CheckpointError) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, parse_line(line, f"{file}:{number}")


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return one response.

    Raises:
        CheckpointError: the line is not a JSON object, for example because the file was cut off.
    """
    try:
        value = loads(line)
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {error}", id="invalid-json", path=where) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"found a JSON {json_kind(value)}, expected an object", id="not-an-object", path=where, found=value
        )
    return value


def token_list(value: object, name: str, where: str) -> tuple[int, ...]:
    """Return the token ids of a response.

    Raises:
        CheckpointError: the value is not a list of integers.
    """
    if not isinstance(value, list) or not all(is_int(item) for item in value):
        found = MISSING if value is None else value
        raise CheckpointError(id="not-token-ids", path=where, field=name, found=found, expected="a list of token ids")
    return tuple(value)


def finish_reason_of(value: object) -> FinishReason:
    """Translate an engine's finish reason."""
    return FinishReason.STOP if value == "stop" else FinishReason.LENGTH
