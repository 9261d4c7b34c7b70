"""Read a written checkpoint back and compare it with its source: canonical fields and tensor bytes."""

from dataclasses import fields
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.safetensors_writer import MadeTensor
from dflash_cli.conversion.plan import Plan
from dflash_cli.conversion.write import Observe
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import GateFailed

PIECE_BYTES = 4 * 1024 * 1024


def verify_roundtrip(plan: Plan, directory: Path, observe: Observe) -> None:
    """Reopen the result.

    Raises:
        GateFailed: a field or a tensor that is not what was planned.
    """
    result = open_draft(directory)
    differing = differing_fields(plan.config, result.config, ignored=plan.format.unstated)
    if differing:
        raise GateFailed(f"the result reads differently: {', '.join(differing)}")
    written = result.checkpoint.tensors
    if set(written) != {info.name for info in plan.kept}:
        raise GateFailed("the result holds other tensors than were planned")
    for info in plan.kept:
        copy = written[info.name]
        is_same = (
            same_as_made(info, copy, plan.num_bytes, observe)
            if isinstance(info, MadeTensor)
            else same_bytes(info, copy, plan.num_bytes, observe)
        )
        if (copy.dtype, copy.shape) != (info.dtype, info.shape) or not is_same:
            raise GateFailed(f"{info.name}: the result's bytes are not the source's")


def differing_fields(one: DraftConfig, other: DraftConfig, *, ignored: frozenset[str] = frozenset()) -> list[str]:
    """Names of the canonical fields in which two drafts differ."""
    names = [field.name for field in fields(DraftConfig) if field.name not in ignored]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def same_bytes(one: TensorInfo, other: TensorInfo, total: int = 0, observe: Observe | None = None) -> bool:
    """Whether two tensors hold the same bytes, read in pieces."""
    if one.num_bytes != other.num_bytes:
        return False
    with one.file.open("rb", buffering=0) as left, other.file.open("rb", buffering=0) as right:
        left.seek(one.begin)
        right.seek(other.begin)
        remaining = one.num_bytes
        while remaining:
            count = min(PIECE_BYTES, remaining)
            mine, theirs = left.read(count), right.read(count)
            if not mine or len(mine) != len(theirs) or mine != theirs:
                return False
            remaining -= len(mine)
            if observe is not None:
                observe("verify", len(mine), total)
    return True


def same_as_made(made: MadeTensor, other: TensorInfo, total: int, observe: Observe) -> bool:
    """Whether a tensor holds the bytes that another is made of, made anew."""
    if made.num_bytes != other.num_bytes:
        return False
    with other.file.open("rb") as stream:
        stream.seek(other.begin)
        for piece in made.pieces():
            if stream.read(len(piece)) != piece:
                return False
            observe("verify", len(piece), total)
    return True
