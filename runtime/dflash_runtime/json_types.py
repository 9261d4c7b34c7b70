"""The JSON types of Python types: the values that a type admits, how they are read, and their schema."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from dflash_runtime.errors import MISSING, DFlashError, InvalidConfig
from dflash_runtime.json_values import is_int, is_number
from dflash_runtime.key_marks import HIDDEN, INLINE, NOT_REQUIRED, OPTIONAL, Limits
from dflash_runtime.notices import Notice

Defs = dict[str, Any]

NUMBER = re.compile("0|[1-9][0-9]{0,18}")
"""A key that is a number, in its only form: `01` would be the same number as `1`."""


def head_of(kind: Any) -> tuple[tuple[str, int], tuple[str, str]]:
    """The keys that a document of this kind begins with: its version and its kind."""
    return (getattr(kind, "VERSION_KEY", "schema_version"), getattr(kind, "SCHEMA_VERSION", 1)), ("kind", kind.KIND)


class _JsonType(Protocol):
    """The type of a JSON value. `admits` checks the value itself, `read` also the values inside it."""

    @property
    def words(self) -> str: ...

    def admits(self, value: object) -> bool: ...

    def read(self, value: Any, where: str) -> Any: ...

    def schema(self, defs: Defs) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Anything:
    words: str = "any value"

    def admits(self, value: object) -> bool:
        return True

    def read(self, value: Any, where: str) -> Any:
        return value

    def schema(self, defs: Defs) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class _Scalar:
    name: str
    words: str
    admits: Callable[[object], bool]
    make: Callable[[Any], Any] = lambda value: value
    limits: Limits | None = None

    def read(self, value: Any, where: str) -> Any:
        if self.limits is not None and not self.limits.admits(value):
            raise InvalidConfig(where, value, f"{self.words}, {self.limits.words}", id="wrong-value")
        return self.make(value)

    def schema(self, defs: Defs) -> dict[str, Any]:
        return {"type": self.name} | (self.limits.schema if self.limits is not None else {})


SCALARS: Mapping[Any, _Scalar] = {
    NoneType: _Scalar("null", "null", lambda value: value is None),
    bool: _Scalar("boolean", "true or false", lambda value: isinstance(value, bool)),
    int: _Scalar("integer", "an integer", is_int),
    float: _Scalar("number", "a number", lambda value: is_number(value) and math.isfinite(value)),
    str: _Scalar("string", "a string", lambda value: isinstance(value, str)),
    Path: _Scalar("string", "a path", lambda value: isinstance(value, str), Path),
    Notice: _Scalar("string", "a string", lambda value: isinstance(value, str), partial(Notice, id="from-document")),
}


@dataclass(frozen=True, slots=True)
class _Choice:
    values: tuple[Any, ...]
    make: Callable[[Any], Any] = lambda value: value

    @property
    def words(self) -> str:
        return " or ".join(repr(value) for value in self.values)

    def admits(self, value: object) -> bool:
        return any(type(value) is type(known) and value == known for known in self.values)

    def read(self, value: Any, where: str) -> Any:
        return self.make(value)

    def schema(self, defs: Defs) -> dict[str, Any]:
        return {"enum": list(self.values)} if len(self.values) > 1 else {"const": self.values[0]}


@dataclass(frozen=True, slots=True)
class _Union:
    members: tuple[_JsonType, ...]

    @property
    def words(self) -> str:
        return " or ".join(member.words for member in self.members)

    def admits(self, value: object) -> bool:
        return any(member.admits(value) for member in self.members)

    def read(self, value: Any, where: str) -> Any:
        """Read as the member that admits the value. Of several classes, choose the one with the fewest missing keys."""
        fitting = [member for member in self.members if member.admits(value)]
        chosen = min(fitting, key=lambda item: item.num_missing(value) if isinstance(item, _Object) else 0)
        return chosen.read(value, where)

    def schema(self, defs: Defs) -> dict[str, Any]:
        found = [member.schema(defs) for member in self.members]
        if all(item.keys() == {"type"} for item in found):
            return {"type": [item["type"] for item in found]}
        return {"anyOf": found}


@dataclass(frozen=True, slots=True)
class _List:
    item: _JsonType
    make: Callable[[Any], Any]
    words: str = "a list"

    def admits(self, value: object) -> bool:
        return isinstance(value, list | tuple)

    def read(self, value: Any, where: str) -> Any:
        if self.item is SCALARS[int] and {*map(type, value)} <= {int}:  # fast, for long lists of token ids
            return self.make(value)
        return self.make([read_as(self.item, item, f"{where}[{place}]") for place, item in enumerate(value)])

    def schema(self, defs: Defs) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(defs)}


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[_JsonType, ...]

    @property
    def words(self) -> str:
        return f"a list of {len(self.items)}"

    def admits(self, value: object) -> bool:
        return isinstance(value, list | tuple) and len(value) == len(self.items)

    def read(self, value: Any, where: str) -> Any:
        pairs = enumerate(zip(self.items, value, strict=True))
        return tuple(read_as(kind, item, f"{where}[{place}]") for place, (kind, item) in pairs)

    def schema(self, defs: Defs) -> dict[str, Any]:
        size = {"minItems": len(self.items), "maxItems": len(self.items)}
        return {"type": "array", "prefixItems": [item.schema(defs) for item in self.items], **size}


@dataclass(frozen=True, slots=True)
class _Map:
    """An object with any keys. A JSON key is text, so a numbered key is written as the text of its number."""

    item: _JsonType
    is_numbered: bool
    words: str = "an object"

    def admits(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def read(self, value: Any, where: str) -> Any:
        return {self._key(key, where): read_as(self.item, item, _join(where, key)) for key, item in value.items()}

    def _key(self, key: str, where: str) -> str | int:
        if self.is_numbered and not NUMBER.fullmatch(key):
            raise InvalidConfig(_join(where, key), key, "a whole number as the key", id="unknown-key")
        return int(key) if self.is_numbered else key

    def schema(self, defs: Defs) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.schema(defs)}


@dataclass(frozen=True, slots=True)
class _Object:
    kind: type
    words: str = "an object"

    def admits(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def num_missing(self, value: Mapping[str, Any]) -> int:
        """How many keys that a reader requires are missing."""
        return sum(key.is_required and key.name not in value for key in _flat_keys(self.kind))

    def read(self, value: Any, where: str) -> Any:
        known = _flat_keys(self.kind)
        for key in known:
            if key.constant is not None:
                key.read(value, where)
        names = [key.name for key in known]
        for name in value:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                expected = f"the key {close[0]}" if close else f"one of the keys {', '.join(names)}"
                raise InvalidConfig(_join(where, name), value[name], expected, id="unknown-key")
        return _make(self.kind, value, where)

    def schema(self, defs: Defs) -> dict[str, Any]:
        name = self.kind.__name__
        if name not in defs:
            defs[name] = {}
            defs[name] = object_schema(self.kind, defs)
        return {"$ref": f"#/$defs/{name}"}


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of an object. `attribute` names the field with its value, or the property if `is_computed`."""

    name: str
    attribute: str
    type: _JsonType
    description: str = ""
    default: Any = MISSING
    constant: Any = None
    is_computed: bool = False
    is_inline: bool = False
    is_optional: bool = False
    is_required: bool = True  # by readers

    def read(self, value: Mapping[str, Any], where: str) -> Any:
        """The value of this key in an object at `where`."""
        inner = _join(where, self.name)
        if self.name not in value:
            if self.is_required:
                raise InvalidConfig(inner, MISSING, self.type.words, id="missing-key")
            return self.default
        return read_as(self.type, value[self.name], inner)

    def schema(self, defs: Defs) -> dict[str, Any]:
        return self.type.schema(defs) | ({"description": self.description} if self.description else {})


def read_as(kind: _JsonType, value: Any, where: str) -> Any:
    """The Python value of a JSON value at `where` in its document.

    Raises:
        InvalidConfig: the type does not admit the value, or a value inside it.
    """
    if not kind.admits(value):
        raise InvalidConfig(where or "document", value, kind.words, id="wrong-value")
    return kind.read(value, where)


def _make(kind: type, value: Mapping[str, Any], where: str) -> Any:
    """An object of class `kind` from its own keys in `value`. `value` may be the enclosing object."""
    given: dict[str, Any] = {}
    for key in keys_of(kind):
        if key.is_inline:
            given[key.attribute] = _make(key.type.kind, value, where)  # type: ignore[attr-defined]
        elif key.name in value or key.is_required:
            found = key.read(value, where)
            if not key.is_computed and key.constant is None:
                given[key.attribute] = found
    try:
        return kind(**given)
    except DFlashError as error:  # raised by __post_init__
        field = _join(where, error.field) if error.field else where or "document"
        raise InvalidConfig(field, error.found, error.expected or error.message, id="wrong-value") from error


def object_schema(kind: type, defs: Defs) -> dict[str, Any]:
    """JSON Schema of the objects of a class. Schemas of the classes inside it are added to `defs`."""
    keys = _flat_keys(kind)
    description = _first_line(kind.__doc__ if not (kind.__doc__ or "").startswith(f"{kind.__name__}(") else None)
    return {
        **({"description": description} if description else {}),
        "type": "object",
        "properties": {key.name: key.schema(defs) for key in keys},
        "required": [key.name for key in keys if not key.is_optional],
    }


@cache
def _flat_keys(kind: type) -> tuple[_Key, ...]:
    """The keys of an object, including the keys of its inlined parts."""
    parts = (_flat_keys(key.type.kind) if key.is_inline else (key,) for key in keys_of(kind))  # type: ignore[attr-defined]
    return tuple(key for part in parts for key in part)


@cache
def keys_of(kind: type) -> tuple[_Key, ...]:
    """The keys of a class in their order: version and kind, fields, computed keys."""
    return (*_head_keys(kind), *_field_keys(kind), *_computed_keys(kind))


def _head_keys(kind: Any) -> Iterator[_Key]:
    if hasattr(kind, "KIND"):
        for name, value in head_of(kind):
            yield _Key(name, name, _Choice((value,)), constant=value)


def _field_keys(kind: Any) -> Iterator[_Key]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        if HIDDEN in marks:
            continue
        default = MISSING if field.default is NO_DEFAULT else field.default
        if field.default_factory is not NO_DEFAULT:
            default = field.default_factory()
        kind = json_type(hints[field.name])
        if OPTIONAL in marks and default is None:
            kind = _without_null(kind)
        yield _Key(
            name=field.name.rstrip("_"),
            attribute=field.name,
            type=kind,
            description=_description(marks),
            default=default,
            is_inline=INLINE in marks,
            is_optional=OPTIONAL in marks,
            is_required=OPTIONAL not in marks and NOT_REQUIRED not in marks,
        )


def _without_null(kind: _JsonType) -> _JsonType:
    """The type of a key that is never null, because it is left out instead."""
    members = [member for member in kind.members if member is not SCALARS[NoneType]] if isinstance(kind, _Union) else []
    return members[0] if len(members) == 1 else _Union(tuple(members)) if members else kind


def _computed_keys(kind: type) -> Iterator[_Key]:
    members = {name: item for base in reversed(kind.__mro__) for name, item in vars(base).items()}
    for name, item in members.items():
        getter = getattr(item, "fget", None)
        if getattr(getter, "is_computed_key", False):
            hint = get_type_hints(getter, include_extras=True)["return"]
            marks = getattr(hint, "__metadata__", ())
            description = _description(marks) or _first_line(item.__doc__)
            is_optional = OPTIONAL in marks
            kind_of_key = {"is_computed": True, "is_optional": is_optional, "is_required": False}
            yield _Key(name, name, json_type(hint), description, None, **kind_of_key)


def _description(marks: Sequence[Any]) -> str:
    return next((mark for mark in marks if isinstance(mark, str)), "")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


@cache
def json_type(hint: Any) -> _JsonType:
    """The JSON type of a Python type.

    Raises:
        TypeError: no document can hold values of that type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is Any or hint is object:
        return _Anything()
    if is_dataclass(hint):
        return _Object(hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Choice(tuple(member.value for member in hint), hint)
    if origin is Annotated:
        limits = next((mark for mark in args[1:] if isinstance(mark, Limits)), None)
        return json_type(args[0]) if limits is None else _limited(json_type(args[0]), limits)
    if origin is Literal:
        return _Choice(args)
    if origin is Union or origin is UnionType:
        return _Union(tuple(map(json_type, args)))
    return _container_type(origin, args)


def _limited(inner: _JsonType, limits: Limits) -> _JsonType:
    if isinstance(inner, _Union):
        return _Union(tuple(_limited(member, limits) for member in inner.members))
    if isinstance(inner, _Scalar) and inner.name in ("integer", "number"):
        return _Scalar(inner.name, inner.words, inner.admits, inner.make, limits)
    return inner


def _container_type(origin: Any, args: tuple[Any, ...]) -> _JsonType:
    if origin is tuple and args[-1:] != (...,):
        return _Tuple(tuple(map(json_type, args)))
    if origin in (tuple, Sequence):
        return _List(json_type(args[0]), tuple)
    if origin is list:
        return _List(json_type(args[0]), list)
    if origin in (dict, Mapping):
        return _Map(json_type(args[1]), is_numbered=args[0] is int)
    raise TypeError(f"no document holds values of type {origin or args!r}")
