"""Penalties that a server shows as its own defaults."""

from collections.abc import Mapping
from typing import Any

from dflash_runtime.json_values import as_object, is_number


def own_penalties(settings: object, neutral: Mapping[str, Any]) -> str | None:
    """`repeat_penalty 1.2`: the penalties in a document of defaults that differ from `neutral`, or None."""
    found = as_object(settings)
    names = [name for name, value in neutral.items() if is_number(found.get(name)) and found[name] != value]
    return ", ".join(f"{name} {found[name]:g}" for name in names) or None
