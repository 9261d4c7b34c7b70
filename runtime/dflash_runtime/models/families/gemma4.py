"""Gemma 4 decoders: sliding and full layers with heads and rope of their own, norms around each sublayer, and in some
models experts beside the feed-forward. `gemma4_layers.py` has the layers. The unified model type has this text part.

Source: huggingface/transformers models/gemma4/modeling_gemma4.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.checkpoint.targets.gemma4_config import read_gemma4_config
from dflash_runtime.models import gemma4_shapes
from dflash_runtime.models.decoder_target import PREFIX, DecoderTarget, dense_shapes
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_runtime.models.layers import DecoderStack, Linear
    from dflash_runtime.models.placement import Placement
    from dflash_runtime.models.weights import Weights


@TARGETS.register("gemma4")
@TARGETS.register("gemma4_text")
@TARGETS.register("gemma4_unified")
@TARGETS.register("gemma4_unified_text")
class Gemma4Target(DecoderTarget):
    """A Gemma 4 decoder."""

    has_head_norms: ClassVar[bool] = True

    def __init__(self, config: TargetConfig, weights: "Weights", placement: "Placement") -> None:
        import torch

        from dflash_runtime.models.weights import with_wide_norms

        super().__init__(config, with_wide_norms(weights), placement)
        # transformers rounds the factor to the model's dtype.
        self._scale = torch.tensor(self.embedding_scale, dtype=placement.dtype, device=placement.device)

    @staticmethod
    def read_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
        """See `models.target.TargetFamily`."""
        return read_gemma4_config(config, path)

    @classmethod
    def prefix(cls, config: TargetConfig) -> str:
        return PREFIX if config.nested_in is None else f"{PREFIX}language_model."

    @classmethod
    def make_stack(cls, config: TargetConfig, weights: "Weights", placement: "Placement") -> "DecoderStack":
        from dflash_runtime.models.gemma4_layers import GemmaStack

        return GemmaStack(weights, cls.prefix(config), config, placement)

    @classmethod
    def make_head(cls, head: "Linear", config: TargetConfig) -> "Linear":
        from dflash_runtime.models.head import ScaledHead

        assert config.gemma is not None
        return ScaledHead(head.weight, kernels=head.kernels, cap=config.gemma.logit_cap)

    def embed(self, token_ids: "Tensor") -> "Tensor":
        return self.embedding[token_ids] * self._scale

    @classmethod
    def mixer_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        return gemma4_shapes.mixer_shapes(config, layer)

    @classmethod
    def mlp_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        return {**dense_shapes(config), **gemma4_shapes.experts_beside_shapes(config)}
