"""What a JSON value is; in Python a bool is an int as well, in a config it never is one."""

from typing import TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an integer or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)
