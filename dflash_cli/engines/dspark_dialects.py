"""DSpark in the native dialect, written for one serving engine each.

vLLM has the vanilla Markov head only. SGLang needs a Markov head, applies no scale, and ignores dspark_draft_topk. In
the fill-in layout it starts the state of an rnn head one row later than the training.
Sources: vLLM 0.33.0 model_executor/models/qwen3_dspark.py; SGLang 0.5.23 models/dspark.py.
"""

from typing import ClassVar

from dflash_cli.engines import sglang, vllm
from dflash_cli.formats.dialect import FORMATS, cannot_state, refuse_scales
from dflash_cli.formats.dspark import TOP_K, DSparkNative
from dflash_cli.formats.fields import SCALES
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion


@FORMATS.register("dspark-vllm")
class DSparkVllm(vllm.Vllm, DSparkNative):
    """The native dialect for vLLM."""

    word: ClassVar[str] = vllm.NAME
    title: ClassVar[str] = f"DSpark, native dialect for {vllm.NEWEST}"

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        if config.markov is not None and config.markov.head_type != "vanilla":
            raise cannot_state("markov_head_type", config.markov.head_type, vllm.NEWEST)


@FORMATS.register("dspark-sglang")
class DSparkSglang(sglang.Sglang, DSparkNative):
    """The native dialect for SGLang."""

    word: ClassVar[str] = sglang.NAME
    title: ClassVar[str] = f"DSpark, native dialect for {sglang.NEWEST}"
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", *SCALES})

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        refuse_scales(config, sglang.NEWEST)
        if config.markov is None:
            raise cannot_state("markov_rank", 0, sglang.NEWEST)
        if config.markov.top_k is not None:
            raise cannot_state(TOP_K, config.markov.top_k, sglang.NEWEST)
        if config.markov.head_type == "rnn" and not config.sample_from_anchor:
            raise LossyConversion(
                f"markov_head_type rnn in the fill-in layout: {sglang.NEWEST} starts its state one row later than the "
                f"training",
                id="rnn-state",
                field="markov_head_type",
                found="rnn",
            )
