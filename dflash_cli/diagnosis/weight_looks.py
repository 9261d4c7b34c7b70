"""Looks at a draft's tensors that say which readings of them are possible. Functions import torch when they run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_cli.diagnosis.weight_rewrites import ENDS, part_of
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

CENTRE, NEGATIVE = 1.5, 0.05
"""Offsets from 1 have a median within CENTRE of 0 and at least this share of negative values; factors hardly any.

Norms of queries and keys may be trained to factors above 2, so the median of their offsets is above 1.
"""

LEAST_OF_PLUS_ONE = 0.95
"""A weight to which 1 was added is hardly ever smaller, because trained norms are hardly ever negative."""

TINY, HUGE = 1e-6, 1e4
"""The median of a trained matrix, by size, lies between these. Bits of another format lie outside."""

UNLIKE = 1.6
"""A tensor may have been scaled if its values are this many times larger or smaller than its siblings'."""


def is_offset(weights: "Mapping[str, Tensor]", config: DraftConfig, parts: Sequence[str], layer: int | None) -> bool:
    """Whether norms may hold offsets from 1, in a layer or in every layer."""
    values = _pooled(weights, config, parts, layer)
    return abs(float(values.median())) < CENTRE and float((values < 0).float().mean()) >= NEGATIVE


def is_plus_one(weights: "Mapping[str, Tensor]", config: DraftConfig, parts: Sequence[str], layer: int | None) -> bool:
    """Whether the weights of norms may have had 1 added, in a layer or in every layer."""
    return float(_pooled(weights, config, parts, layer).quantile(0.05)) > LEAST_OF_PLUS_ONE


def _pooled(weights: "Mapping[str, Tensor]", config: DraftConfig, parts: Sequence[str], layer: int | None) -> "Tensor":
    import torch

    return torch.cat([item.float() for part in parts for item in _values(weights, config, part, layer)])


def has_odd_bits(weights: "Mapping[str, Tensor]", config: DraftConfig, parts: Sequence[str], layer: int | None) -> bool:
    """Whether the values of every part are far smaller or larger than trained values are."""
    medians = [float(item.float().abs().median()) for part in parts for item in _values(weights, config, part, layer)]
    return all(0 < median < TINY or median > HUGE for median in medians)


def scale_beside_siblings(
    weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int
) -> tuple[float, ...]:
    """The factor that brings a part to the size of the same part in other layers, and the powers of two beside it."""
    import math

    sizes = [float(item.float().square().mean().sqrt()) for item in _values(weights, config, part, None)]
    others = sorted(size for index, size in enumerate(sizes) if index != layer)
    own, usual = sizes[layer], others[len(others) // 2]
    if own == 0 or usual == 0 or 1 / UNLIKE < own / usual < UNLIKE:
        return ()
    factor = usual / own
    return factor, 2.0 ** math.floor(math.log2(factor)), 2.0 ** math.ceil(math.log2(factor))


def _values(weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int | None) -> "list[Tensor]":
    if part in ENDS or layer is not None:
        return [part_of(weights, config, part, layer)]
    return [part_of(weights, config, part, number) for number in range(config.num_layers)]
