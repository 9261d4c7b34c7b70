"""YAML texts that people edit: written in a stable order, read as mappings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dflash_runtime.errors import UsageError


def to_yaml(content: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in the order of its keys."""
    return str(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))


def read_yaml(text: str, what: str, path: Path | None) -> dict[str, Any]:
    """Return the mapping in a YAML text; empty for an empty text. `what` names the text in errors.

    Raises:
        UsageError: the text is not YAML, or not a mapping.
    """
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"{what}: not YAML: {str(error).splitlines()[0]}", id="invalid-yaml", path=path) from error
    if not isinstance(found, dict):
        raise UsageError(f"{what}: expected a mapping of names to values", id="not-a-mapping", path=path, found=found)
    return found
