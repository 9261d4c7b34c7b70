"""Qwen3 decoders with experts. Source: huggingface/transformers models/qwen3_moe/modeling_qwen3_moe.py."""

from typing import ClassVar

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.expert_shapes import experts_shapes
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import TargetConfig


@TARGETS.register("qwen3_moe")
class Qwen3MoeTarget(DecoderTarget):
    """A Qwen3 decoder in which some or all layers have experts instead of one feed-forward."""

    has_head_norms: ClassVar[bool] = True

    @classmethod
    def mlp_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        experts = config.experts
        if experts is None or layer not in experts.layers:
            return super().mlp_shapes(config, layer)
        return experts_shapes(experts, config.hidden_size)
