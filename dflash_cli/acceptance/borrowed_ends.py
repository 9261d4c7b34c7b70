"""The target's embedding and head for a draft that runs without its target. No other target weights are read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.target_copies import target_tensor
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD
from dflash_runtime.checkpoint.pair import TargetSource, check_pair
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import MISSING, TensorMismatch, UnsupportedError, UsageError
from dflash_runtime.models.layers import Linear
from dflash_runtime.models.placement import Placement

PLAIN = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class BorrowedEnds:
    """A target's embedding and head. Both are empty if the draft has its own."""

    embedding: Tensor
    head: Linear
    embedding_scale: float = 1.0


def borrow_ends(draft: DraftCheckpoint, target: TargetSource | None, placement: Placement) -> BorrowedEnds:
    """Return the embedding and head that a draft borrows, from its target or from the copies in the draft's own files.

    Only these tensors are read, so other target weights may be packed, and the target may be of any family. Scaling
    and capping of logits are left out: neither changes which token is most likely.

    Raises:
        PairMismatch: the draft was not made for this target.
        UsageError: `target` is None and the draft's files lack copies.
        TensorMismatch, UnsupportedError: a tensor is missing, misshapen or packed.
    """
    config = draft.config
    if target is not None:
        check_pair(draft, target)
    wanted = [] if config.has_own_width else [EMBEDDING] if config.has_reduced_vocab else [EMBEDDING, HEAD]
    shape = (config.vocab_size, config.hidden_size)
    rows = {name: _read(name, draft, target, shape, placement) for name in wanted}
    nothing = torch.empty(0, device=placement.device, dtype=placement.dtype)
    bias = None if target is None or HEAD not in wanted else _read_bias(target, placement)
    scale = 1.0 if target is None else target.facts.embedding_scale
    head = Linear(rows.get(HEAD, nothing), bias, kernels=placement.kernels)
    return BorrowedEnds(rows.get(EMBEDDING, nothing), head, scale)


def _read(
    name: str, draft: DraftCheckpoint, target: TargetSource | None, shape: tuple[int, ...], placement: Placement
) -> Tensor:
    if target is not None:
        checkpoint, info = target.checkpoint, target_tensor(target, name)
    else:
        checkpoint, info = draft.checkpoint, draft.checkpoint.tensors.get(name)
        if info is None or info.shape != shape:
            raise UsageError(
                f"{draft.checkpoint.path}: the draft does not contain {name}, and no target was named",
                id="head-from-missing",
                field="--head-from",
                found=MISSING,
                hint="name the draft's target with --head-from; only its embedding and head are read",
            )
    if info is None:
        raise TensorMismatch(missing=[name], path=checkpoint.path)
    if info.dtype not in PLAIN:
        raise UnsupportedError(
            id="packed-tensor", path=info.file, field=info.name, found=info.dtype, expected=f"one of {', '.join(PLAIN)}"
        )
    if info.shape != shape:
        raise TensorMismatch(wrong={info.name: (str(list(info.shape)), str(list(shape)))}, path=checkpoint.path)
    return _load(checkpoint, info.name, placement)


def _read_bias(target: TargetSource, placement: Placement) -> Tensor | None:
    head = target_tensor(target, HEAD)
    bias = None if head is None else target.checkpoint.tensors.get(head.name.removesuffix("weight") + "bias")
    return None if bias is None else _load(target.checkpoint, bias.name, placement)


def _load(checkpoint: Checkpoint, name: str, placement: Placement) -> Tensor:
    _, tensor = next(checkpoint.load_many([name], str(placement.device)))
    return tensor.to(placement.dtype)
