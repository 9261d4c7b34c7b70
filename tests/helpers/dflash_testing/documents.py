"""Check JSON documents against their published schemas, without keys that the schemas lack."""

import json
from functools import cache
from typing import Any

import pytest

from dflash_cli.documents.kinds import KINDS, read_schema


def check_document(document: dict[str, Any]) -> None:
    """Require that a document fits the schema of its kind and has no other key."""
    by_class = [
        [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
        for validator in _validators(document["kind"])
    ]
    problems = min(by_class, key=len)
    assert not problems, problems[:5]


def check_printed(text: str) -> None:
    """Check the printed text of a command like `check_document` if it is a document of this project."""
    if (
        text.startswith('{"schema_version"')
        and text.count("\n") == 1
        and (document := json.loads(text))["kind"] in KINDS
    ):
        check_document(document)


@cache
def _validators(kind: str) -> tuple[Any, ...]:
    """Return a validator for each class of documents of a kind. Skips the test if jsonschema is not installed."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    schema = read_schema(kind)
    validator.check_schema(schema)
    defs = {"$defs": schema.get("$defs", {})}
    return tuple(validator(_closed(item | defs)) for item in schema.get("anyOf", [schema]))


def _closed(schema: Any) -> Any:
    """The schema without room for keys that it does not name. Published schemas have it: readers outlive versions."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        found["properties"] = {name: _closed(item) for name, item in schema["properties"].items()}
        found["additionalProperties"] = False
    return found
