"""DFlash 2 in the native dialect, written for one serving engine each.

vLLM applies the scales of `dflash_config` to DFlash 2 drafts, unlike to DFlash drafts. No engine applies logit_scale.
Sources: vLLM 0.33.0 model_executor/models/qwen3_dflash2.py; SGLang 0.5.23 models/dflash.py.
"""

from typing import ClassVar

from dflash_cli.engines import sglang, vllm
from dflash_cli.formats.dflash2 import DFlash2Native
from dflash_cli.formats.dialect import FORMATS, refuse_scales
from dflash_cli.formats.fields import LOGIT_SCALE
from dflash_runtime.config import DraftConfig


@FORMATS.register("dflash2-vllm")
class DFlash2Vllm(vllm.Vllm, DFlash2Native):
    """The native dialect for vLLM."""

    word: ClassVar[str] = vllm.NAME
    title: ClassVar[str] = f"DFlash 2, native dialect for {vllm.NEWEST}"
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", LOGIT_SCALE})

    def refuse_to_write(self, config: DraftConfig) -> None:
        self.refuse_common(config)
        refuse_scales(config, vllm.NEWEST, (LOGIT_SCALE,))


@FORMATS.register("dflash2-sglang")
class DFlash2Sglang(sglang.Sglang, DFlash2Native):
    """The native dialect for SGLang."""

    word: ClassVar[str] = sglang.NAME
    title: ClassVar[str] = f"DFlash 2, native dialect for {sglang.NEWEST}"
