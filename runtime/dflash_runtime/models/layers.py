"""The parts of a Qwen3-style decoder, shared by targets and drafts. Weights are plain tensors; nothing is trained here.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.suite import Kernels
from dflash_runtime.config import DraftConfig, RopeConfig, TargetConfig
from dflash_runtime.errors import UnsupportedError

Weights = Mapping[str, Tensor]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [T, H, D], keys [T, KV, D], values [T, KV, D]) -> [T, H, D]."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu}


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def read(cls, weights: Weights, name: str) -> "Linear":
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square normalisation with a learned scale."""

    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.kernels.rms_norm(hidden, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward: down(act(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def read(cls, weights: Weights, name: str, hidden_act: str) -> "MLP":
        if hidden_act not in ACTIVATIONS:
            raise UnsupportedError(f"hidden_act {hidden_act!r} is not served (known: {', '.join(ACTIVATIONS)})")
        gate, up, down = (Linear.read(weights, f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        return cls(gate, up, down, ACTIVATIONS[hidden_act])

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections with per-head normalisation of queries and keys (Qwen3), and rotary positions."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Tensor
    key_norm: Tensor
    eps: float
    head_dim: int
    kernels: Kernels

    @classmethod
    def read(cls, weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels) -> "Attention":
        query, key, value, output = (Linear.read(weights, f"{name}.{part}_proj") for part in "qkvo")
        query_norm, key_norm = (weights[f"{name}.{part}_norm.weight"] for part in "qk")
        return cls(query, key, value, output, query_norm, key_norm, config.rms_norm_eps, config.head_dim, kernels)

    def queries(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, hidden] -> [T, H, D], normalised and rotated."""
        return self.kernels.qk_norm_rope(self._split(self.query(hidden)), self.query_norm, self.eps, cos, sin)

    def keys_values(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> keys [T, KV, D] normalised and rotated, values [T, KV, D]."""
        keys = self.kernels.qk_norm_rope(self._split(self.key(hidden)), self.key_norm, self.eps, cos, sin)
        return keys, self._split(self.value(hidden))

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:-1], -1, self.head_dim)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and feed-forward with residuals."""

    attention: Attention
    mlp: MLP
    input_norm: RMSNorm
    post_attention_norm: RMSNorm

    @classmethod
    def read(cls, weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels) -> "DecoderLayer":
        norm, post_norm = (
            RMSNorm(weights[f"{name}.{part}.weight"], config.rms_norm_eps, kernels)
            for part in ("input_layernorm", "post_attention_layernorm")
        )
        attention = Attention.read(weights, f"{name}.self_attn", config, kernels)
        return cls(attention, MLP.read(weights, f"{name}.mlp", config.hidden_act), norm, post_norm)

    def __call__(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, hidden] -> [T, hidden]; `attend` owns the KV."""
        normed = self.input_norm(hidden)
        keys, values = self.attention.keys_values(normed, cos, sin)
        attended = attend(layer, self.attention.queries(normed, cos, sin), keys, values)
        hidden = hidden + self.attention.output(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_norm(hidden))


class RopeTable:
    """Cosines and sines for positions `[0, num_positions)`, computed in float32 and rounded once."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position_embeddings: int,
        num_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        frequencies, scale = _frequencies(rope, head_dim, max_position_embeddings)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)  # [positions, D]
        self.cos = (angles.cos() * scale).to(device=device, dtype=dtype)
        self.sin = (angles.sin() * scale).to(device=device, dtype=dtype)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[...] positions -> cos and sin, each [..., D]."""
        return self.cos[positions], self.sin[positions]


def _frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] and the factor on cos and sin, from transformers' own functions."""
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope.kind not in ("linear", "yarn", "llama3"):
        raise UnsupportedError(f"rope type {rope.kind!r} is not served (known: default, linear, yarn, llama3)")
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=rope.to_parameters(),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies, float(scale)
