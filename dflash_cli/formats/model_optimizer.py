"""Model-Optimizer's native dialect. Source: NVIDIA/Model-Optimizer hf_spec_export.py at a2fbac7b.

`dflash_config.use_swa` and `swa_window_size` state the window, while `layer_types` says full attention for every layer.
Only vLLM reads the window. Attention is not causal. Exports without a window are plain native files.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import WINDOW_KEYS, Native


@FORMATS.register("model-optimizer")
class ModelOptimizer(Native):
    """Exports of Model-Optimizer with a window."""

    title: ClassVar[str] = "DFlash, native dialect as Model-Optimizer exports it"
    priority: ClassVar[int] = 62
    writable: ClassVar[bool] = False

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        nested = config.get("dflash_config")
        if not isinstance(nested, dict):
            return None
        key = next((key for key in WINDOW_KEYS if key in nested), None)
        return f"dflash_config.{key} is {nested[key]!r}" if key is not None else None
