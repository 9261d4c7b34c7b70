"""Checks of JSON values. In Python a bool is an int, but in JSON true and false are not numbers."""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from dflash_runtime.phrases import shorten


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number and not a bool."""
    return (isinstance(value, float) and math.isfinite(value)) or is_int(value)


def as_number(value: object) -> int | float:
    """The value if it is a finite number.

    Raises:
        TypeError: it is not. In Python a text times a number would be a long text.
    """
    if not is_number(value):
        raise TypeError(f"found {shorten(repr(value), 40)}, expected a number")
    return value


def as_object(value: object) -> Mapping[str, Any]:
    """The value if it is a JSON object, otherwise an empty object."""
    return value if isinstance(value, dict) else {}


def as_index(text: str) -> int | None:
    """The number that a key or a part of a name writes in at most 9 digits, or None. Python refuses thousands."""
    return int(text) if len(text) <= 9 and text.isascii() and text.isdigit() else None


def finite(value: Any) -> Any:
    """A JSON value in which text replaces NaN and Infinity, so that a document can hold it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_kind(value: Any) -> str:
    """Return the kind of a JSON value: `null`, `string`, `number`, `boolean`, `list` or `object`."""
    names = {type(None): "null", str: "string", bool: "boolean", int: "number", float: "number", dict: "object"}
    return names.get(type(value), "list")
