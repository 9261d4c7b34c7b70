"""Layers of Qwen3.5 decoders: recurrent layers, and layers with gated attention.

Norms multiply by one plus their weight, and rope rotates only the first part of each head.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

Axis letters: T flat rows, H heads, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rows
from dflash_kernels.suite import Kernels
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.models.delta_net import DeltaNet
from dflash_runtime.models.layers import Attend, Attention, DecoderLayer, Linear
from dflash_runtime.models.weights import Matrix, Weights, find_matrix, named_tensors, rows_between, take_rows
from dflash_runtime.target_config import TargetConfig

OFFSET_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")
"""Norms with a weight that is an offset from one. The norm inside a recurrent layer is an ordinary norm."""


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """A `Mixer`: attention whose output is multiplied by the sigmoid of another projection of its input.

    One product makes queries, keys, values and gates, in this order.
    """

    attention: Attention
    inputs: Linear  # [(2 * H + 2 * KV) * D, hidden]

    @property
    def output(self) -> Linear:
        """See `Mixer`."""
        return self.attention.output

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """See `Mixer`."""
        return self.inputs.rounded_for

    def __call__(self, layer: int, hidden: Rows, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """See `Mixer`: rows [T, H * D]."""
        own, kernels = self.attention, self.attention.kernels
        parts = self.inputs.parts(hidden)
        width = own.num_heads * own.head_dim
        joined, gates = parts[..., :-width], parts[..., -width:]
        query, keys, values = own.rotate(joined, cos, sin, attend.place(layer))
        attended = attend.read(layer, query, keys, values, own.softmax).flatten(-2)
        return kernels.output_gate(attended, gates)


def read_layer(weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels) -> DecoderLayer:
    """Read a recurrent layer, or a layer with gated attention."""
    assert isinstance(config, TargetConfig)
    if f"{name}.linear_attn.out_proj.weight" in weights:
        assert config.recurrence is not None
        recurrent = DeltaNet.read(weights, f"{name}.linear_attn", config.recurrence, config.rms_norm_eps, kernels)
        return DecoderLayer.around(recurrent, weights, name, config, kernels)
    own = f"{name}.self_attn"
    changed = {**weights, **_split_queries(find_matrix(weights, f"{own}.qkv_proj"), own, config)}
    changed |= {
        f"{own}.{part}_norm.weight": weights[f"{own}.{part}_norm.weight"][rotated_first(config)] for part in "qk"
    }
    inputs = Linear.read(changed, f"{own}.inputs", kernels)
    mixer = GatedAttention(Attention.read(changed, own, config, kernels), inputs)
    return DecoderLayer.around(mixer, weights, name, config, kernels)


def with_whole_norms(weights: Weights) -> Weights:
    """Replace the offsets of norms by whole weights, in float32 at least: an offset may be less than one's rounding."""
    return {
        name: 1 + tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if _is_offset(name) else tensor
        for name, tensor in weights.items()
    }


def _is_offset(name: str) -> bool:
    owner = name.removesuffix(".weight")
    return owner.rpartition(".")[2] in OFFSET_NORMS and ".linear_attn." not in name


def rotated_first(config: TargetConfig) -> Tensor:
    """The order of a head's dimensions in which rope turns the pairs (i, i + D / 2) for small i.

    The published rope pairs i with i + half of the rotated part. Scores do not depend on the order.
    """
    rotated = config.rotary_dim or config.head_dim
    turned, rest = torch.arange(rotated).view(2, -1), torch.arange(rotated, config.head_dim).view(2, -1)
    return torch.cat((turned, rest), dim=1).flatten()


def _split_queries(stacked: Matrix, name: str, config: TargetConfig) -> dict[str, Tensor]:
    """Split the joined projection into queries, keys and values in the order of `rotated_first`, and gates."""
    size, order = config.head_dim, rotated_first(config)
    heads = torch.arange(len(stacked)).view(-1, size)
    queries, gates = heads[: 2 * config.num_heads].view(config.num_heads, 2, size).unbind(1)
    keys, values = heads[2 * config.num_heads :].split(config.num_kv_heads)
    inputs = take_rows(stacked, torch.cat((queries[:, order], keys[:, order], values, gates)).flatten())
    num_gates = config.num_heads * size
    joined = rows_between(inputs, 0, len(inputs) - num_gates)
    return named_tensors(f"{name}.qkv_proj.weight", joined) | named_tensors(f"{name}.inputs.weight", inputs)
