"""DFlash 2 and DSpark in SGLang: its rules, and the native dialect that is written for it.

SGLang's DSpark model needs a Markov head, applies no scale and ignores dspark_draft_topk. In the fill-in layout it
starts the state of an rnn head one row later than the training.
Source: SGLang 0.5.23 models/dflash.py, models/dspark.py, speculative/dspark_components/.
"""

from collections.abc import Iterator
from typing import ClassVar

from dflash_cli.engines.sglang import NAME, NEWEST, Sglang, check_sglang
from dflash_cli.formats.dflash2 import DFlash2Native
from dflash_cli.formats.dialect import FORMATS, cannot_state, refuse_scales
from dflash_cli.formats.dspark import TOP_K, DSparkNative
from dflash_cli.formats.fields import SCALES
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import FIX_COPY, Problem
from dflash_cli.rules.subject import Subject
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import LossyConversion

DSPARK_CODE = "SGLang 0.5.23 models/dspark.py, dspark_config.py"


@check_sglang(
    "S39",
    effect="SGLang finds no Markov head in the config, and stops",
    fix=FIX_COPY,
    source=DSPARK_CODE,
    unnamed="warning",
)
def markov_head_is_where_sglang_looks(subject: Subject) -> Iterator[Problem]:
    """markov_rank is positive and at the top level, and markov_head_type is stated, as SGLang's DSpark model needs."""
    if not (isinstance(subject.format, Native) and subject.format.samples_from_anchor):
        return
    if subject.stated.value("markov_rank") == 0:
        fix = "dflash serve-command {draft} --target {target} --engine vllm # runs a draft without a Markov head"
        yield Problem(subject.at("markov_rank"), "0, expected a Markov head", fix=fix)
    elif "markov_rank" not in subject.config:
        yield Problem(subject.location("markov_rank"), "missing at the top level")
    elif subject.stated.value("markov_head_type") is None:
        yield Problem(subject.location("markov_head_type"), "missing, expected the type of the Markov head")


@check_sglang(
    "S40",
    effect="SGLang starts the state of the head one row later than the training",
    fix="dflash eval-acceptance {draft} --target {target} # starts the state as the training does",
    source=DSPARK_CODE,
    outcome="drops",
)
def state_starts_as_in_training(subject: Subject) -> Iterator[Problem]:
    """A DSpark draft with an rnn head is anchor-first, because SGLang skips the anchor's step of a fill-in block."""
    config = subject.parsed.config if subject.parsed is not None else None
    if config is None or config.markov is None or subject.parsed is None or subject.parsed.has_unknown_layout:
        return
    if config.markov.head_type == "rnn" and not config.sample_from_anchor:
        yield Problem(subject.at("markov_head_type"), "rnn in the fill-in layout")


@check_sglang(
    "S41",
    effect="SGLang ignores the key, and chooses among all tokens of a position",
    fix="dflash serve-command {draft} --target {target} --engine vllm # reads the key",
    source=DSPARK_CODE,
    outcome="drops",
)
def head_chooses_among_all_tokens(subject: Subject) -> Iterator[Problem]:
    """dspark_draft_topk is absent, because SGLang does not read it."""
    markov = subject.parsed.config.markov if subject.parsed is not None else None
    if markov is not None and markov.top_k is not None:
        yield Problem(subject.at(TOP_K), f"{markov.top_k}, and SGLang does not read it")


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
