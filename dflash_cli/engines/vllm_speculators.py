"""Rules on the speculators dialect as vLLM reads it. vLLM is the one engine that reads this dialect."""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.engines.vllm import FIX_TO_VLLM, NAME, check_vllm
from dflash_cli.engines.vllm_reading import READS_KINDS
from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.fields import REMOVED
from dflash_cli.formats.speculators import SpeculatorsFormat
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.rules.rule import FIX_COPY, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.json_values import as_object

VLLM_BASE = "vLLM 0.33.0 transformers_utils/configs/speculators/base.py, algos.py"
REQUIRED = ("speculators_config", "transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id")
METHODS = "speculators_config.proposal_methods"
FIX_VERIFIER = "dflash convert {draft} {out} --to speculators --target-name ORG/REPO"


@check_vllm(
    "C04",
    effect="vLLM reads the number of draft tokens from this key, and drafts a block of another length than in training",
    fix=FIX_COPY,
    source="vllm-project/vllm#39519; vllm-project/speculators#456",
    outcome="drops",
    unnamed="warning",
)
def drafts_one_less_than_the_block(subject: Subject) -> Iterator[Problem]:
    """speculative_tokens is block_size - 1, because the block includes the anchor."""
    methods, block = _outer(subject).get("proposal_methods"), subject.stated.block_size
    if not isinstance(methods, list) or block is None:
        return
    expected = block if subject.config.get("sample_from_anchor") is True else block - 1
    for index, method in enumerate(methods):
        stated = as_object(method).get("speculative_tokens")
        if stated is not None and stated != expected:
            yield Problem(
                subject.location(f"{METHODS}[{index}].speculative_tokens"),
                f"found {stated!r}, expected {expected} for a block of {block}",
            )


@check_vllm(
    "C20",
    effect="vLLM from 0.26 on makes every layer causal; full layers of this dialect are non-causal",
    fix=FIX_COPY,
    source="vllm-project/vllm#56692, open in 0.33.0; #47745 brought it, in 0.26.0",
    outcome="drops",
    unnamed="warning",
)
def full_layers_stay_non_causal(subject: Subject) -> Iterator[Problem]:
    """sliding_window_non_causal is true or absent if every layer is full attention.

    In the speculators dialect the flag concerns sliding layers only, so both values mean the same for a draft of full
    layers. vLLM 0.24 and 0.25 ignore the flag, and vLLM from 0.26 on applies it to every layer (#47745). The value true
    is right for every release.
    """
    if SLIDING in subject.stated.layer_types or subject.stated.body.get("is_causal") is False:
        return
    if _asks_for_causality(subject):
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            f"false, although all {len(subject.stated.layer_types)} layers are full attention",
            repair={NON_CAUSAL_FLAG: True},
        )


@check_vllm(
    "C21",
    effect="vLLM from 0.26 on makes the full-attention layers causal too",
    fix=FIX_TO_VLLM,
    source="vLLM 0.33.0 transformers_utils/configs/speculators/algos.py",
    outcome="drops",
    unnamed="warning",
)
def layers_agree_for_vllm(subject: Subject) -> Iterator[Problem]:
    """All layers of a speculators draft share one causality.

    vLLM reads one value for all layers from the speculators dialect.
    """
    if set(subject.stated.layer_types) == set(LAYER_KINDS) and _asks_for_causality(subject):
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            "false with both sliding and full layers: sliding layers are causal, full layers are not",
        )


@check_vllm(
    "C30",
    effect="vLLM does not recognise the file as a speculators config",
    fix=FIX_COPY,
    source="vLLM 0.33.0 transformers_utils/config.py",
    unnamed="warning",
)
def no_top_level_model_type(subject: Subject) -> Iterator[Problem]:
    """A speculators config states model_type only in the decoder, not at its top level.

    The decoder is transformer_layer_config.
    """
    if _is_speculators(subject) and "model_type" in subject.config:
        yield Problem(
            subject.location("model_type"),
            f"{subject.config['model_type']!r}, expected no such key at the top level",
            repair={"model_type": REMOVED},
        )


@check(
    "C31",
    effect="vLLM stops with a KeyError",
    fix="save the draft again with speculators 0.9, or convert a native export: dflash convert NATIVE --to speculators",
    source=VLLM_BASE,
)
def has_speculators_keys(subject: Subject) -> Iterator[Problem]:
    """A speculators config has every key that vLLM reads without a default."""
    if not _is_speculators(subject):
        return
    for key in REQUIRED:
        if key not in subject.config:
            yield Problem(subject.location(key), "missing")
    outer = _outer(subject)
    methods = outer.get("proposal_methods")
    if outer and not (isinstance(methods, list) and methods and "speculative_tokens" in as_object(methods[0])):
        yield Problem(
            subject.location(METHODS),
            "the first entry lacks speculative_tokens",
            effect="vLLM cannot tell how many tokens to draft",
            fix=FIX_COPY,
        )
    if outer and "name_or_path" not in as_object(outer.get("verifier")):
        yield Problem(subject.location("speculators_config.verifier"), "lacks name_or_path", fix=FIX_VERIFIER)
    for key in ("draft_vocab_size", "block_size"):
        if key not in subject.config:
            effect = "readers fill in their own defaults (draft_vocab_size 32000, block_size 8)"
            yield Problem(subject.location(key), "missing", effect=effect)


@check("C33", "warning", effect="vLLM uses the first entry and ignores the rest", fix=FIX_COPY, source=VLLM_BASE)
def has_one_proposal_method(subject: Subject) -> Iterator[Problem]:
    """There is one proposal method, and default_proposal_method names it."""
    outer = _outer(subject)
    methods, default = outer.get("proposal_methods"), outer.get("default_proposal_method")
    if not isinstance(methods, list):
        return
    if len(methods) > 1:
        yield Problem(subject.location(METHODS), f"found {len(methods)} entries, expected 1")
    names = [as_object(method).get("proposal_type") for method in methods]
    if default not in names:
        yield Problem(
            subject.location("speculators_config.default_proposal_method"),
            f"found {default!r}, expected one of the methods {names}",
            effect="speculators refuses the config",
        )


@check_vllm(
    "C34",
    effect="vLLM cannot serve the draft by its own name; naming the target with --model works",
    fix=FIX_VERIFIER,
    source="vLLM 0.33.0 transformers_utils/config.py refuses a path",
    unnamed="warning",
)
def names_a_hub_verifier(subject: Subject) -> Iterator[Problem]:
    """The draft names its verifier, the target, by hub repository."""
    if not _is_speculators(subject):
        return
    name = subject.stated.value("verifier_name")
    is_repository = isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_repository:
        yield Problem(subject.expected_at("verifier_name"), f"found {name!r}, which is not a hub repository")


def _is_speculators(subject: Subject) -> bool:
    return isinstance(subject.format, SpeculatorsFormat)


def _outer(subject: Subject) -> Mapping[str, Any]:
    """The draft's `speculators_config`; empty for a draft of another dialect."""
    return as_object(subject.config.get("speculators_config")) if _is_speculators(subject) else {}


def _asks_for_causality(subject: Subject) -> bool:
    """Whether the flag is false and vLLM applies it to every layer (#47745), or may do so if no release is named."""
    engine = subject.engine(NAME)
    applies_to_all = engine is None or engine.release >= READS_KINDS
    is_read = _is_speculators(subject) and not subject.format.samples_from_anchor  # vLLM ignores it for DSpark
    return is_read and applies_to_all and subject.config.get(NON_CAUSAL_FLAG) is False
