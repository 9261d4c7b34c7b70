"""NeMo Automodel's native dialect. Source: NVIDIA-NeMo/Automodel recipes/llm/train_dflash.py at 36044ad3.

It has its own architecture name, which vLLM does not know. The JetSpec recipe trains causal layers and writes both
`dflash_config.causal: true` and `is_causal: false`; engines use `is_causal`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, named_architectures
from dflash_cli.formats.native import Native

ARCHITECTURE = "Qwen3DFlashDraftModel"


@FORMATS.register("automodel")
class Automodel(Native):
    """Checkpoints of NeMo Automodel."""

    title: ClassVar[str] = "DFlash, native dialect as NeMo Automodel exports it"
    priority: ClassVar[int] = 61
    writable: ClassVar[bool] = False
    trains_causal: ClassVar[bool] = False

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return f"architectures names {ARCHITECTURE}" if ARCHITECTURE in named_architectures(config) else None
