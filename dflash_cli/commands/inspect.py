"""`dflash inspect`: describe a checkpoint, or show how two differ."""

from pathlib import Path
from typing import Annotated

import typer

from dflash_cli import console
from dflash_cli.options import JsonOption
from dflash_runtime.errors import UsageError

ReferenceArg = Annotated[str, typer.Argument(metavar="REF", help="A directory, org/repo[@revision], or tiny.")]
OtherArg = Annotated[
    str | None, typer.Argument(metavar="REF2", help="Second checkpoint: show how it differs from the first.")
]
TensorsOption = Annotated[
    bool, typer.Option("--tensors", help="List every tensor; with two checkpoints, every tensor that differs.")
]


def inspect(
    reference: ReferenceArg, other: OtherArg = None, tensors: TensorsOption = False, as_json: JsonOption = False
) -> None:
    """Describe a draft or a target; with two references, show the differences."""
    if other is None:
        _describe_one(reference, with_tensors=tensors, as_json=as_json)
    else:
        _compare_two(reference, other, with_tensors=tensors, as_json=as_json)


def _describe_one(reference: str, *, with_tensors: bool, as_json: bool) -> None:
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.references import Role, find_checkpoint
    from dflash_cli.checkpoints.wording import description_lines

    location = find_checkpoint(reference, Role.DRAFT)
    found = describe(location)
    if not isinstance(location, Path):
        console.status(f"{location.path}: {location.traffic.text}")
    if as_json:
        console.result_json(found.to_json(with_tensors=with_tensors))
        return
    for line in description_lines(found, with_tensors=with_tensors):
        console.result(line)
    for note in found.notes:
        console.note(note)


def _compare_two(reference: str, other: str, *, with_tensors: bool, as_json: bool) -> None:
    from dflash_cli.checkpoints.comparison import compare
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.references import Role, fetch_directory
    from dflash_cli.checkpoints.wording import difference_lines

    first, second = (describe(fetch_directory(item, Role.DRAFT)) for item in (reference, other))
    if first.kind != second.kind:
        raise UsageError(f"{reference} is a {first.kind} and {other} is a {second.kind}: they cannot be compared")
    difference = compare(first, second)
    if as_json:
        console.result_json(difference.to_json())
        return
    for line in difference_lines(difference, with_tensors=with_tensors):
        console.result(line)
