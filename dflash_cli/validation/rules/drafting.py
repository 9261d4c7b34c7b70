"""Rules on the block, the mask token and what else the config says of drafting."""

from collections.abc import Iterator

from dflash_cli.formats.native_fields import SCALES
from dflash_cli.validation.rule import FIX_COPY, FIX_REEXPORT, FIX_RUN_LEVEL, Problem, check
from dflash_cli.validation.subject import SPECULATORS_BODY, Subject
from dflash_runtime.json_values import as_object, is_int, is_number

MASK_EXPECTED = "an integer from 0"
NEUTRAL = {"input_embedding_scale": (1,), "output_multiplier": (1,), "final_logit_softcapping": (0,)}
LARGEST_EPS = 1e-2
ENGINE_CODE = "vLLM 0.33.0 v1/spec_decode/dflash.py; SGLang 0.5.23 dflash_utils.py"


@check(
    "C03",
    effect="readers assume 16 or 8, whatever the draft was trained with",
    fix="state it at the top level and in dflash_config, then dflash validate {draft}",
    source="jundot/omlx#2317; InternLM/lmdeploy#4991",
)
def block_size_is_one_number(subject: Subject) -> Iterator[Problem]:
    """block_size is stated, the same wherever it is stated, and at least 2.

    It counts the anchor: a block of 16 drafts 15 tokens.
    """
    homes = {location: value for location, value in subject.homes("block_size").items() if value is not None}
    if not homes:
        yield Problem(subject.location("block_size"), "missing")
    if any(value != next(iter(homes.values())) for value in homes.values()):
        stated = ", ".join(f"{location.split(':')[1]} {value}" for location, value in homes.items())
        yield Problem(
            subject.location("block_size"),
            f"stated twice with different values: {stated}",
            effect="readers differ in which of the two they take",
        )
    for location, value in homes.items():
        if not is_int(value) or value < 2:
            yield Problem(location, f"found {value!r}, expected an integer of at least 2: the anchor and a draft token")


@check(
    "C04",
    effect="vLLM takes K from here and would draft a block of another length than was trained",
    fix=FIX_COPY,
    source="vllm-project/vllm#39519; vllm-project/speculators#456",
    outcome="drops",
)
def drafts_one_less_than_the_block(subject: Subject) -> Iterator[Problem]:
    """speculative_tokens is block_size - 1, since the block counts the anchor."""
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
                f"{stated!r}, expected {expected} for a block of {block}",
            )


@check(
    "C12",
    effect="engines stop, or fill in another token",
    fix="state the id the draft was trained with, then dflash validate {draft}",
    source="vLLM 0.33.0 v1/worker/gpu/spec_decode/utils.py; SGLang 0.5.23 dflash_utils.py",
)
def mask_token_is_an_id(subject: Subject) -> Iterator[Problem]:
    """mask_token_id is an integer from 0 to the vocabulary's end."""
    homes = subject.homes("mask_token_id")
    value = subject.stated("mask_token_id")
    location = next(iter(homes), subject.location("mask_token_id"))
    vocab_size = subject.body.get("vocab_size")
    if not homes:
        yield Problem(location, f"missing, expected {MASK_EXPECTED}")
    elif value is None:
        yield Problem(location, f"null, expected {MASK_EXPECTED}", effect="vLLM stops with a TypeError")
    elif not is_int(value) or value < 0:
        yield Problem(location, f"found {value!r}, expected {MASK_EXPECTED}")
    elif is_int(vocab_size) and value >= vocab_size:
        yield Problem(location, f"{value} is outside the vocabulary of {vocab_size}")


@check(
    "C13",
    effect="readers differ in which of the two they take",
    fix=FIX_RUN_LEVEL,
    source=ENGINE_CODE,
    outcome="drops",
)
def mask_token_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """mask_token_id is the same in both places."""
    homes = {location: value for location, value in subject.homes("mask_token_id").items() if value is not None}
    if any(value != next(iter(homes.values())) for value in homes.values()):
        stated = ", ".join(f"{location.split(':')[1]} {value}" for location, value in homes.items())
        yield Problem(next(iter(homes)), f"stated twice with different values: {stated}")


@check(
    "C14",
    "warning",
    effect="the draft cannot tell a masked position from the real token",
    fix=FIX_RUN_LEVEL,
    source="sgl-project/SpecForge longcat-flash config",
    outcome="serves",
)
def mask_token_is_spare(subject: Subject) -> Iterator[Problem]:
    """The mask is no token that text contains."""
    value = subject.stated("mask_token_id")
    if not is_int(value):
        return
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        stated = subject.body.get(key)
        if value in (stated if isinstance(stated, list) else [stated]):
            yield Problem(subject.location("mask_token_id"), f"{value} is also {key}")


@check(
    "C28",
    "info",
    effect="none while loading; a program that saves the draft again may leave out a tensor",
    fix=FIX_COPY,
    source="z-lab/Qwen3-4B-DFlash-b16 config.json",
)
def embeddings_are_not_tied(subject: Subject) -> Iterator[Problem]:
    """tie_word_embeddings is false in a draft, which has no embedding."""
    if subject.body.get("tie_word_embeddings") is True:
        yield Problem(subject.body_location("tie_word_embeddings"), "true in a file without an embedding")


@check(
    "C29",
    "warning",
    effect="only some engines apply it, and the speculators dialect cannot state it",
    fix="name the engine to see what it does: dflash validate {draft} --engine vllm,sglang",
    source="vllm-project/vllm#41703; vLLM 0.33.0 qwen3_dflash2.py",
)
def scales_are_neutral(subject: Subject) -> Iterator[Problem]:
    """No scale is stated that some engines leave out.

    A soft cap and a multiplier do not change which token is likeliest, only sampled drafts; the embedding's scale
    changes everything. With --engine, S05 and S21 judge each engine instead.
    """
    for key in SCALES if not subject.engines else ():
        value = subject.stated(key)
        if value is not None and value not in NEUTRAL[key]:
            yield Problem(next(iter(subject.homes(key))), f"{value}")


@check(
    "C35",
    effect="vLLM refuses it for DFlash; served as DFlash every prediction is off by one position",
    fix="use an engine that serves DSpark; dflash inspect {draft}",
    source="vllm-project/vllm#54154",
)
def anchor_is_not_sampled(subject: Subject) -> Iterator[Problem]:
    """The draft does not predict at the anchor."""
    inner = as_object(as_object(subject.config.get(SPECULATORS_BODY)).get("dflash_config"))
    for location, value in (
        ("sample_from_anchor", subject.config.get("sample_from_anchor")),
        ("dflash_config.sample_from_anchor", subject.nested.get("sample_from_anchor")),
        (f"{SPECULATORS_BODY}.dflash_config.sample_from_anchor", inner.get("sample_from_anchor")),
    ):
        if value is True:
            yield Problem(subject.location(location), "true: the draft also predicts at the anchor, as DSpark does")


@check(
    "C43",
    effect="every norm of the draft divides by another number than in training",
    fix=FIX_REEXPORT,
    source="transformers Qwen3Config.rms_norm_eps",
    outcome="drops",
)
def eps_is_small(subject: Subject) -> Iterator[Problem]:
    """rms_norm_eps is a small positive number, usually 1e-6."""
    value = subject.body.get("rms_norm_eps")
    if value is None:  # C32 reports it
        return
    if not is_number(value) or value <= 0:
        yield Problem(subject.body_location("rms_norm_eps"), f"found {value!r}, expected a positive number")
    elif value > LARGEST_EPS:
        yield Problem(subject.body_location("rms_norm_eps"), f"{value}, usual is 1e-6", severity="warning")


@check(
    "C44",
    effect="scales double what the norms have already done, or halve it",
    fix=FIX_REEXPORT,
    source="SGLang 0.5.23 models/dflash.py use_gemma_norm",
    outcome="drops",
)
def norms_are_plain(subject: Subject) -> Iterator[Problem]:
    """The norms multiply by their weight, not by one plus it.

    SGLang takes use_gemma_norm as a wish for the other kind; vLLM, this tool and the z-lab reference do not look.
    """
    for location, value in subject.homes("use_gemma_norm").items():
        if value is True:
            yield Problem(location, "true: read by SGLang only")
