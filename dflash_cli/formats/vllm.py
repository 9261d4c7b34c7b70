"""The native dialect as vLLM reads it as trained. Source: vLLM 0.33.0 model_executor/models/qwen3_dflash.py.

Written only; the file is a native one. vLLM reads more from it than other engines do: a reduced head with its id map,
and a target of another width. It reads scales for DFlash 2 only.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, Json
from dflash_cli.formats.engine_native import EngineNative
from dflash_cli.formats.native import refuse_common
from dflash_cli.formats.native_fields import SCALES, write_scales
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion


@FORMATS.register("vllm")
class Vllm(EngineNative):
    """Native checkpoints for vLLM."""

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "DFlash, native dialect for vLLM 0.33"
    priority: ClassVar[int] = 200
    engine: ClassVar[str] = "vllm"
    keeps_head: ClassVar[bool] = True
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", *SCALES})

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the native keys, and those that only vLLM reads."""
        return {
            **super().write_config(config, carried),
            **({"draft_vocab_size": config.draft_vocab_size} if config.has_reduced_vocab else {}),
            **({} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}),
        }

    def refuse_to_write(self, config: DraftConfig) -> None:
        refuse_common(config)
        lost = list(write_scales(config))
        if lost:
            raise LossyConversion(f"{', '.join(lost)}: vLLM 0.33 reads scales for DFlash 2 only")

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[str]:
        yield from super().warnings(config, carried)
        if any(window is not None for window in config.windows) or any(config.causal):
            yield (
                "vLLM 0.24 reads neither windows nor causality, and would run every layer full and non-causal; use 0.33"
            )
        if len(set(config.windows)) > 1:
            yield "layers with and without a window: vLLM 0.33 needs VLLM_USE_V2_MODEL_RUNNER=1"
