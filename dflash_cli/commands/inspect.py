"""`dflash inspect`: describe a checkpoint, or show how two differ."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import JsonOption
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.checkpoints.references import Location

ReferenceArg = Annotated[str, typer.Argument(metavar="REF", help="A directory, org/repo[@revision], or tiny.")]
OtherArg = Annotated[
    str | None, typer.Argument(metavar="REF2", help="Second checkpoint: show how it differs from the first.")
]
TensorsOption = Annotated[
    bool, typer.Option("--tensors", help="List every tensor; with two checkpoints, every tensor that differs.")
]

ValuesOption = Annotated[
    bool,
    typer.Option(
        "--values",
        help="With two checkpoints, download those on the hub to compare the values of tensors too. Without it, only "
        "configs and headers are read from the hub; two directories are always compared in full.",
    ),
]


def inspect(
    reference: ReferenceArg,
    other: OtherArg = None,
    tensors: TensorsOption = False,
    values: ValuesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Describe a draft or a target; with two references, show the differences."""
    if other is None:
        if values:
            raise UsageError("--values compares two checkpoints", hint="give a second one after the first")
        _describe_one(reference, with_tensors=tensors, as_json=as_json)
    else:
        _compare_two(reference, other, with_tensors=tensors, with_values=values, as_json=as_json)


def _describe_one(reference: str, *, with_tensors: bool, as_json: bool) -> None:
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.references import Role, find_checkpoint
    from dflash_cli.checkpoints.wording import description_lines

    location = find_checkpoint(reference, Role.DRAFT)
    found = describe(location)
    _tell_traffic(location)
    if as_json:
        console.result_json(found.to_json(with_tensors=with_tensors))
        return
    for line in description_lines(found, with_tensors=with_tensors):
        console.result(line)
    for note in found.notes:
        console.note(note)


def _compare_two(reference: str, other: str, *, with_tensors: bool, with_values: bool, as_json: bool) -> None:
    from dflash_cli.checkpoints.comparison import compare
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.references import Role, find_checkpoint
    from dflash_cli.checkpoints.wording import difference_lines

    locations = [find_checkpoint(item, Role.DRAFT, needs_weights=with_values) for item in (reference, other)]
    first, second = map(describe, locations)
    for location in locations:
        _tell_traffic(location)
    if first.kind != second.kind:
        raise UsageError(f"{reference} is a {first.kind} and {other} is a {second.kind}: they cannot be compared")
    difference = compare(first, second, with_values=all(isinstance(item, Path) for item in locations))
    if as_json:
        console.result_json(difference.to_json())
        return
    for line in difference_lines(difference, with_tensors=with_tensors):
        console.result(line)
    if difference.num_not_compared:
        console.note("only headers were read from the hub; --values downloads the weights and compares them too")


def _tell_traffic(location: "Location") -> None:
    if not isinstance(location, Path):
        console.status(f"{location.path}: {location.traffic.text}")
