"""Qwen3 dense decoders. Source: huggingface/transformers models/qwen3/modeling_qwen3.py.

Axis letters: T flat rows, F feature width.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.suite import Kernels
from dflash_runtime.config import TargetConfig
from dflash_runtime.errors import TensorMismatch
from dflash_runtime.models.layers import Attend, DecoderLayer, Linear, RMSNorm, RopeTable
from dflash_runtime.models.target import TARGETS

PREFIX = "model."


@TARGETS.register("qwen3")
class Qwen3Target:
    """A Qwen3 decoder over KV that `attend` owns."""

    def __init__(
        self,
        config: TargetConfig,
        weights: Mapping[str, Tensor],
        *,
        num_positions: int,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        _check_weights(config, weights)
        self.config = config
        self.embedding = weights[f"{PREFIX}embed_tokens.weight"]
        self.head = Linear(self.embedding if config.tie_word_embeddings else weights["lm_head.weight"])
        self._norm = RMSNorm(weights[f"{PREFIX}norm.weight"], config.rms_norm_eps, kernels)
        self._layers = [
            DecoderLayer.read(weights, f"{PREFIX}layers.{index}", config, kernels) for index in range(config.num_layers)
        ]
        self._rope = RopeTable(
            config.rope, config.head_dim, config.max_position_embeddings, num_positions, device, dtype
        )

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Iterable[int]
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.base.Target`. A tap on the last layer gives the residual before the final norm."""
        taps = list(taps)
        outputs: dict[int, Tensor] = {}
        hidden = F.embedding(token_ids, self.embedding)
        cos, sin = self._rope.rows(positions)
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, cos, sin, attend)
            if index in taps:
                outputs[index] = hidden
        features = torch.cat([outputs[tap] for tap in taps], dim=-1) if taps else None
        return self._norm(hidden), features


def expected_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a Qwen3 target must have, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{PREFIX}embed_tokens.weight": (config.vocab_size, hidden),
        f"{PREFIX}norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"{PREFIX}layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.self_attn.q_norm.weight": (config.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (config.head_dim,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _check_weights(config: TargetConfig, weights: Mapping[str, Tensor]) -> None:
    """Tensors beyond the expected ones are left alone: a target may carry heads this runtime does not use."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in weights]
    wrong = {
        name: (str(list(weights[name].shape)), str(list(shape)))
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    }
    if missing or wrong:
        raise TensorMismatch(missing=missing, wrong=wrong, path="target")
