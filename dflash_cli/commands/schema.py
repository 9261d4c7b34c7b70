"""`dflash schema`: print the JSON Schema of a kind of document."""

import json
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.documents.kinds import KINDS, read_schema
from dflash_cli.terminal import console
from dflash_cli.terminal.parameters import Argument
from dflash_cli.terminal.requests import Request
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import guess


@dataclass(frozen=True, kw_only=True)
class SchemaRequest(Request):
    """Print the JSON Schema of a kind of document, which --json of a command prints or a file contains."""

    kind: Annotated[str | None, Argument(metavar="KIND", help="The `kind` of a document. Default: list all kinds.")] = (
        None
    )


def command(request: SchemaRequest) -> None:
    """Print the schema of a kind, or all kinds."""
    kind = request.kind
    if kind is None:
        for name, item in KINDS.items():
            console.result(f"{name:16} {item.title}")
        return
    if kind not in KINDS:
        raise UsageError(
            f"no kind of document {kind!r}{guess(kind, KINDS)}", id="unknown-kind", field="KIND", found=kind,
            hint="dflash schema lists all kinds",
        )  # fmt: skip
    console.result_text(json.dumps(read_schema(kind), indent=2, ensure_ascii=False) + "\n")
