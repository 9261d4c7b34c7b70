"""Bounded readers of files and JSON from outside, and the strict reader of checkpoints' JSON.

`read_bytes` limits the size of a file, `loads` the depth and the numbers of a JSON text. `parse_json` also refuses
texts that other readers could read with another result.
"""

import codecs
import json
import math
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_runtime.errors import CheckpointError, unreadable
from dflash_runtime.json_values import json_kind

MAX_JSON_BYTES = 64_000_000
MAX_ROWS_BYTES = 2_000_000_000
"""The largest file with a JSON object on each line."""

MAX_DIGITS = 100
"""The most digits of an integer: more than any valid value has, and fewer than Python refuses to convert."""

MAX_DEPTH = 64
"""The most objects and lists inside one another. Configs have far fewer, and Python's own functions stop far later."""

ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _BadValue(ValueError):
    """A key, number or text that is refused. `id`, `found` and `expected` go into the CheckpointError."""

    def __init__(self, id: str, found: str | None, message: str, expected: str | None = None) -> None:
        super().__init__(message)
        self.id, self.found, self.expected = id, found, expected


def read_json(path: Path, *, is_config: bool = False) -> dict[str, Any]:
    """Read a JSON object strictly: UTF-8, no duplicate keys, no NaN or Infinity.

    A config may hold NaN and Infinity, as Python writes them. Readers of a number refuse them.

    Raises:
        CheckpointError: the file is absent, too large, not JSON, or not an object.
    """
    try:
        text = read_bytes(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            "not found, expected a checkpoint's config",
            id="config-missing",
            path=path,
            expected="a checkpoint's config",
            hint="pass the directory that holds config.json",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_json(text, path, is_config=is_config)


def parse_json(text: bytes, path: Path, *, is_config: bool = False) -> dict[str, Any]:
    """Parse a JSON object as strictly as `read_json`. `path` names the file in errors.

    Raises:
        CheckpointError: the text is not JSON, not an object, or nested too deeply.
    """
    if text.startswith(codecs.BOM_UTF8):
        raise CheckpointError(
            "begins with a byte order mark, expected plain UTF-8",
            id="json-byte-order-mark",
            path=path,
            expected="plain UTF-8",
            hint=f"remove the mark: sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}",
        )
    try:
        value = loads(text, CONFIG if is_config else STRICT)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"not UTF-8 at byte {error.start}", id="json-not-utf8", path=path, found=error.start
        ) from error
    except ValueError as error:
        known = error if isinstance(error, _BadValue) else _BadValue("not-json", None, str(error))
        text_of_error = str(error) if known.expected else f"not valid JSON: {error}"
        raise CheckpointError(
            text_of_error, id=known.id, path=path, found=known.found, expected=known.expected
        ) from error
    if not isinstance(value, dict):
        kind = json_kind(value)
        raise CheckpointError(
            f"found a JSON {kind}, expected an object",
            id="json-not-an-object",
            path=path,
            found=kind,
            expected="an object",
        )
    return value


def loads(text: str | bytes, hooks: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the value of a JSON text from outside.

    With the hooks `STRICT` it refuses duplicate keys, NaN and Infinity, with `CONFIG` only duplicate keys.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested more than MAX_DEPTH levels deep, or has a number of more
            than 64 bits.
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = json.loads(decoded, parse_int=_small, **hooks)
    except RecursionError as error:
        raise _too_deep() from error
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    if ESCAPED_SURROGATE.search(decoded):  # a pair is a character; half a pair cannot be written to a file again
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise _BadValue("json-half-surrogate", None, "half a surrogate pair") from error
    return value


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a regular file with at most `limit` bytes.

    Raises:
        CheckpointError: the file is a pipe or a device, or is too large.
        OSError: it cannot be read.
    """
    size = regular_size(path)  # before the file is opened, because opening a pipe would wait
    if size > limit:
        raise too_large_json(size, path, limit)
    with path.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:  # it has grown, or its size is unknown
        raise too_large_json(len(data), path, limit)
    return data


def too_large_json(size: int, path: Path, limit: int = MAX_JSON_BYTES) -> CheckpointError:
    """Return the error about a file of more than `limit` bytes."""
    text = f"{size} bytes, expected at most {limit}"
    return CheckpointError(text, id="json-too-large", path=path, found=size, expected=f"at most {limit} bytes")


def _too_deep() -> _BadValue:
    expected = f"at most {MAX_DEPTH} levels"
    return _BadValue("json-too-deep", None, f"nested too deeply, expected {expected}", expected)


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists are nested more than `depth` levels deep."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        inner = (item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder))
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


def regular_size(file: Path) -> int:
    """Return the bytes of a regular file. Refuse pipes and devices: they would keep a reader waiting.

    Raises:
        CheckpointError: the file is not a regular file.
        OSError: the file's status cannot be read.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("not a regular file", id="not-a-regular-file", path=file, expected="a regular file")
    return found.st_size


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadValue("json-duplicate-key", key, f"duplicate key {key!r}")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> None:
    raise _BadValue("json-constant", name, f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _BadValue("json-number-too-large", text, f"{text} is too large")
    return value


def _small(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _BadValue("json-number-too-large", text[:20], f"a number of {len(text)} digits is too large")
    value = int(text)
    if abs(value) >= 2**64:
        raise _BadValue("json-number-too-large", text, f"{text[:20]}... is too large")
    return value


STRICT: Mapping[str, Any] = {
    "object_pairs_hook": _unique_keys, "parse_constant": _refuse_constant, "parse_float": _finite,
}  # fmt: skip
"""Hooks of `json.loads` that refuse ambiguous values."""

CONFIG: Mapping[str, Any] = {"object_pairs_hook": _unique_keys}
"""Hooks for a config, which may hold NaN and Infinity as Python writes them."""
