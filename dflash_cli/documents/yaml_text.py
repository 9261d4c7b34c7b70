"""YAML texts that people edit: written in a stable order, read as mappings within limits of size and time."""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from dflash_runtime.checkpoint.stored.strict_json import MAX_DEPTH, MAX_DIGITS
from dflash_runtime.errors import UsageError

MAX_CHARS = 1_000_000
BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}
"""The parser takes the square of the depth of brackets in time."""

FENCE = "---"
"""The line before and after the metadata of a model card."""

NOT_READ = (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors of the parser. A value that does not fit a stated type, such as `!!int ""`, has many of them."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses merges of mappings, which grow without a limit, and long numbers."""

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ValueError("merges (<<) are not read")

    def construct_number(self, node: Any) -> Any:
        if len(node.value) > MAX_DIGITS:
            raise ValueError(f"a number of {len(node.value)} characters")
        return self.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


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
        found = yaml.load(text, _Loader) or {}
    except NOT_READ as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{what}: not YAML: {reason}", id="invalid-yaml", path=path) from error
    if not isinstance(found, dict):
        raise UsageError(f"{what}: expected a mapping of names to values", id="not-a-mapping", path=path, found=found)
    return found


def split_card(text: str, path: Path | None) -> tuple[str, str, str]:
    """Return the metadata at the head of a model card, the text after it, and the line end of the card.

    Raises:
        UsageError: the fence after the metadata is missing.
    """
    ends = "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"
    fence = FENCE + ends
    if not text.startswith(fence):
        return "", text, ends
    head, found, body = text[len(FENCE) :].partition(f"{ends}{fence}")
    if not found:
        raise UsageError(
            "the metadata at the head of the card does not end",
            id="card-metadata-open",
            path=path,
            field=FENCE,
            hint="close it with a line ---",
        )
    return f"{head}{ends}".removeprefix(ends), body, ends
