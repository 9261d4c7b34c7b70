"""Model-Optimizer's native dialect. Source: NVIDIA/Model-Optimizer hf_spec_export.py at a2fbac7b.

`dflash_config.use_swa` and `swa_window_size` state the window, while `layer_types` says full attention for every layer.
Only vLLM reads the window. Attention is not causal. Exports without a window are plain native files.
"""

from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import WINDOW_KEYS, Native


@FORMATS.register("model-optimizer")
class ModelOptimizer(Native):
    """Exports of Model-Optimizer with a window."""

    title: ClassVar[str] = "DFlash, native dialect as Model-Optimizer exports it"
    priority: ClassVar[int] = 62
    writable: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = WINDOW_KEYS
