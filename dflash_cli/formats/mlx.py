"""The flat native dialect, for MLX readers. Source: bstnxbt/dflash-mlx model.py at f825ffb2.

Its keys are at the top level, and its reader has no defaults for several of them. A written config has every key both
at the top level and nested, and both rope keys, so that z-lab's MLX loader reads the same file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, Json, cannot_state
from dflash_cli.formats.native import Native
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.notices import Notice

FLAT_KEYS = ("block_size", "mask_token_id", "target_layer_ids")


@FORMATS.register("mlx")
class Mlx(Native):
    """Flat native configs."""

    title: ClassVar[str] = "DFlash, native dialect with flat keys"
    priority: ClassVar[int] = 63
    keeps_mask: ClassVar[bool] = False
    unstated: ClassVar[frozenset[str]] = Native.unstated | {"has_sinks"}

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        if "dflash_config" in config or not all(key in config for key in FLAT_KEYS):
            return None
        return f"{', '.join(FLAT_KEYS)} at the top level, and no dflash_config"

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write a native config with every key also at the top level.

        Raises:
            LossyConversion: the draft has biases or attention sinks, which these readers do not load; see also
                `Native.write_config`.
        """
        if config.attention_bias:
            raise cannot_state("attention_bias", True, "the MLX dialect")
        if config.has_sinks:
            raise cannot_state("has_sinks", True, "the MLX dialect")
        return {
            **super().write_config(config, carried),
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        }

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[Notice]:
        yield from super().warnings(config, carried)
        if any(window is not None for window in config.windows):
            text = "bstnxbt/dflash-mlx ignores sliding windows; z-lab's own MLX loader applies them"
            yield Notice(text, id="window-ignored")
