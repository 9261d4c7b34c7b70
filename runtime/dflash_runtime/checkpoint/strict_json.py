"""A strict JSON reader: it refuses files that other readers could read with another result."""

import codecs
import json
import math
import re
import shlex
import stat
from pathlib import Path
from typing import Any

from dflash_runtime.errors import CheckpointError

MAX_JSON_BYTES = 64_000_000
MAX_DIGITS = 100
"""The most digits of an integer: more than any valid value has, and fewer than Python refuses to convert."""

MAX_DEPTH = 64
"""The most objects and lists inside one another. Configs have far fewer, and Python's own functions stop far later."""

ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _BadValue(ValueError):
    """A key or number that strict JSON refuses. `id` and `found` go into the CheckpointError."""

    def __init__(self, id: str, found: str, message: str) -> None:
        super().__init__(message)
        self.id, self.found = id, found


def read_json(path: Path, *, is_config: bool = False) -> dict[str, Any]:
    """Read a JSON object strictly: UTF-8, no duplicate keys, no NaN or Infinity.

    A config may hold NaN and Infinity, as Python writes them. Readers of a number refuse them.

    Raises:
        CheckpointError: the file is absent, too large, not JSON, or not an object.
    """
    try:
        size = regular_size(path)
        if size > MAX_JSON_BYTES:
            raise too_large_json(size, path)
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            "not found, expected a checkpoint's config",
            id="config-missing",
            path=path,
            expected="a checkpoint's config",
            hint="pass the directory that holds config.json",
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", id="file-unreadable", path=path) from error
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
        decoded = text.decode("utf-8")
        value = json.loads(
            decoded,
            object_pairs_hook=_unique_keys,
            parse_constant=float if is_config else _refuse_constant,
            parse_float=float if is_config else _finite,
            parse_int=_small,
        )
        if ESCAPED_SURROGATE.search(decoded):  # a pair is a character; half a pair cannot be written to a file again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise _too_deep(path) from error
    except UnicodeEncodeError as error:
        raise CheckpointError("not valid JSON: half a surrogate pair", id="json-half-surrogate", path=path) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"not UTF-8 at byte {error.start}", id="json-not-utf8", path=path, found=error.start
        ) from error
    except _BadValue as error:
        raise CheckpointError(f"not valid JSON: {error}", id=error.id, path=path, found=error.found) from error
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {error}", id="not-json", path=path) from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise CheckpointError(
            f"found a JSON {kind}, expected an object",
            id="json-not-an-object",
            path=path,
            found=kind,
            expected="an object",
        )
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep(path)
    return value


def too_large_json(size: int, path: Path) -> CheckpointError:
    """Return the error about a JSON file of more than MAX_JSON_BYTES bytes."""
    text = f"{size} bytes, expected at most {MAX_JSON_BYTES}"
    return CheckpointError(text, id="json-too-large", path=path, found=size, expected=f"at most {MAX_JSON_BYTES} bytes")


def _too_deep(path: Path) -> CheckpointError:
    text = f"nested too deeply to be a config, expected at most {MAX_DEPTH} levels"
    return CheckpointError(text, id="json-too-deep", path=path, expected=f"at most {MAX_DEPTH} levels")


def _is_deeper(value: dict[str, Any], depth: int) -> bool:
    """Whether objects and lists are nested more than `depth` levels deep."""
    level: list[Any] = [value]
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
