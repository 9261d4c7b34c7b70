"""The native dialect as SGLang reads it as trained.

Source: SGLang 0.5.23 speculative/dflash_utils.py::parse_dflash_draft_config, models/dflash.py.

Written only; the file is a native one. SGLang takes causality from the top level alone, has no reduced head, takes the
draft's width for the target's, and knows two of the three scales.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion


@FORMATS.register("sglang")
class Sglang(Native):
    """Native checkpoints for SGLang."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "DFlash, native dialect for SGLang 0.5.23"
    priority: ClassVar[int] = 201
    sorts_taps: ClassVar[bool] = True
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", "input_embedding_scale"})

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return None

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        if config.input_embedding_scale != 1.0:
            raise LossyConversion("input_embedding_scale: SGLang 0.5.23 has no key for it")
