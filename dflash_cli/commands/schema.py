"""`dflash schema`: what a JSON document of a kind holds, as JSON Schema."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from dflash_cli.documents.kinds import KINDS
from dflash_cli.documents.kinds import read_schema as read_generated
from dflash_cli.terminal import console
from dflash_cli.terminal.requests import Argument, Request
from dflash_runtime.errors import UsageError

COMMON = "common"


@dataclass(frozen=True, kw_only=True)
class SchemaRequest(Request):
    """Print the JSON Schema of a kind of document, as --json of the commands prints and files hold it."""

    kind: Annotated[
        str | None, Argument(metavar="KIND", help="The kind that a document states. Default: list all kinds.")
    ] = None


def command(request: SchemaRequest) -> None:
    """Print the schema of a kind, or all kinds."""
    kind = request.kind
    if kind is None:
        for name in kinds():
            console.result(f"{name:16} {read_schema(name)['title']}")
        return
    if kind not in kinds():
        raise UsageError(field="KIND", found=kind, expected=f"one of {', '.join(kinds())}")
    console.result(json.dumps(read_schema(kind), indent=2, ensure_ascii=False))


def kinds() -> list[str]:
    """Every kind of document."""
    return sorted(file.stem for file in _folder().glob("*.json") if file.stem != COMMON)


def read_schema(kind: str) -> dict[str, Any]:
    """The schema of a kind, complete in itself: with every definition that it refers to."""
    if kind in KINDS:
        return read_generated(kind)
    found: dict[str, Any] = json.loads((_folder() / f"{kind}.json").read_text(encoding="utf-8"))
    common = json.loads((_folder() / f"{COMMON}.json").read_text(encoding="utf-8"))["$defs"]
    common |= found.pop("$defs", {})
    needed: dict[str, Any] = {}
    waiting = list(_references(found))
    while waiting:
        name = waiting.pop().removeprefix("#/$defs/")
        if name not in needed:
            needed[name] = common[name]
            waiting += _references(common[name])
    return found | ({"$defs": {name: needed[name] for name in sorted(needed)}} if needed else {})


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def _folder() -> Path:
    return Path(str(files("dflash_cli") / "schemas"))
