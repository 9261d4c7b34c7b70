"""JSON as a checkpoint may hold it, read strictly, so that what is read is what every other reader sees."""

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
"""Of an integer: more than any that is read, and fewer than Python refuses to turn into one."""

MAX_DEPTH = 64
"""Of objects and lists in one another: many times what a config has, and far from where Python's own functions stop."""

TOO_DEEP = f"nested too deeply to be a config, expected at most {MAX_DEPTH} levels"
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object strictly: UTF-8, no duplicate keys, no NaN or Infinity.

    Raises:
        CheckpointError: absent, too large, not JSON, or not an object.
    """
    try:
        size = regular_size(path)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{size} bytes, expected at most {MAX_JSON_BYTES}", path=path)
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            "not found, expected a checkpoint's config", path=path, hint="pass the directory that holds config.json"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    return parse_json(text, path)


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object with the strictness `read_json` promises."""
    if text.startswith(codecs.BOM_UTF8):
        raise CheckpointError(
            "begins with a byte order mark, expected plain UTF-8",
            path=path,
            hint=f"write it without one: sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}",
        )
    try:
        decoded = text.decode("utf-8")
        value = json.loads(
            decoded,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_small,
        )
        if ESCAPED_SURROGATE.search(decoded):  # pairs are characters, halves cannot be written to a file again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise CheckpointError(TOO_DEEP, path=path) from error
    except UnicodeEncodeError as error:
        raise CheckpointError("not valid JSON: half a surrogate pair", path=path) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"not UTF-8 at byte {error.start}", path=path) from error
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"found a JSON {type(value).__name__}, expected an object", path=path)
    if _is_deeper(value, MAX_DEPTH):
        raise CheckpointError(TOO_DEEP, path=path)
    return value


def _is_deeper(value: dict[str, Any], depth: int) -> bool:
    """Whether objects and lists lie in one another more than `depth` levels deep."""
    level: list[Any] = [value]
    for _ in range(depth):
        inner = (item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder))
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


def regular_size(file: Path) -> int:
    """The size of a regular file; a pipe or a device would keep a reader waiting.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be looked at.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("not a regular file", path=file)
    return found.st_size


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _small(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large")
    value = int(text)
    if abs(value) >= 2**64:
        raise ValueError(f"{text[:20]}... is too large")
    return value
