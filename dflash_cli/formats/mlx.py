"""The flat form of the native dialect, for MLX readers. Source: bstnxbt/dflash-mlx model.py at f825ffb2.

Its keys stand at the top level, and its reader has no defaults for several of them. Written, every key stands in both
homes and rope in both spellings, so that z-lab's MLX loader and the others read the same file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, Json
from dflash_cli.formats.native import Native
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion

FLAT_KEYS = ("block_size", "mask_token_id", "target_layer_ids")


@FORMATS.register("mlx")
class Mlx(Native):
    """Flat native configs."""

    name: ClassVar[str] = "mlx"
    title: ClassVar[str] = "DFlash, native dialect with flat keys"
    priority: ClassVar[int] = 63
    keeps_mask: ClassVar[bool] = False
    unstated: ClassVar[frozenset[str]] = Native.unstated | {"has_sinks"}

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        if "dflash_config" in config or not all(key in config for key in FLAT_KEYS):
            return None
        return f"{', '.join(FLAT_KEYS)} at the top level, and no dflash_config"

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write a native config with every key at the top level too.

        Raises:
            LossyConversion: biases and attention sinks, for which these readers have no parameter; see
                `Native.write_config` for others.
        """
        if config.attention_bias:
            raise LossyConversion("attention_bias: true: the MLX readers build their projections without bias")
        if config.has_sinks:
            raise LossyConversion("attention sinks: the MLX readers compute none")
        return {
            **super().write_config(config, carried),
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        }

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[str]:
        yield from super().warnings(config, carried)
        if any(window is not None for window in config.windows):
            yield "bstnxbt/dflash-mlx ignores sliding windows; z-lab's own MLX loader applies them"
