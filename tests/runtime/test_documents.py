"""Documents: what is written, what a strict reader refuses, and the JSON Schema of a class."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from dflash_runtime.documents import (
    HIDDEN,
    INLINE,
    NOT_REQUIRED,
    OPTIONAL,
    Limits,
    computed_key,
    from_json,
    schema_of,
    to_json,
)
from dflash_runtime.errors import MISSING, CheckpointError, InvalidConfig, UnsupportedError, UsageError
from dflash_testing.refusals import refuses


class Reason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Span:
    """Lower and upper end.

    Further text is not part of the schema.
    """

    low: float
    high: Annotated[float, Limits(least=0)]

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise InvalidConfig("high", self.high, "a number that is not below low")


@dataclass(slots=True)
class Counts:
    num_steps: Annotated[int, Limits(least=0), "verify steps"]
    num_tokens: int

    @property
    @computed_key
    def mean(self) -> float | None:
        """Tokens per step."""
        return self.num_tokens / self.num_steps if self.num_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    path: Path
    num_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a test measures."""

    KIND: ClassVar[str] = "result"

    total: Annotated[Counts, INLINE]
    name: Annotated[str, "as people call it"]
    from_: str | None = None
    way: Literal["whole", "narrowed"] | None = None
    reason: Reason = Reason.STOP
    spans: tuple[Span | None, ...] = ()
    tokens: tuple[int | None, int | None] = (None, None)
    by_batch: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    settings: Annotated[Mapping[str, Any], NOT_REQUIRED] = field(default_factory=dict)
    source: Span | Other | None = None
    id: Annotated[str | int | None, OPTIONAL] = None
    exit_code: Annotated[int, HIDDEN] = 0

    @property
    def is_not_a_key(self) -> bool:
        return True


RESULT = Result(
    total=Counts(2, 5),
    name="x",
    from_="a",
    way="whole",
    reason=Reason.LENGTH,
    spans=(Span(0, 1.5), None),
    tokens=(1, None),
    by_batch={8: (1.0, 2)},
    settings={"seed": [1, {"deep": None}]},
    source=Other(path=Path("a/b"), num_texts=3),
    exit_code=7,
)
DOCUMENT = {
    "schema_version": 1,
    "kind": "result",
    "num_steps": 2,
    "num_tokens": 5,
    "mean": 2.5,
    "name": "x",
    "from": "a",
    "way": "whole",
    "reason": "length",
    "spans": [{"low": 0, "high": 1.5}, None],
    "tokens": [1, None],
    "by_batch": {"8": [1.0, 2]},
    "settings": {"seed": [1, {"deep": None}]},
    "source": {"path": "a/b", "num_texts": 3},
}


def test_a_document_is_written_with_its_kind_its_parts_and_its_computed_keys() -> None:
    assert to_json(RESULT) == DOCUMENT
    assert list(to_json(RESULT)) == [*list(DOCUMENT)[:2], "num_steps", "num_tokens", "mean", *list(DOCUMENT)[5:]]


def test_an_optional_key_is_written_only_if_it_differs_from_its_default() -> None:
    assert "id" not in to_json(RESULT)
    written = to_json(Result(total=Counts(0, 0), name="x", id=0))
    assert (written["id"], written["mean"], written["spans"]) == (0, None, [])


def test_a_document_is_read_as_it_was_written_without_hidden_fields() -> None:
    read = from_json(Result, json.loads(json.dumps(to_json(RESULT))))
    assert read == replace(RESULT, exit_code=0)


def test_a_key_may_be_missing_only_if_it_is_marked() -> None:
    document = {name: value for name, value in DOCUMENT.items() if name not in ("settings", "mean")}
    assert from_json(Result, document) == replace(RESULT, settings={}, exit_code=0)
    for name in document:
        with refuses(InvalidConfig, "missing-key", field=name, found=MISSING):
            from_json(Result, {key: value for key, value in document.items() if key != name})


def changed(*path: str | int, to: object) -> dict[str, Any]:
    """The document with another value at a path; MISSING removes the key."""
    document: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    holder: Any = document
    for step in path[:-1]:
        holder = holder[step]
    if to is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = to
    return document


WRONG: dict[str, tuple[Any, str, str, Any]] = {
    "missing": (changed("name", to=MISSING), "missing-key", "name", MISSING),
    "missing in a part": (changed("num_steps", to=MISSING), "missing-key", "num_steps", MISSING),
    "missing inside": (changed("spans", 0, "low", to=MISSING), "missing-key", "spans[0].low", MISSING),
    "unknown": (changed("names", to=1), "unknown-key", "names", 1),
    "unknown inside": (changed("spans", 0, "mid", to=1), "unknown-key", "spans[0].mid", 1),
    "hidden": (changed("exit_code", to=1), "unknown-key", "exit_code", 1),
    "text for a number": (changed("num_steps", to="2"), "wrong-value", "num_steps", "2"),
    "true for a number": (changed("num_steps", to=True), "wrong-value", "num_steps", True),
    "fraction for a whole number": (changed("num_steps", to=2.0), "wrong-value", "num_steps", 2.0),
    "below a limit": (changed("num_steps", to=-1), "wrong-value", "num_steps", -1),
    "infinite": (changed("spans", 0, "high", to=math.inf), "wrong-value", "spans[0].high", math.inf),
    "null for a key that is left out": (changed("id", to=None), "wrong-value", "id", None),
    "null": (changed("name", to=None), "wrong-value", "name", None),
    "not a choice": (changed("way", to="wide"), "wrong-value", "way", "wide"),
    "not of the enumeration": (changed("reason", to="error"), "wrong-value", "reason", "error"),
    "object for a list": (changed("spans", to={}), "wrong-value", "spans", {}),
    "too many items": (changed("tokens", to=[1, 2, 3]), "wrong-value", "tokens", [1, 2, 3]),
    "wrong item": (changed("tokens", 1, to="b"), "wrong-value", "tokens[1]", "b"),
    "name for a number": (changed("by_batch", "many", to=[1]), "unknown-key", "by_batch.many", "many"),
    "wrong value of a map": (changed("by_batch", "8", 1, to="b"), "wrong-value", "by_batch.8[1]", "b"),
    "list for an object": (changed("settings", to=[]), "wrong-value", "settings", []),
    "wrong computed value": (changed("mean", to="2.5"), "wrong-value", "mean", "2.5"),
    "refused by its class": (changed("spans", 0, "low", to=9), "wrong-value", "spans[0].high", 1.5),
    "part of one class": (changed("source", to={"path": "a"}), "missing-key", "source.num_texts", MISSING),
    "another kind": (changed("kind", to="lock"), "wrong-value", "kind", "lock"),
    "no kind": (changed("kind", to=MISSING), "missing-key", "kind", MISSING),
    "another version": (changed("schema_version", to=0), "wrong-value", "schema_version", 0),
    "true for a version": (changed("schema_version", to=True), "wrong-value", "schema_version", True),
    "not an object": ([1], "wrong-value", "document", [1]),
}


ONLY_READERS_REFUSE = {
    *("hidden", "unknown", "unknown inside", "name for a number"),  # a published schema is open to new keys
    *("infinite", "fraction for a whole number", "refused by its class"),  # JSON Schema cannot express these rules
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reader_names_the_field_and_the_value_that_it_refuses(name: str) -> None:
    document, id, field, found = WRONG[name]
    with refuses(InvalidConfig, id, field=field) as caught:
        from_json(Result, document)
    assert caught.value.found is found or caught.value.found == found
    assert type(caught.value.found) is type(found)
    assert caught.value.expected


def test_a_later_version_is_refused_as_unsupported() -> None:
    with refuses(UnsupportedError, "later-version", field="schema_version", found=2, path="a.json"):
        from_json(Result, changed("schema_version", to=2), path="a.json", error=UsageError)


def test_nan_is_refused() -> None:
    with refuses(InvalidConfig, "wrong-value", field="low"):
        from_json(Span, {"low": math.nan, "high": 1})


def test_the_caller_chooses_the_error_and_names_the_file() -> None:
    with refuses(UsageError, "missing-key", field="low", found=MISSING, path="a.json") as caught:
        from_json(Span, {"high": 1}, path="a.json", error=UsageError, hint="write it again")
    assert caught.value.hint == "write it again"
    with refuses(CheckpointError, "wrong-value", field="document", found=None):
        from_json(Span, None, error=CheckpointError)


def test_the_error_of_an_unknown_key_names_a_similar_key() -> None:
    with refuses(InvalidConfig, "unknown-key", field="num_step") as caught:
        from_json(Counts, {"num_step": 1, "num_tokens": 1})
    assert "num_steps" in str(caught.value.expected)


def test_a_type_that_json_lacks_is_refused() -> None:
    @dataclass
    class Wrong:
        items: set[int]

    with pytest.raises(TypeError):
        from_json(Wrong, {"items": []})
    with pytest.raises(TypeError):
        to_json(Wrong({1}))


@pytest.fixture
def draft_2020() -> Any:
    """Return the validator class of JSON Schema 2020-12. Skips the test if jsonschema is not installed."""
    return pytest.importorskip("jsonschema").Draft202012Validator


def test_a_schema_describes_every_key_and_holds_what_is_written(draft_2020: Any) -> None:
    schema = schema_of("A result", Result)
    draft_2020.check_schema(schema)
    validator = draft_2020(schema)
    validator.validate(DOCUMENT)
    properties = schema["properties"]
    assert schema["title"] == "A result"
    assert schema["required"] == list(DOCUMENT)  # a default does not make a key optional, OPTIONAL does
    assert properties["name"] == {"type": "string", "description": "as people call it"}
    assert properties["num_steps"] == {"type": "integer", "minimum": 0, "description": "verify steps"}
    assert properties["mean"] == {"type": ["number", "null"], "description": "Tokens per step."}
    assert properties["kind"] == {"const": "result"}
    assert properties["id"] == {"type": ["string", "integer"]}  # left out instead of null
    assert properties["settings"] == {"type": "object", "additionalProperties": {}}
    assert properties["by_batch"]["additionalProperties"] == {"type": "array", "items": {"type": "number"}}
    assert schema["$defs"]["Span"]["description"] == "Lower and upper end."
    assert "exit_code" not in properties
    for name in WRONG.keys() - ONLY_READERS_REFUSE:
        assert not validator.is_valid(WRONG[name][0]), name


def test_a_schema_of_two_classes_takes_either(draft_2020: Any) -> None:
    validator = draft_2020(schema_of("Either", Span, Other))
    assert validator.is_valid({"low": 0, "high": 1})
    assert validator.is_valid({"path": "a", "num_texts": 1})
    assert not validator.is_valid({"low": 0})
