"""`dflash inspect`: describe a checkpoint, or show how two differ."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal import console
from dflash_cli.terminal.requests import ESSENTIALS, Argument, Option, Request, verb
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from dflash_cli.checkpoints.comparison import Difference
    from dflash_cli.checkpoints.description import Description
    from dflash_cli.checkpoints.references import Location


@dataclass(frozen=True, kw_only=True)
class InspectionRequest(Request):
    """Describe a draft or a target; with two references, show the differences."""

    reference: Annotated[
        str,
        Argument(
            flag="--draft",
            short="-d",
            metavar="REF",
            help="A directory, a hub repository org/repo[@revision], or tiny.",
        ),
    ]
    other: Annotated[
        str | None, Argument(metavar="REF2", help="Second checkpoint: show how it differs from the first.")
    ] = None
    tensors: Annotated[
        bool,
        Option(group=ESSENTIALS, help="List every tensor; with two checkpoints, every tensor that differs."),
    ] = False
    values: Annotated[
        bool,
        Option(
            group=ESSENTIALS,
            help="With two checkpoints: download hub repositories and compare tensor values. Default: compare only "
            "their configs and headers. Directories are always compared in full.",
        ),
    ] = False

    def check(self) -> None:
        super().check()
        if self.values and self.other is None:
            raise UsageError(
                "--values needs two checkpoints", id="option-needs-another", field="--values",
                hint="give a second one after the first",
            )  # fmt: skip


@verb(InspectionRequest)
def inspect(request: InspectionRequest) -> "Description | Difference":
    """Describe one checkpoint, or the differences of two.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: a checkpoint is absent or cannot be read.
        UsageError: one checkpoint is a draft and the other a target.
    """
    from dflash_cli.checkpoints.comparison import compare
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.references import Role, find_checkpoint

    names = [request.reference, *([] if request.other is None else [request.other])]
    locations = [find_checkpoint(item, Role.DRAFT, needs_weights=request.values and len(names) > 1) for item in names]
    found = [describe(item) for item in locations]
    tell_traffic(*locations)
    if len(found) == 1:
        return found[0]
    first, second = found
    if first.kind != second.kind:
        raise UsageError(
            f"{names[0]} is a {first.kind} and {names[1]} is a {second.kind}: they cannot be compared",
            id="kinds-differ", field="REF2", found=second.kind, expected=first.kind,
            hint="compare two drafts or two targets",
        )  # fmt: skip
    return compare(first, second, with_values=all(isinstance(item, Path) for item in locations))


def command(request: InspectionRequest) -> None:
    """Describe or compare, and print."""
    from dflash_cli.checkpoints.description import Description, inspect_document
    from dflash_cli.checkpoints.wording import description_lines, difference_lines

    found = inspect(request)
    if isinstance(found, Description):
        if console.is_json():
            console.result_json(inspect_document(found, with_tensors=request.tensors))
            return
        for line in description_lines(found, with_tensors=request.tensors):
            console.result(line)
        for note in found.notes:
            console.note(note)
        return
    if console.is_json():
        console.result_json(found.document)
        return
    for line in difference_lines(found, with_tensors=request.tensors):
        console.result(line)
    if found.num_not_compared:
        text = "only headers were read from the hub; --values downloads the weights and compares them too"
        console.note(Notice(text, id="values-not-compared"))


def tell_traffic(*locations: "Location | None") -> None:
    """Print how much was read from the hub for each repository."""
    for location in locations:
        if location is not None and not isinstance(location, Path):
            console.status(f"{location.path}: {location.traffic.text}")
