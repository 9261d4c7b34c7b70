"""A draft without its target: the embedding and the head that it borrows, and nothing else of the target's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.target_copies import target_tensor
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD
from dflash_runtime.checkpoint.pair import TargetSource, check_pair
from dflash_runtime.errors import TensorMismatch, UnsupportedError, UsageError
from dflash_runtime.models.layers import Linear
from dflash_runtime.models.placement import Placement

PLAIN = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class BorrowedEnds:
    """A target's embedding and head; empty where a draft brings its own."""

    embedding: Tensor
    head: Linear
    embedding_scale: float = 1.0


def borrow_ends(draft: DraftCheckpoint, target: TargetSource | None, placement: Placement) -> BorrowedEnds:
    """What a draft borrows, from a target's files or, without a target, from the copies in the draft's own.

    Only those tensors are read, so the rest of a target may be packed, or of any family. What a family does to its
    logits is left out: scaling and capping change no choice of the most likely token.

    Raises:
        PairMismatch: the draft was not made for this target.
        UsageError: no target is given, and the draft's file has no copies.
        TensorMismatch, UnsupportedError: a tensor that is absent, misshapen or packed.
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
                f"{draft.checkpoint.path}: the draft has no {name} of its own",
                hint="name the target it was made for with --head-from; only its embedding and head are read",
            )
    if info is None:
        raise TensorMismatch(missing=[name], path=checkpoint.path)
    if info.dtype not in PLAIN:
        raise UnsupportedError(f"{info.file}: {info.name} is {info.dtype}, packed, which this runtime does not read")
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
