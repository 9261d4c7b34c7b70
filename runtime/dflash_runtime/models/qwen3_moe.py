"""Qwen3 decoders with experts. Source: huggingface/transformers models/qwen3_moe/modeling_qwen3_moe.py."""

from typing import ClassVar

from dflash_runtime.config import TargetConfig
from dflash_runtime.models.decoder_target import DecoderTarget, Shape
from dflash_runtime.models.target import TARGETS


@TARGETS.register("qwen3_moe")
class Qwen3MoeTarget(DecoderTarget):
    """A Qwen3 decoder in which some or all layers have experts instead of one feed-forward."""

    has_head_norms: ClassVar[bool] = True

    @classmethod
    def mlp_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        experts = config.experts
        if experts is None or layer not in experts.layers:
            return super().mlp_shapes(config, layer)
        hidden, inner = config.hidden_size, experts.intermediate_size
        shapes: dict[str, Shape] = {"mlp.gate.weight": (experts.num_experts, hidden)}
        for expert in range(experts.num_experts):
            shapes |= {
                f"mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
                f"mlp.experts.{expert}.up_proj.weight": (inner, hidden),
                f"mlp.experts.{expert}.down_proj.weight": (hidden, inner),
            }
        return shapes
