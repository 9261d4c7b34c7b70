"""Qwen3.5 decoders: most layers are recurrent, by the gated delta rule, and some have attention with an output gate.

Qwen3.6 and Qwen3.8 checkpoints have the same model type. `gated_attention.py` has the layers.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.checkpoint.targets.hybrid_config import read_hybrid_config
from dflash_runtime.models.decoder_target import PREFIX, DecoderTarget
from dflash_runtime.models.delta_shapes import delta_shapes
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from dflash_runtime.models.layers import LayerReader
    from dflash_runtime.models.placement import Placement
    from dflash_runtime.models.weights import Weights


@TARGETS.register("qwen3_5")
@TARGETS.register("qwen3_5_text")
class Qwen35Target(DecoderTarget):
    """A Qwen3.5 decoder."""

    has_head_norms: ClassVar[bool] = True

    def __init__(self, config: TargetConfig, weights: "Weights", placement: "Placement") -> None:
        from dflash_runtime.models.gated_attention import with_whole_norms

        super().__init__(config, with_whole_norms(weights), placement)

    @staticmethod
    def read_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
        """See `models.target.TargetFamily`."""
        return read_hybrid_config(config, path)

    @classmethod
    def layer_reader(cls) -> "LayerReader":
        from dflash_runtime.models.gated_attention import read_layer

        return read_layer

    @classmethod
    def prefix(cls, config: TargetConfig) -> str:
        return PREFIX if config.nested_in is None else f"{PREFIX}language_model."

    @classmethod
    def mixer_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        recurrence = config.recurrence
        if recurrence is not None and layer in recurrence.layers:
            shapes = delta_shapes(recurrence, config.hidden_size)
            return {f"linear_attn.{name}": shape for name, shape in shapes.items()}
        queries = 2 * config.num_heads * config.head_dim  # with their gates
        return {**cls.attention_shapes(config), "self_attn.q_proj.weight": (queries, config.hidden_size)}
