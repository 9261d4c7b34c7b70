"""Strict readers of documents: from text to an object of the document's class."""

from pathlib import Path
from typing import Any, TypeVar

from dflash_runtime.checkpoint.strict_json import parse_json
from dflash_runtime.documents import from_json
from dflash_runtime.errors import CheckpointError, DFlashError, UsageError

Read = TypeVar("Read")


def read_document(
    kind: type[Read], text: bytes, path: object, *, error: type[DFlashError] = UsageError, hint: str | None = None
) -> Read:
    """Read the JSON text of a document of class `kind`; `path` is where it is from, for errors.

    Raises:
        error: the text is not JSON, or a key is missing, unknown or holds a wrong value.
        UnsupportedError: the document has a later schema version.
    """
    return from_json(kind, parse_object(text, path, error=error), path=path, error=error, hint=hint)


def parse_object(text: bytes, path: object, *, error: type[DFlashError] = UsageError) -> dict[str, Any]:
    """Parse a JSON object strictly; see `parse_json`.

    Raises:
        error: the text is not JSON, not an object, or nested too deeply.
    """
    try:
        return parse_json(text, Path(str(path)))
    except CheckpointError as wrong:
        message = wrong.message.removeprefix(f"{path}: ")
        id = "not-a-document" if wrong.id == "checkpoint-error" else wrong.id
        raise error(message, id=id, path=path, found=wrong.found, hint=wrong.hint) from wrong
