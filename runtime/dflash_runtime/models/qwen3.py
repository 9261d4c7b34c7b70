"""Qwen3 dense decoders. Source: huggingface/transformers models/qwen3/modeling_qwen3.py.

Axis letters: T flat rows, F feature width.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dflash_runtime.config import TargetConfig
from dflash_runtime.models.layers import Attend, DecoderStack, Linear
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TARGETS
from dflash_runtime.models.weights import Weights

PREFIX = "model."


@TARGETS.register("qwen3")
class Qwen3Target:
    """A Qwen3 decoder over KV that `attend` owns."""

    follows_from_shapes: ClassVar[bool] = True

    def __init__(self, config: TargetConfig, weights: Weights, placement: Placement) -> None:
        self.config = config
        self.embedding = weights[f"{PREFIX}embed_tokens.weight"]
        head = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.head = Linear(head, kernels=placement.kernels)
        self._decoder = DecoderStack(weights, PREFIX, config, placement)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.target.Target`. A tap on the last layer gives the residual before the final norm."""
        hidden, outputs = self._decoder(self.embedding[token_ids], positions, attend, taps)
        return hidden, torch.cat([outputs[tap] for tap in taps], dim=-1) if taps else None

    @staticmethod
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
