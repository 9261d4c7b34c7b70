"""Qwen3-Next decoders: as Qwen3.5 with experts, but some layers may be dense, and recurrent layers have joined inputs.

Source: huggingface/transformers models/qwen3_next/modeling_qwen3_next.py.

Axis letters: G key heads.
"""

from typing import TYPE_CHECKING

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.models.families.qwen3_5 import Qwen35Target
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import RecurrenceConfig, TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_kernels.suite import Kernels
    from dflash_runtime.draft_config import DraftConfig
    from dflash_runtime.models.layers import DecoderLayer, LayerReader
    from dflash_runtime.models.weights import Weights

SPLIT = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
JOINED = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba"))
"""The projections of a recurrent layer's input, as Qwen3.5 and Qwen3-Next store them."""


def read_layer(
    weights: "Weights", name: str, config: "TargetConfig | DraftConfig", kernels: "Kernels"
) -> "DecoderLayer":
    """Read a layer as one of Qwen3.5."""
    import torch

    from dflash_runtime.models import gated_attention
    from dflash_runtime.models.weights import find_matrix, named_tensors, take_rows

    assert isinstance(config, TargetConfig)
    assert config.recurrence is not None
    if f"{name}.{JOINED[0]}" in weights:
        qkvz, ba = (find_matrix(weights, f"{name}.{part.removesuffix('.weight')}") for part in JOINED)
        orders = split_inputs(torch.arange(len(qkvz))[:, None], torch.arange(len(ba))[:, None], config.recurrence)
        for part, order in orders.items():
            matrix = qkvz if part in (SPLIT[0], SPLIT[1]) else ba
            weights = {**weights, **named_tensors(f"{name}.{part}", take_rows(matrix, order[:, 0]))}
    return gated_attention.read_layer(weights, name, config, kernels)


def split_inputs(qkvz: "Tensor", ba: "Tensor", config: RecurrenceConfig) -> "dict[str, Tensor]":
    """Split the joined projections, in which the rows of each key head and of its value heads are adjacent.

    qkvz  [G * (2 * key size + 2 * values of a key head), hidden]: of each key head its query, key, values and gates
    ba    [G * 2 * value heads of a key head, hidden]: of each key head beta, then decay, of its value heads
    """
    import torch

    groups, heads = config.num_key_heads, config.num_value_heads // config.num_key_heads
    sizes = (config.key_size, config.key_size, heads * config.value_size, heads * config.value_size)
    by_group = qkvz.unflatten(0, (groups, -1)).split(sizes, dim=1)
    query, key, value, gate = (part.flatten(0, 1) for part in by_group)
    beta, decay = (part.flatten(0, 1) for part in ba.unflatten(0, (groups, -1)).split(heads, dim=1))
    return dict(zip(SPLIT, (torch.cat((query, key, value)), gate, beta, decay), strict=True))


@TARGETS.register("qwen3_next")
class Qwen3NextTarget(Qwen35Target):
    """A Qwen3-Next decoder."""

    @classmethod
    def layer_reader(cls) -> "LayerReader":
        return read_layer

    @classmethod
    def mixer_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        shapes = super().mixer_shapes(config, layer)
        if SPLIT[0] not in shapes:
            return shapes
        heights = [shapes.pop(name)[0] for name in SPLIT]
        joined = (heights[0] + heights[1], heights[2] + heights[3])
        return {**shapes, **{name: (height, config.hidden_size) for name, height in zip(JOINED, joined, strict=True)}}
