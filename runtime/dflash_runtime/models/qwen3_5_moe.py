"""Qwen3.5 decoders with experts: a routed feed-forward and a shared one in every layer. Source:
huggingface/transformers models/qwen3_5_moe/modeling_qwen3_5_moe.py.
"""

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.models.expert_shapes import experts_shapes
from dflash_runtime.models.qwen3_5 import Qwen35Target
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import TargetConfig


@TARGETS.register("qwen3_5_moe")
@TARGETS.register("qwen3_5_moe_text")
class Qwen35MoeTarget(Qwen35Target):
    """A Qwen3.5 decoder with experts."""

    @classmethod
    def mlp_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        assert config.experts is not None
        return experts_shapes(config.experts, config.hidden_size)
