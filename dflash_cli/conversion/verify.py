"""Read a written checkpoint back, and compare its canonical fields and tensor bytes with the plan."""

from dataclasses import fields
from pathlib import Path

from dflash_cli.checkpoints.byte_comparison import same_bytes
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.byte_progress import Progress
from dflash_cli.conversion.plan import ConversionPlan
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import GateFailed


def verify_roundtrip(plan: ConversionPlan, directory: Path, progress: Progress) -> None:
    """Read the written result back.

    Raises:
        GateFailed: a field or a tensor differs from the plan.
    """
    result = open_draft(directory)
    differing = differing_fields(plan.config, result.config, ignored=plan.format.unstated)
    if differing:
        raise GateFailed(
            f"the result reads back with other values of {', '.join(differing)}",
            id="result-differs",
            field=differing[0],
            found=getattr(result.config, differing[0]),
            expected=repr(getattr(plan.config, differing[0])),
        )
    written = result.checkpoint.tensors
    if set(written) != {info.name for info in plan.kept}:
        raise GateFailed("the result does not hold the planned tensors", id="result-differs", field="tensors")

    def advance(count: int) -> None:
        progress("verify", count, plan.num_bytes)

    for info in plan.kept:
        copy = written[info.name]
        if (copy.dtype, copy.shape) != (info.dtype, info.shape) or not same_bytes(info, copy, advance):
            raise GateFailed(
                f"{info.name}: the result's bytes are not the source's", id="result-differs", field=info.name
            )


def differing_fields(one: DraftConfig, other: DraftConfig, *, ignored: frozenset[str] = frozenset()) -> list[str]:
    """Names of the canonical fields in which two drafts differ, the fields of their family included."""
    names = [field.name for field in fields(one) if field.compare and field.name not in ignored]
    return [name for name in names if getattr(one, name) != getattr(other, name, None)]
