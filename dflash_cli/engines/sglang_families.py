"""DFlash 2 and DSpark in SGLang: the native dialect that is written for it.

SGLang's DSpark model needs a Markov head, applies no scale and ignores dspark_draft_topk. In the fill-in layout it
starts the state of an rnn head one row later than the training.
Source: SGLang 0.5.23 models/dflash.py, models/dspark.py, speculative/dspark_components/.
"""

from typing import ClassVar

from dflash_cli.engines.sglang import NAME, NEWEST, Sglang
from dflash_cli.formats.dflash2 import DFlash2Native
from dflash_cli.formats.dialect import FORMATS, cannot_state, refuse_scales
from dflash_cli.formats.dspark import TOP_K, DSparkNative
from dflash_cli.formats.fields import SCALES
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion


@FORMATS.register("dflash2-sglang")
class DFlash2Sglang(Sglang, DFlash2Native):
    """DFlash 2 in the native dialect for SGLang."""

    word: ClassVar[str] = NAME
    title: ClassVar[str] = f"DFlash 2, native dialect for {NEWEST}"


@FORMATS.register("dspark-sglang")
class DSparkSglang(Sglang, DSparkNative):
    """DSpark in the native dialect for SGLang."""

    word: ClassVar[str] = NAME
    title: ClassVar[str] = f"DSpark, native dialect for {NEWEST}"
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", *SCALES})

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        refuse_scales(config, NEWEST)
        if config.markov is None:
            raise cannot_state("markov_rank", 0, NEWEST)
        if config.markov.top_k is not None:
            raise cannot_state(TOP_K, config.markov.top_k, NEWEST)
        if config.markov.head_type == "rnn" and not config.sample_from_anchor:
            raise LossyConversion(
                f"markov_head_type rnn in the fill-in layout: {NEWEST} starts its state a row later than the training",
                id="rnn-state",
                field="markov_head_type",
                found="rnn",
            )
