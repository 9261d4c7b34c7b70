"""Rules on the speculators dialect that are about vLLM, the one engine that reads it."""

from collections.abc import Iterator

from dflash_cli.engines.vllm import ENGINE, FIX_TO_VLLM, NAME, READS_KINDS
from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.rules.rule import FIX_COPY, REMOVED, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.hf_config import SLIDING
from dflash_runtime.json_values import as_object


@check(
    "C04",
    effect="vLLM takes its number of drafted tokens from here and drafts a block of an untrained length",
    fix=FIX_COPY,
    source="vllm-project/vllm#39519; vllm-project/speculators#456",
    outcome="drops",
    engines=ENGINE,
    unnamed="warning",
)
def drafts_one_less_than_the_block(subject: Subject) -> Iterator[Problem]:
    """speculative_tokens is block_size - 1, because the block includes the anchor."""
    methods = as_object(subject.config.get("speculators_config")).get("proposal_methods")
    block = subject.block_size
    if not isinstance(methods, list) or block is None:
        return
    expected = block if subject.config.get("sample_from_anchor") is True else block - 1
    for index, method in enumerate(methods):
        stated = as_object(method).get("speculative_tokens")
        if stated is not None and stated != expected:
            yield Problem(
                subject.location(f"speculators_config.proposal_methods[{index}].speculative_tokens"),
                f"found {stated!r}, expected {expected} for a block of {block}",
            )


@check(
    "C20",
    effect="vLLM from 0.26 on makes every layer causal; full layers of this dialect are non-causal",
    fix=FIX_COPY,
    source="vllm-project/vllm#56692, open in 0.33.0; #47745 brought it, in 0.26.0",
    outcome="drops",
    engines=ENGINE,
    unnamed="warning",
)
def full_layers_stay_non_causal(subject: Subject) -> Iterator[Problem]:
    """sliding_window_non_causal is true or absent if every layer is full attention.

    In the speculators dialect the flag concerns sliding layers only, so for a draft of full layers both values mean the
    same. vLLM applies it to every layer since 0.26 (#47745); 0.24 and 0.25 do not look at it. The value true is right
    for all.
    """
    if not subject.is_speculators or SLIDING in subject.layer_types or subject.config.get(NON_CAUSAL_FLAG) is not False:
        return
    if _takes_flag_for_all(subject) and subject.body.get("is_causal") is not False:
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            f"false, although all {len(subject.layer_types)} layers are full attention",
            repair={NON_CAUSAL_FLAG: True},
        )


@check(
    "C21",
    effect="vLLM from 0.26 on makes the full-attention layers causal too",
    fix=FIX_TO_VLLM,
    source="vLLM 0.33.0 transformers_utils/configs/speculators/algos.py",
    outcome="drops",
    engines=ENGINE,
    unnamed="warning",
)
def layers_agree_for_vllm(subject: Subject) -> Iterator[Problem]:
    """All layers of a speculators draft share one causality.

    One value for all layers is all that vLLM takes from the speculators dialect.
    """
    if not subject.is_speculators or subject.config.get(NON_CAUSAL_FLAG) is not False:
        return
    if _takes_flag_for_all(subject) and set(subject.layer_types) == set(LAYER_KINDS):
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            "false with both sliding and full layers: sliding ones are causal, full ones are not",
        )


@check(
    "C30",
    effect="vLLM does not recognise the file as a speculators config",
    fix=FIX_COPY,
    source="vLLM 0.33.0 transformers_utils/config.py",
    engines=ENGINE,
    unnamed="warning",
)
def no_top_level_model_type(subject: Subject) -> Iterator[Problem]:
    """A speculators config has no model_type at its top level.

    The decoder's own model_type stays in transformer_layer_config.
    """
    if subject.is_speculators and "model_type" in subject.config:
        yield Problem(
            subject.location("model_type"),
            f"{subject.config['model_type']!r}, expected none at the top level",
            repair={"model_type": REMOVED},
        )


@check(
    "C34",
    effect="vLLM cannot serve the draft by its own name; naming the target with --model works",
    fix="dflash convert {draft} {out} --to speculators --verifier ORG/REPO",
    source="vLLM 0.33.0 transformers_utils/config.py refuses a path",
    engines=ENGINE,
    unnamed="warning",
)
def names_a_hub_verifier(subject: Subject) -> Iterator[Problem]:
    """The draft names its verifier, the target, by hub repository."""
    if not subject.is_speculators:
        return
    name = as_object(as_object(subject.config.get("speculators_config")).get("verifier")).get("name_or_path")
    is_repository = isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_repository:
        yield Problem(
            subject.location("speculators_config.verifier.name_or_path"),
            f"found {name!r}, which is not a hub repository",
        )


def _takes_flag_for_all(subject: Subject) -> bool:
    """Whether the vLLM that was named, or any where none was, takes the speculators flag for every layer (#47745)."""
    engine = subject.engine(NAME)
    return engine is None or engine.release >= READS_KINDS
