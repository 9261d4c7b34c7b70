"""Checks of JSON values. In Python a bool is an int, but in JSON true and false are not numbers."""

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_object(value: object) -> Mapping[str, Any]:
    """The value if it is a JSON object, otherwise an empty object."""
    return value if isinstance(value, dict) else {}
