"""Rules on the block, the mask token and the other settings of drafting in the config."""

from collections.abc import Iterator

from dflash_cli.formats.native_fields import SCALES
from dflash_cli.rules.rule import FIX_COPY, FIX_RUN_LEVEL, Problem, check
from dflash_cli.rules.subject import SPECULATORS_BODY, Subject
from dflash_runtime.json_values import as_object, is_int, is_number

MASK_EXPECTED = "a token id of 0 or more"
NEUTRAL = {"input_embedding_scale": (1,), "output_multiplier": (1,), "final_logit_softcapping": (0,)}
LARGEST_EPS = 1e-2
LARGEST_BLOCK = 256
"""A block beyond it is taken for a mistake."""
ENGINE_CODE = "vLLM 0.33.0 v1/spec_decode/dflash.py; SGLang 0.5.23 dflash_utils.py"


@check(
    "C03",
    effect="readers assume a block of 16 or 8, whatever the draft was trained with",
    fix=(
        "write the block_size used in training at the top level (in a native draft also in dflash_config), then "
        "check it: dflash validate {draft}"
    ),
    source="jundot/omlx#2317; InternLM/lmdeploy#4991",
    stops_runtime=True,
)
def block_size_is_one_number(subject: Subject) -> Iterator[Problem]:
    """block_size is stated, is at least 2, and has one value wherever it is stated.

    It counts the anchor: a block of 16 drafts 15 tokens. It is no longer than the draft has positions.
    """
    homes = {location: value for location, value in subject.homes("block_size").items() if value is not None}
    if not homes:
        yield Problem(
            subject.location("block_size"),
            "missing, expected the block size used in training",
            outcome="drops" if subject.num_speculative_tokens is None else "serves",
        )
    if any(value != next(iter(homes.values())) for value in homes.values()):
        stated = ", ".join(f"{location.split(':')[1]} {value}" for location, value in homes.items())
        yield Problem(
            subject.location("block_size"),
            f"stated twice with different values: {stated}",
            effect="readers differ in which of the two values they use",
        )
    limit = subject.body.get("max_position_embeddings")
    for location, value in homes.items():
        if not is_int(value) or value < 2:
            yield Problem(
                location,
                f"found {value!r}, expected an integer of at least 2: the anchor and a draft token",
                effect="readers stop, or draft nothing",
            )
        elif is_int(limit) and value > limit:
            yield Problem(
                location,
                f"found {value}, expected at most the draft's {limit} positions",
                effect="readers stop, or ask for more memory than there is",
            )
        elif value > LARGEST_BLOCK:
            yield Problem(
                location,
                f"found {value}, published drafts have 7 to 16",
                effect="most of such a block is drafted in vain",
                severity="warning",
            )


@check(
    "C12",
    effect="engines stop, or use another token as the mask",
    fix="write the mask token id used in training, then check it: dflash validate {draft}",
    source="vLLM 0.33.0 v1/worker/gpu/spec_decode/utils.py; SGLang 0.5.23 dflash_utils.py",
)
def mask_token_is_an_id(subject: Subject) -> Iterator[Problem]:
    """mask_token_id is a token id within the vocabulary."""
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
    effect="readers differ in which of the two values they use",
    fix="delete the wrong one, then test the other: dflash validate {draft} --target {target} --level run",
    source=ENGINE_CODE,
    outcome="drops",
)
def mask_token_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """mask_token_id has one value wherever it is stated."""
    homes = {location: value for location, value in subject.homes("mask_token_id").items() if value is not None}
    if any(value != next(iter(homes.values())) for value in homes.values()):
        stated = ", ".join(f"{location.split(':')[1]} {value}" for location, value in homes.items())
        yield Problem(next(iter(homes)), f"stated twice with different values: {stated}")


@check(
    "C14",
    "warning",
    effect="the draft cannot tell a masked position from the real token",
    fix=f"{FIX_RUN_LEVEL} # tries the target's other special tokens",
    source="sgl-project/SpecForge longcat-flash config",
    outcome="serves",
)
def mask_token_is_spare(subject: Subject) -> Iterator[Problem]:
    """The mask token is neither a stop token nor a start or padding token of the config."""
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
    effect="loading is not affected; a program that saves the draft again may leave out a tensor",
    fix=FIX_COPY,
    source="z-lab/Qwen3-4B-DFlash-b16 config.json",
)
def embeddings_are_not_tied(subject: Subject) -> Iterator[Problem]:
    """tie_word_embeddings is false, because a draft's head is the target's, or a tensor of its own."""
    if subject.body.get("tie_word_embeddings") is True:
        yield Problem(subject.body_location("tie_word_embeddings"), "true, expected false in a draft")


@check(
    "C29",
    "warning",
    effect="only some engines apply the scale, and the speculators dialect cannot state it",
    fix="dflash validate {draft} --engine vllm,sglang # shows which engines apply it",
    source="vllm-project/vllm#41703; vLLM 0.33.0 qwen3_dflash2.py",
)
def scales_are_neutral(subject: Subject) -> Iterator[Problem]:
    """Scales are neutral or absent, because some engines leave them out.

    The scales are input_embedding_scale, output_multiplier and final_logit_softcapping. The last two do not change
    which token is likeliest, only sampled drafts; the embedding's scale changes everything. With --engine, S05 and S21
    judge each engine instead.
    """
    for key in SCALES if not subject.engines else ():
        value = subject.stated(key)
        if value is not None and value not in NEUTRAL[key]:
            yield Problem(next(iter(subject.homes(key))), f"found {value}, expected the neutral value or none")


@check(
    "C35",
    effect="vLLM refuses it for DFlash; served as DFlash, every prediction is off by one position",
    fix=(
        "serve it with an engine that supports DSpark; if the flag is wrong, set it to false and run dflash "
        "validate {draft}"
    ),
    source="vllm-project/vllm#54154",
)
def anchor_is_not_sampled(subject: Subject) -> Iterator[Problem]:
    """The draft predicts at the mask tokens only, not at the anchor."""
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
    effect="every norm of the draft computes with another epsilon than in training",
    fix="write the rms_norm_eps used in training, or export the draft again; then dflash validate {draft}",
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
        yield Problem(
            subject.body_location("rms_norm_eps"), f"found {value}, the usual value is 1e-6", severity="warning"
        )
