"""`dflash convert`: write a draft in another dialect, with a manifest of every key, tensor and file."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_cli.conversion.request import ConversionRequest, Verification
from dflash_cli.formats.dialect import get_writable, writable_formats
from dflash_cli.terminal import console
from dflash_cli.terminal.options import CausalityOption, ForceOption, JsonOption
from dflash_cli.terminal.parameters import ESSENTIALS, parse_size

if TYPE_CHECKING:
    from dflash_cli.conversion.byte_progress import Progress
    from dflash_cli.conversion.changes import Change
    from dflash_cli.conversion.plan import ConversionPlan


LEGEND = (
    "kept: copied under its name; moved: in another place; renamed: under another name; split: rows of a fused tensor; "
    "derived: made for the new dialect; dropped: not in the result"
)
"""What the words mean that `--dry-run` prints before each key, tensor and file."""


def _check_dialect(name: str) -> str:
    get_writable(name)
    return name


def _complete_dialect(typed: str) -> list[tuple[str, str]]:
    return [(item.name, item.title) for item in writable_formats() if item.name.startswith(typed)]


SourceArg = Annotated[
    str, typer.Argument(metavar="SRC", help="Draft to convert: a directory, org/repo[@revision], or tiny.")
]
DestinationArg = Annotated[Path, typer.Argument(metavar="DST", help="Directory to create, in a folder that exists.")]
ToOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIALECT",
        help=f"Dialect to write: {', '.join(item.name for item in writable_formats())}. A dialect named after an "
        "engine is the native one with every key set so that the engine reads the draft as it was trained.",
        callback=_check_dialect,
        autocompletion=_complete_dialect,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="TARGET",
        help="Target of the draft, from which DST gets what SRC does not state, and with whose tensors SRC is compared "
        "before tensors are dropped: a directory, org/repo[@revision], or tiny.",
        rich_help_panel=ESSENTIALS,
    ),
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier", metavar="NAME", help="Name to store for the target (its verifier). Default: its hub id."
    ),
]
VerifyOption = Annotated[
    Verification,
    typer.Option(
        "--verify",
        help="How to check the result: roundtrip reads it back; logits also runs SRC and DST on the CPU and compares "
        "their logits; none does neither.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and write nothing.")]
LossyOption = Annotated[
    bool,
    typer.Option(
        "--allow-lossy", help="Convert even where the new dialect cannot hold all of the draft's settings or tensors."
    ),
]
TapsOption = Annotated[
    bool,
    typer.Option(
        "--normalise-taps", help="Sort the tapped target layers, list each once, and reorder fc.weight to match."
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest size of a weight file, such as 500M or 5G, in units of 1,024. Default: the same files as SRC.",
    ),
]


def convert(
    source: SourceArg,
    destination: DestinationArg,
    to: ToOption,
    target: TargetOption = None,
    verifier: VerifierOption = None,
    dry_run: DryRunOption = False,
    verify: VerifyOption = "roundtrip",
    allow_lossy: LossyOption = False,
    causality: CausalityOption = None,
    normalise_taps: TapsOption = False,
    max_shard_size: ShardOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a draft to another dialect, a checkpoint format. Tensors are copied byte for byte.

    conversion.json in the result lists what became of every config key, tensor and file.
    """
    from dflash_cli.checkpoints.opening import open_draft, open_target
    from dflash_cli.checkpoints.references import TINY, Role, fetch_directory, is_bundled
    from dflash_cli.conversion.destination import check_destination, protect_inputs
    from dflash_cli.conversion.execute import convert_draft
    from dflash_cli.conversion.plan import plan_conversion
    from dflash_cli.conversion.staging import clear_remains

    max_shard_bytes = None if max_shard_size is None else parse_size(max_shard_size, "--max-shard-size")
    check_destination(destination, force=force)
    for remain in clear_remains(destination, is_dry=dry_run):
        console.warn(remain)
    if target is None and is_bundled(source):
        target = TINY
    request = ConversionRequest(
        to=to,
        target=None if target is None else open_target(fetch_directory(target, Role.TARGET)),
        target_reference=target,
        verifier=verifier,
        allow_lossy=allow_lossy,
        normalise_taps=normalise_taps,
        max_shard_bytes=max_shard_bytes,
        argv=("dflash", *sys.argv[1:]),
    )
    plan = plan_conversion(open_draft(fetch_directory(source, Role.DRAFT), causality=causality), request)
    protect_inputs(destination, plan)
    for warning in plan.warnings:
        console.warn(warning)
    console.status(_summary(plan))
    if dry_run:
        _show_dry_run(plan, as_json=as_json)
        return
    with _bars() as progress:
        manifest = convert_draft(plan, destination, verification=verify, progress=progress, force=force)
    if verify == "logits":
        console.status(_logits(manifest["logits"]))
    if as_json:
        console.result_json({"destination": str(destination), **manifest})
    else:
        console.result(str(destination))


def _show_dry_run(plan: "ConversionPlan", *, as_json: bool) -> None:
    if as_json:
        console.result_json({"dry_run": True, **plan.to_json()})
        return
    console.status(LEGEND)
    for change in (*plan.key_changes, *plan.tensor_changes, *plan.file_changes):
        is_same = change.result in (None, change.source)
        names = change.source if is_same else f"{change.source or '-'} -> {change.result}"
        console.result(f"{change.kind:8} {names}{f'  ({change.why})' if change.why else ''}")
    for name, tensors in plan.files.items():
        console.result(f"{'writes':8} {name}  ({sum(tensor.num_bytes for tensor in tensors)} bytes of weights)")


def _summary(plan: "ConversionPlan") -> str:
    keys, tensors = _counts(plan.key_changes), _counts(plan.tensor_changes)
    return (
        f"{plan.draft.format.name} -> {plan.format.name}: tensors {tensors}; config keys {keys}; "
        f"{plan.num_bytes / 1e6:.1f} MB of weights"
    )


def _logits(found: dict[str, float]) -> str:
    return (
        f"logits: the largest difference is {found['max_difference']:g} where the largest logit is "
        f"{found['largest_logit']:g}; {found['same_best_share']:.2%} of the positions have the same best token"
    )


def _counts(changes: "Sequence[Change]") -> str:
    counts = Counter(change.kind for change in changes)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


@contextmanager
def _bars() -> "Iterator[Progress]":
    """A progress bar for each stage of the conversion, in bytes."""
    with console.progress() as display:
        tasks: dict[str, Any] = {}

        def advance(stage: str, count: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total, figures="")
            display.advance(tasks[stage], count)
            done = display.tasks[tasks[stage]].completed
            display.update(tasks[stage], figures=f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

        yield advance
