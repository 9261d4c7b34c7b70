"""DFlash 2 and DSpark in vLLM: the native dialect that is written for it.

vLLM applies the scales of `dflash_config` to DFlash 2 drafts, unlike to others, and logit_scale to others only. Its
DSpark model has the vanilla Markov head only.
Source: vLLM 0.33.0 model_executor/models/qwen3_dflash2.py and qwen3_dspark.py.
"""

from typing import ClassVar

from dflash_cli.engines.vllm import NAME, NEWEST, Vllm
from dflash_cli.formats.dflash2 import DFlash2Native
from dflash_cli.formats.dialect import FORMATS, cannot_state, refuse_scales
from dflash_cli.formats.dspark import DSparkNative
from dflash_cli.formats.fields import LOGIT_SCALE
from dflash_runtime.config import DraftConfig


@FORMATS.register("dflash2-vllm")
class DFlash2Vllm(Vllm, DFlash2Native):
    """DFlash 2 in the native dialect for vLLM."""

    word: ClassVar[str] = NAME
    title: ClassVar[str] = f"DFlash 2, native dialect for {NEWEST}"
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", LOGIT_SCALE})

    def refuse_to_write(self, config: DraftConfig) -> None:
        self.refuse_common(config)
        refuse_scales(config, NEWEST, (LOGIT_SCALE,))


@FORMATS.register("dspark-vllm")
class DSparkVllm(Vllm, DSparkNative):
    """DSpark in the native dialect for vLLM."""

    word: ClassVar[str] = NAME
    title: ClassVar[str] = f"DSpark, native dialect for {NEWEST}"

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        if config.markov is not None and config.markov.head_type != "vanilla":
            raise cannot_state("markov_head_type", config.markov.head_type, NEWEST)
