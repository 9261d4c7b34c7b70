"""The native dialect as SGLang reads it as trained.

Source: SGLang 0.5.23 speculative/dflash_utils.py::parse_dflash_draft_config, models/dflash.py.

Written only; the file is a native one. SGLang takes causality from the top level alone, has no reduced head, takes the
draft's width for the target's, and knows two of the three scales.
"""

from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.engine_native import EngineNative
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion


@FORMATS.register("sglang")
class Sglang(EngineNative):
    """Native checkpoints for SGLang."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "DFlash, native dialect for SGLang 0.5.23"
    priority: ClassVar[int] = 201
    engine: ClassVar[str] = "sglang"
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", "input_embedding_scale"})

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        if config.input_embedding_scale != 1.0:
            raise LossyConversion("input_embedding_scale: SGLang 0.5.23 has no key for it")
