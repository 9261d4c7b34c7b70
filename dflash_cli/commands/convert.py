"""`dflash convert`: write a draft in the other dialect, with a manifest of what became of everything."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dflash_cli import console
from dflash_cli.checkpoints.opening import Causality, open_target
from dflash_cli.checkpoints.references import TINY, Role, is_bundled, resolve
from dflash_cli.conversion.execute import (
    Plan,
    Verification,
    Wish,
    check_destination,
    convert_draft,
    describe,
    plan_conversion,
)
from dflash_cli.conversion.write import Observe
from dflash_cli.options import JsonOption, TargetOption
from dflash_runtime.errors import UsageError

SourceArg = Annotated[str, typer.Argument(metavar="SRC", help="Draft: a directory, org/repo[@rev], or tiny.")]
DestinationArg = Annotated[Path, typer.Argument(metavar="DST", help="Directory to write; it must not exist.")]
ToOption = Annotated[
    Literal["native", "speculators", "sglang", "vllm", "mlx"],
    typer.Option("--to", help="Dialect to write, or the engine whose reading of the native one counts."),
]
VerifierOption = Annotated[
    str | None,
    typer.Option("--verifier", metavar="NAME", help="Name to store for the target. Default: its hub id."),
]
VerifyOption = Annotated[
    Verification,
    typer.Option("--verify", help="roundtrip reads the result back; logits also runs both on the CPU and compares."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")]
LossyOption = Annotated[bool, typer.Option("--allow-lossy", help="Leave out what the other dialect cannot state.")]
CausalityOption = Annotated[
    Causality | None,
    typer.Option("--causality", help="How the draft's blocks attend, where its config is silent or wrong."),
]
TapsOption = Annotated[
    bool, typer.Option("--normalise-taps", help="Put taps in ascending order, once each, and fc.weight with them.")
]
ShardOption = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="SIZE", help="Weights a file at most, such as 5GB. Default: as SRC."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a checkpoint at DST.")]


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
    """Write a draft in another dialect, byte for byte, with a manifest of what became of everything."""
    max_shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    check_destination(destination, Path(source), force=force)
    if target is None and is_bundled(source):
        target = TINY
    wish = Wish(
        to=to,
        target=None if target is None else open_target(resolve(target, Role.TARGET)),
        target_reference=target,
        verifier=verifier,
        allow_lossy=allow_lossy,
        normalise_taps=normalise_taps,
        max_shard_bytes=max_shard_bytes,
    )
    plan = plan_conversion(resolve(source, Role.DRAFT), wish, causality=causality)
    for warning in plan.warnings:
        console.warn(warning)
    console.status(_summary(plan))
    if dry_run:
        _show_dry_run(plan, as_json=as_json)
        return
    with _progress() as observe:
        manifest = convert_draft(plan, destination, verification=verify, observe=observe)
    if as_json:
        console.result_json({"destination": str(destination), **manifest})
    else:
        console.result(str(destination))


def parse_size(text: str) -> int:
    """Bytes from a number and a decimal or binary unit: 500MB, 5GB, 1.5GiB, 1000000.

    Raises:
        UsageError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    size = 0
    if found is not None:
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))
    if size < 1:
        raise UsageError(f"{text!r} is no size", hint="such as 500MB, 5GB or 4GiB")
    return size


def _show_dry_run(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        console.result_json({"dry_run": True, **describe(plan)})
        return
    for fate in (*plan.key_fates, *plan.tensor_fates, *plan.file_fates):
        where = fate.source if fate.result in (None, fate.source) else f"{fate.source or '-'} -> {fate.result}"
        console.result(f"{fate.fate:8} {where}{f'  ({fate.why})' if fate.why else ''}")
    for name, tensors in plan.files.items():
        console.result(f"{'writes':8} {name}  ({sum(tensor.num_bytes for tensor in tensors)} bytes of weights)")


def _summary(plan: Plan) -> str:
    keys, tensors = _counts(plan.key_fates), _counts(plan.tensor_fates)
    return (
        f"{plan.draft.detection.format.name} -> {plan.format.name}: tensors {tensors}; keys {keys}; "
        f"{plan.num_bytes / 1e6:.1f} MB of weights"
    )


def _counts(fates: list[Any]) -> str:
    counts = Counter(fate.fate for fate in fates)
    return ", ".join(f"{count} {fate}" for fate, count in counts.items()) or "none"


@contextmanager
def _progress() -> Iterator[Observe]:
    """One bar a stage, in bytes."""
    with console.progress() as display:
        tasks: dict[str, Any] = {}

        def observe(stage: str, count: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total, figures="")
            display.advance(tasks[stage], count)
            done = display.tasks[tasks[stage]].completed
            display.update(tasks[stage], figures=f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

        yield observe
