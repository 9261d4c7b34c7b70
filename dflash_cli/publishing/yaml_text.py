"""YAML texts that people edit: written in a stable order, read as mappings."""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from dflash_runtime.checkpoint.strict_json import MAX_DEPTH
from dflash_runtime.errors import UsageError

MAX_CHARS = 1_000_000
BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}
"""The parser takes the square of the depth of brackets in time."""


def to_yaml(content: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in the order of its keys."""
    return str(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))


def read_yaml(text: str, what: str, path: Path | None) -> dict[str, Any]:
    """Return the mapping in a YAML text; empty for an empty text. `what` names the text in errors.

    Raises:
        UsageError: the text is not YAML, is too long or nested too deeply, or is not a mapping.
    """
    deepest = max(accumulate(BRACKETS.get(mark, 0) for mark in text), default=0)
    if len(text) > MAX_CHARS or deepest > MAX_DEPTH:
        expected = f"at most {MAX_CHARS} characters and {MAX_DEPTH} levels"
        raise UsageError(f"{what}: too long or nested too deeply, expected {expected}", id="yaml-too-large", path=path)
    try:
        found = yaml.safe_load(text) or {}
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{what}: not YAML: {str(error).splitlines()[0]}", id="invalid-yaml", path=path) from error
    if not isinstance(found, dict):
        raise UsageError(f"{what}: expected a mapping of names to values", id="not-a-mapping", path=path, found=found)
    return found
