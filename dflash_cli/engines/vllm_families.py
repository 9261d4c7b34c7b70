"""DFlash 2 and DSpark in vLLM: its rules, and the native dialect that is written for it.

vLLM applies the scales of `dflash_config` to DFlash 2 drafts, unlike to others, and logit_scale to others only. Its
DSpark model has the vanilla Markov head only.
Source: vLLM 0.33.0 model_executor/models/qwen3_dflash2.py and qwen3_dspark.py.
"""

from collections.abc import Iterator
from typing import ClassVar

from dflash_cli.engines.vllm import NAME, NEWEST, Vllm, check_vllm
from dflash_cli.formats.dflash2 import DFlash2Native
from dflash_cli.formats.dialect import FORMATS, cannot_state, refuse_scales
from dflash_cli.formats.dspark import DSparkNative
from dflash_cli.formats.fields import LOGIT_SCALE
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import FIX_COPY, Problem
from dflash_cli.rules.subject import Subject
from dflash_runtime.draft_config import DraftConfig

DSPARK_CODE = "vLLM 0.33.0 qwen3_dspark.py"


@check_vllm(
    "S36",
    effect="vLLM knows the vanilla Markov head only, and stops at the tensors of another",
    fix="dflash serve-command {draft} --target {target} --engine sglang # has gated and rnn heads",
    source=DSPARK_CODE,
    unnamed="warning",
)
def markov_head_is_vanilla(subject: Subject) -> Iterator[Problem]:
    """The Markov head of a DSpark draft is vanilla, the only kind in vLLM's model."""
    markov = subject.parsed.config.markov if subject.parsed is not None else None
    if markov is not None and markov.head_type != "vanilla":
        yield Problem(subject.at("markov_head_type"), f"found {markov.head_type!r}, expected 'vanilla'")


@check_vllm(
    "S37",
    effect="vLLM finds no markov_rank, and stops",
    fix=FIX_COPY,
    source=DSPARK_CODE,
    unnamed="warning",
)
def markov_rank_is_where_vllm_looks(subject: Subject) -> Iterator[Problem]:
    """markov_rank of a DSpark draft is at the top level, where vLLM reads it."""
    is_native = isinstance(subject.format, Native) and subject.format.samples_from_anchor
    if is_native and "markov_rank" not in subject.config:
        yield Problem(subject.location("markov_rank"), "missing at the top level")


@check_vllm(
    "S38",
    effect="vLLM builds a confidence head that reads the hidden state alone, and stops at the wider tensor",
    fix=FIX_COPY,
    source=DSPARK_CODE,
    unnamed="warning",
)
def confidence_says_what_it_reads(subject: Subject) -> Iterator[Problem]:
    """A DSpark draft with a confidence head states confidence_head_with_markov at the top level.

    If the key is missing, vLLM takes it as false. SGLang and speculators take it as true.
    """
    config = subject.parsed.config if subject.parsed is not None else None
    if config is None or not subject.config.get("enable_confidence_head") or config.markov is None:
        return
    if config.confidence_reads_token and subject.config.get("confidence_head_with_markov") is not True:
        yield Problem(subject.location("confidence_head_with_markov"), "missing at the top level, expected true")


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
