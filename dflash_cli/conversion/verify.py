"""Read a written checkpoint back and compare it with its source: canonical fields and tensor bytes."""

from dataclasses import fields
from pathlib import Path

from dflash_cli.checkpoints.byte_comparison import same_as_made, same_bytes
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.safetensors_writer import MadeTensor
from dflash_cli.conversion.byte_progress import Progress
from dflash_cli.conversion.plan import ConversionPlan
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import GateFailed


def verify_roundtrip(plan: ConversionPlan, directory: Path, progress: Progress) -> None:
    """Reopen the result.

    Raises:
        GateFailed: a field or a tensor that is not what was planned.
    """
    result = open_draft(directory)
    differing = differing_fields(plan.config, result.config, ignored=plan.format.unstated)
    if differing:
        raise GateFailed(f"the result reads back with other values of {', '.join(differing)}")
    written = result.checkpoint.tensors
    if set(written) != {info.name for info in plan.kept}:
        raise GateFailed("the result does not hold the tensors that were planned")

    def advance(count: int) -> None:
        progress("verify", count, plan.num_bytes)

    for info in plan.kept:
        copy = written[info.name]
        is_same = same_as_made(info, copy, advance) if isinstance(info, MadeTensor) else same_bytes(info, copy, advance)
        if (copy.dtype, copy.shape) != (info.dtype, info.shape) or not is_same:
            raise GateFailed(f"{info.name}: the result's bytes are not the source's")


def differing_fields(one: DraftConfig, other: DraftConfig, *, ignored: frozenset[str] = frozenset()) -> list[str]:
    """Names of the canonical fields in which two drafts differ, the fields of their family included."""
    names = [field.name for field in fields(one) if field.compare and field.name not in ignored]
    return [name for name in names if getattr(one, name) != getattr(other, name, None)]
