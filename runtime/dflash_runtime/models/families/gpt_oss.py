"""gpt-oss decoders: attention sinks, sliding and full layers, and experts with biases, which may be packed as MXFP4.

Source: huggingface/transformers models/gpt_oss/modeling_gpt_oss.py.

Axis letters: E experts, F inner width.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_kernels.mixtures.mxfp4_block import BLOCK
from dflash_runtime.checkpoint.layout import SINKS, Shape
from dflash_runtime.checkpoint.targets.gpt_oss_config import read_gpt_oss_config
from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_runtime.models.placement import Placement
    from dflash_runtime.models.weights import Weights

NAMES = {
    ".self_attn.sinks": f".self_attn.{SINKS}", ".mlp.router.": ".mlp.gate.", "_proj_bias": "_proj.bias",
}  # fmt: skip
"""Part of a published name -> the part that the layers of this runtime read."""


@TARGETS.register("gpt_oss")
class GptOssTarget(DecoderTarget):
    """A gpt-oss decoder."""

    def __init__(self, config: TargetConfig, weights: "Weights", placement: "Placement") -> None:
        from dflash_runtime.models.weights import with_wide_norms

        super().__init__(
            config, {_renamed(name): tensor for name, tensor in with_wide_norms(weights).items()}, placement
        )

    @staticmethod
    def read_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
        """See `models.target.TargetFamily`."""
        return read_gpt_oss_config(config, path)

    @staticmethod
    def arrange(name: str, tensor: "Tensor") -> "Tensor":
        """Return a tensor as `Experts` reads it: inner width last, the gate's rows before the rows of `up`."""
        import torch

        from dflash_kernels.mixtures.mxfp4 import arrange_numbers, arrange_scales

        if name.endswith("_proj") and ".experts." in name:
            tensor = tensor.transpose(1, 2)
        if ".experts.gate_up_proj" in name:
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
        if name.endswith("_blocks"):
            return torch.stack([arrange_numbers(expert) for expert in tensor])
        return arrange_scales(tensor) if name.endswith("_scales") else tensor.contiguous()

    @classmethod
    def joined_parts(cls, config: TargetConfig, name: str) -> tuple[int, ...] | None:
        return None  # rows of gate and up alternate

    @classmethod
    def mixer_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        return {**cls.attention_shapes(config), "self_attn.sinks": (config.num_heads,)}

    @classmethod
    def mlp_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        assert config.experts is not None
        count, inner, hidden = config.experts.num_experts, config.experts.intermediate_size, config.hidden_size
        shapes: dict[str, Shape] = {"mlp.router.weight": (count, hidden), "mlp.router.bias": (count,)}
        for part, height, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            name = f"mlp.experts.{part}_proj"
            shapes[f"{name}_bias"] = (count, height)
            if config.quantization is None:
                shapes[name] = (count, width, height)
            else:
                shapes[f"{name}_blocks"] = (count, height, width // BLOCK, BLOCK // 2)
                shapes[f"{name}_scales"] = (count, height, width // BLOCK)
        return shapes


def _renamed(name: str) -> str:
    for published, own in NAMES.items():
        name = name.replace(published, own)
    return name
