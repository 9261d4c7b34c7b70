"""Looks at a draft's tensors that say which readings of them are possible. Functions import torch when they run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash_cli.diagnosis.weight_rewrites import ENDS, part_of
from dflash_runtime.config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

CENTRE = 0.5
"""Offsets from 1 have a mean within this distance of 0."""

LEAST_OF_PLUS_ONE = 0.95
"""A weight to which 1 was added is hardly ever smaller, because trained norms are hardly ever negative."""

UNLIKE = 1.6
"""A tensor whose values are this many times larger or smaller than its siblings' may have been scaled."""


def is_offset(weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int | None) -> bool:
    """Whether a norm's weights are centred at 0, in a layer or in every layer."""
    return all(abs(float(item.float().mean())) < CENTRE for item in _values(weights, config, part, layer))


def is_factor_plus_one(weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int | None) -> bool:
    """Whether a norm's weights may have had 1 added, in a layer or in every layer."""
    return all(float(item.float().quantile(0.05)) > LEAST_OF_PLUS_ONE for item in _values(weights, config, part, layer))


def scale_beside_siblings(
    weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int
) -> tuple[float, ...]:
    """The factor that brings a part to the size of the same part in other layers, and the nearest power of two."""
    import math

    sizes = [float(item.float().square().mean().sqrt()) for item in _values(weights, config, part, None)]
    others = sorted(size for index, size in enumerate(sizes) if index != layer)
    own, usual = sizes[layer], others[len(others) // 2]
    if own == 0 or usual == 0 or 1 / UNLIKE < own / usual < UNLIKE:
        return ()
    factor = usual / own
    return factor, 2.0 ** round(math.log2(factor))


def _values(weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int | None) -> "list[Tensor]":
    if part in ENDS or layer is not None:
        return [part_of(weights, config, part, layer)]
    return [part_of(weights, config, part, number) for number in range(config.num_layers)]
