"""JSON documents held to their published schemas, and to nothing beyond them."""

import json
from functools import cache
from typing import Any

from dflash_cli.commands.schema import kinds, read_schema


def check_document(document: dict[str, Any]) -> None:
    """Require that a document is as the schema of its kind says, without a key that the schema lacks."""
    problems = [f"{error.json_path}: {error.message}" for error in _validator(document["kind"]).iter_errors(document)]
    assert not problems, problems[:5]


def check_printed(text: str) -> None:
    """The same of what a command printed, where that is a document of ours."""
    if (
        text.startswith('{"schema_version"')
        and text.count("\n") == 1
        and (document := json.loads(text))["kind"] in kinds()
    ):
        check_document(document)


@cache
def _validator(kind: str) -> Any:
    from jsonschema import Draft202012Validator

    schema = read_schema(kind)
    Draft202012Validator.check_schema(schema)
    # A definition stays open, since others add to it; closed is each place where an object is whole.
    definitions = {name: _closed(item, is_part=True) for name, item in schema.pop("$defs", {}).items()}
    return Draft202012Validator(_closed(schema) | {"$defs": definitions})


def _closed(schema: Any, *, is_part: bool = False) -> Any:
    """The schema without room for keys that it does not name. Published ones have it: readers outlive versions."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: [_closed(item, is_part=True) for item in value] if key == "allOf" else _closed(value)
        for key, value in schema.items()
        if key != "properties"
    }
    if "properties" in schema:
        found["properties"] = {name: _closed(item) for name, item in schema["properties"].items()}
    names_keys = "properties" in schema or str(schema.get("$ref", "")).startswith("#/$defs/")
    return found | ({"unevaluatedProperties": False} if names_keys and not is_part else {})
