"""JSON documents as dataclasses: one declaration gives the writer, the strict reader and the JSON Schema.

Each field is a key of the object, and its type says which values the key takes. Markers in `Annotated` say the rest:

    a string      description of the key, for the schema
    Limits(...)   range of a number
    INLINE        the keys of the field's object are written into the enclosing object
    OPTIONAL      the key is left out while the field has its default value
    NOT_REQUIRED  the key is always written, but a reader accepts a document without it
    HIDDEN        the field is not a key

On reading, a hidden field and a field without a key get their default values.

`computed_key` turns a property into a key: it is written and described like a field, and checked but ignored on
reading. A class with a `KIND` begins with the keys `schema_version` and `kind`; `VERSION_KEY` renames the first. A
trailing underscore of a field's name (`from_`) is not part of the key.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from dflash_runtime.errors import DFlashError, InvalidConfig, UnsupportedError
from dflash_runtime.json_types import Defs, head_of, json_type, keys_of, object_schema, read_as
from dflash_runtime.json_values import is_int
from dflash_runtime.key_marks import HIDDEN, INLINE, NOT_REQUIRED, OPTIONAL, Limits, computed_key

__all__ = [
    "HIDDEN", "INLINE", "NOT_REQUIRED", "OPTIONAL", "Limits", "computed_key", "copy_fields", "fields_of", "from_json",
    "schema_of", "to_json",
]  # fmt: skip

Read = TypeVar("Read")
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = frozenset({NoneType, bool, int, float, str})


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, to make an object of a subclass."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def copy_fields(kind: type[Read], source: Any, **others: Any) -> Read:
    """An object of class `kind`. Fields without a value in `others` are attributes of `source`."""
    found: Any = kind
    shared = {field.name: getattr(source, field.name) for field in fields(found) if field.name not in others}
    return kind(**shared, **others)


def to_json(value: Any) -> Any:
    """The JSON value of a document, or of anything that a document holds.

    Raises:
        TypeError: the value cannot be written as JSON.
    """
    if type(value) in PLAIN:
        return value
    if is_dataclass(value):
        return _object_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in PLAIN else to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path | str):
        return str(value)
    raise TypeError(f"a document cannot hold {value!r}")


def from_json(
    kind: type[Read],
    value: object,
    *,
    path: object = None,
    error: type[DFlashError] = InvalidConfig,
    hint: str | None = None,
) -> Read:
    """Read a document of class `kind` strictly.

    Raises:
        error: a key is missing, unknown or holds a wrong value. Its id is `missing-key`, `unknown-key` or
            `wrong-value`; `path`, `field` (such as `runs[2].seconds`), `found` and `expected` say where and why.
        UnsupportedError: the document has a later schema version.
    """
    hint_of_kind: Any = kind
    _refuse_later_version(hint_of_kind, value, path)
    try:
        read: Read = read_as(json_type(hint_of_kind), value, "")
        return read
    except InvalidConfig as wrong:
        message = "" if wrong.expected is not None else wrong.message
        facts: dict[str, Any] = {"field": wrong.field, "found": wrong.found, "expected": wrong.expected or message}
        raise error(**facts, id=wrong.id, path=path, hint=hint) from None


def _refuse_later_version(kind: Any, value: object, path: object) -> None:
    """Raise UnsupportedError for a document of this kind with a later schema version."""
    if hasattr(kind, "KIND") and isinstance(value, Mapping) and value.get("kind") == kind.KIND:
        (name, known), _ = head_of(kind)
        found = value.get(name)
        if is_int(found) and found > known:
            hint = "a later release wrote it: upgrade dflash-cli"
            facts: dict[str, Any] = {"field": name, "found": found, "expected": f"at most {known}"}
            raise UnsupportedError(**facts, id="later-version", path=path, hint=hint)


def schema_of(title: str, *kinds: type) -> dict[str, Any]:
    """JSON Schema of a document that has one of these classes."""
    defs: Defs = {}
    found = [object_schema(kind, defs) for kind in kinds]
    body = found[0] if len(found) == 1 else {"anyOf": found}
    head = {"$schema": SCHEMA_DIALECT, "title": title}
    return head | body | ({"$defs": dict(sorted(defs.items()))} if defs else {})


def _object_to_json(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind: Any = type(value)
    for key in keys_of(kind):
        item = getattr(value, key.attribute) if key.constant is None else key.constant
        if key.is_inline:
            found |= _object_to_json(item)
        elif not (key.is_optional and item == key.default):
            found[key.name] = to_json(item)
    return found
