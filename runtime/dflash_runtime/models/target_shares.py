"""One rank's share of a target: its config with fewer heads and narrower feed-forwards, and its part of each tensor.

Queries, keys, values, gate and up are split by columns of their products: whole heads, and inner width. Output
projections are split by rows, so that each rank adds a part of the result. Experts are split by inner width, so all
ranks route alike. Recurrent layers are split by heads. Embedding and head are split by token ids (`split_ends.py`).
Everything else is whole on every rank.

The axis along which a tensor is split follows from its shapes in the whole config and in the share's config.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_kernels.mixtures.mxfp4_block import BLOCK
from dflash_runtime.checkpoint.layout import Shapes
from dflash_runtime.checkpoint.quantised.fp8_format import Fp8Format
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.checkpoint.targets.rank_sizes import MXFP4, OPTION, check_sizes
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.ranks.rank_group import Ranks
from dflash_runtime.target_config import TargetConfig

Range = tuple[int, int]

ADDED_ONCE = ("o_proj.bias", "down_proj.bias", "down_proj_bias")
"""Ends of the names of biases that are added to sums over ranks. Ranks after the first have zeros instead."""

BY_IDS = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors with a row for each token id."""

FILLED = {
    "gate_up_proj_blocks": 1, "gate_up_proj_scales": 1, "gate_up_proj_bias": 1,
    "down_proj_blocks": 2, "down_proj_scales": 2,
}  # fmt: skip
"""Ends of the names of packed experts' tensors -> their split axis. Zeros fill up the part of a rank, or all of it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor: ranges along one axis, joined, and `num_missing` zeros after them.

    With `is_zero` the part is zeros of the same shape.
    """

    axis: int
    ranges: tuple[Range, ...]
    num_missing: int = 0
    is_zero: bool = False

    @property
    def length(self) -> int:
        """Entries of the part along the axis."""
        return sum(end - begin for begin, end in self.ranges) + self.num_missing

    def of(self, tensor: Any) -> Tensor:
        """Read the part of a tensor, or of a slice that safetensors has not read yet."""
        parts = [tensor[(slice(None),) * self.axis + (slice(*item),)] for item in self.ranges]
        if self.num_missing:
            missing = (*parts[0].shape[: self.axis], self.num_missing, *parts[0].shape[self.axis + 1 :])
            parts.append(parts[0].new_zeros(missing))
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)
        return torch.zeros_like(found) if self.is_zero else found

    def in_blocks(self, block: int, length: int) -> "Cut | None":
        """The same part in units of `block` entries of an axis of `length`; None if the part cuts a block."""
        if any(begin % block or (end % block and end != length) for begin, end in self.ranges):
            return None
        return replace(self, ranges=tuple((begin // block, -(-end // block)) for begin, end in self.ranges))


def share_config(config: TargetConfig, size: int) -> TargetConfig:
    """Return the config of each rank's share. With fewer KV heads than ranks, several ranks have the same KV head.

    Raises:
        UnsupportedError: a number of heads, or the width of a feed-forward, is not a multiple of the ranks.
    """
    if size == 1:
        return config
    check_sizes(config, size)
    own, experts = config.recurrence, config.experts
    if own is not None:
        own = replace(
            own, num_key_heads=own.num_key_heads // size, num_value_heads=own.num_value_heads // size
        )  # fmt: skip
    if experts is not None:
        shared = None if experts.shared_size is None else experts.shared_size // size
        unit = BLOCK if config.quantization == MXFP4 else 1  # zeros fill up the packed experts of the last rank
        inner = -(-experts.intermediate_size // (size * unit)) * unit
        experts = replace(experts, intermediate_size=inner, shared_size=shared)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=_share_of_kv(config.num_kv_heads, size),
        intermediate_size=max(1, config.intermediate_size // size),
        other_kv_shapes={layer: (_share_of_kv(n, size), dim) for layer, (n, dim) in config.other_kv_shapes.items()},
        recurrence=own,
        experts=experts,
    )


def _share_of_kv(count: int, size: int) -> int:
    return max(1, count // size)


def cut_tensors(whole: Shapes, own: Shapes, ranks: Ranks, widths: Mapping[str, tuple[int, ...]]) -> dict[str, Cut]:
    """Return the cut of each tensor that this rank has in part.

    whole, own   shapes of all tensors by the config of the target and by the config of the share
    widths       for a tensor with several parts along its split axis, the widths of the parts in the whole tensor
    """
    cuts: dict[str, Cut] = {}
    for name, shape in whole.items():
        if name.endswith(BY_IDS):
            begin, end = id_range(shape[0], ranks)
            cuts[name] = Cut(0, ((begin, end),))
            continue
        axes = [axis for axis, length in enumerate(shape) if own[name][axis] != length]
        axes = axes or [axis for end, axis in FILLED.items() if name.endswith(end)]  # one rank has all of it
        assert len(axes) <= 1, "a tensor is split along one axis"
        if axes:
            axis, length = axes[0], own[name][axes[0]]
            if name.endswith(tuple(FILLED)) and length * ranks.size > shape[axis]:
                begin, end = (min(number * length, shape[axis]) for number in (ranks.rank, ranks.rank + 1))
                cuts[name] = Cut(axis, ((begin, end),), num_missing=length - (end - begin))
            else:
                cuts[name] = Cut(axis, tuple(_ranges(widths.get(name, (shape[axis],)), length, ranks)))
        elif name.endswith(ADDED_ONCE) and ranks.rank:
            cuts[name] = Cut(0, ((0, shape[0]),), is_zero=True)
    return cuts


def cut_info(info: TensorInfo, cut: Cut | None) -> TensorInfo:
    """Return the description of a rank's part of a tensor, with as many bytes as it has."""
    if cut is None:
        return info
    shape = (*info.shape[: cut.axis], cut.length, *info.shape[cut.axis + 1 :])
    num_bytes = info.num_bytes * cut.length // max(1, info.shape[cut.axis])
    return replace(info, shape=shape, end=info.begin + num_bytes)


def cut_scales(scales: Tensor, cut: Cut, info: TensorInfo, form: Fp8Format) -> Tensor:
    """Return the scales of a rank's part of a matrix in FP8, or of a stack of matrices.

    Raises:
        UnsupportedError: the part ends inside a block with one scale.
    """
    axis = cut.axis - len(info.shape)
    if form.block is None:
        has_rows = axis == -2 and scales.numel() == math.prod(info.shape[:-1])
        return cut.of(scales.reshape(info.shape[:-1])) if has_rows else scales
    found = cut.in_blocks(form.block[axis], info.shape[axis])
    if found is None:
        raise UnsupportedError(
            id="fp8-block-cut", path=info.file, field=info.name, found=list(info.shape),
            expected=f"parts of whole blocks of {form.block[axis]}", hint=f"leave out {OPTION}, or try fewer GPUs",
        )  # fmt: skip
    return found.of(scales)


def id_range(vocab_size: int, ranks: Ranks) -> Range:
    """Return the token ids of this rank's rows of embedding and head. The last rank may have fewer."""
    count = -(-vocab_size // ranks.size)
    return min(ranks.rank * count, vocab_size), min((ranks.rank + 1) * count, vocab_size)


def _ranges(parts: Sequence[int], own_length: int, ranks: Ranks) -> list[Range]:
    """The range of this rank in each part, all parts together `own_length` long."""
    begin, ranges = 0, []
    for width in parts:
        own = own_length * width // sum(parts)
        first = begin + ranks.rank * (width // own) // ranks.size * own
        ranges.append((first, first + own))
        begin += width
    return ranges
