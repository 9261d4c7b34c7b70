"""Read fields of a config that must have a type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_runtime.errors import MISSING, InvalidConfig
from dflash_runtime.json_values import is_int, is_number


def require_int(config: Mapping[str, Any], key: str, path: Path) -> int:
    """Return an integer that the config must state."""
    value = config.get(key, MISSING)
    if not is_int(value):
        raise InvalidConfig(key, value, "an integer", path=path)
    return value


def require_number(config: Mapping[str, Any], key: str, path: Path) -> float:
    """Return a number that the config must state."""
    return float(number_of(config.get(key, MISSING), key, path))


def optional(config: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise InvalidConfig(key, value, f"a {kind.__name__}", path=path)
    return value


def number_of(value: Any, key: str, path: Path) -> float:
    if not is_number(value):
        raise InvalidConfig(key, value, "a number", path=path)
    return value
