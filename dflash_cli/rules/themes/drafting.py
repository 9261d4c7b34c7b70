"""Rules on the block, the mask token and other settings of drafting in the config."""

from collections.abc import Iterator

from dflash_cli.rules.rule import FIX_COPY, FIX_RUN_LEVEL, FIX_TO_COMMON, Problem, check
from dflash_cli.rules.shapes import different_values, layout_in_words, stated_scales
from dflash_cli.rules.subject import Subject
from dflash_runtime.json_values import is_int, is_number

MASK_EXPECTED = "a token id of 0 or more"
LARGEST_EPS = 1e-2
LARGEST_BLOCK = 256
"""A larger block is taken for a mistake."""
ENGINE_CODE = "vLLM 0.33.0 v1/spec_decode/dflash.py; SGLang 0.5.23 dflash_utils.py"
TWO_VALUES = "readers differ in which of the two values they use"


@check(
    "C03",
    effect="readers assume a block of 16 or 8, whatever the draft was trained with",
    fix="write the block size used in training into config.json, then check it: dflash validate {draft}",
    source="jundot/omlx#2317; InternLM/lmdeploy#4991",
    stops_runtime=True,
)
def block_size_is_one_number(subject: Subject) -> Iterator[Problem]:
    """block_size is stated, is at least 2, and has one value wherever it is stated.

    It counts the anchor: a block of 16 drafts 15 tokens. It is no longer than the draft has positions.
    """
    stated = subject.stated.values("block_size")
    location = subject.expected_at("block_size")
    if not stated:
        yield Problem(
            location,
            "missing, expected the block size used in training",
            outcome="drops" if subject.plan.num_speculative_tokens is None else "serves",
        )
    contradiction = different_values(subject, "block_size")
    if contradiction is not None:
        yield Problem(location, contradiction, effect=TWO_VALUES)
    limit = subject.stated.body.get("max_position_embeddings")
    for item in stated:
        if not is_int(item.value) or item.value < 2:
            least = subject.stated.spelled("block_size", 2)
            yield Problem(
                subject.location(item.key),
                f"found {item.raw!r}, expected an integer of at least {least}: a block has an anchor and a draft token",
                effect="readers stop, or draft nothing",
            )
        elif is_int(limit) and item.value > limit:
            yield Problem(
                subject.location(item.key),
                f"found {item.raw}, expected at most the draft's {limit} positions",
                effect="readers stop, or ask for more memory than there is",
            )
        elif item.value > LARGEST_BLOCK:
            yield Problem(
                subject.location(item.key),
                f"found {item.raw}, published drafts have blocks of 7 to 16",
                effect="most tokens of such a block are drafted in vain",
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
    location, value = subject.at("mask_token_id"), subject.stated.value("mask_token_id")
    vocab_size = subject.stated.body.get("vocab_size")
    if not subject.stated.statements("mask_token_id"):
        if "mask_token_id" not in subject.format.unstated:
            yield Problem(location, f"missing, expected {MASK_EXPECTED}")
    elif value is None:
        yield Problem(location, f"null, expected {MASK_EXPECTED}", effect="vLLM stops with a TypeError")
    elif not is_int(value) or value < 0:
        yield Problem(location, f"found {value!r}, expected {MASK_EXPECTED}")
    elif is_int(vocab_size) and value >= vocab_size:
        yield Problem(location, f"{value} is outside the vocabulary of {vocab_size}")


@check(
    "C13",
    effect=TWO_VALUES,
    fix=f"delete the wrong value, then test the other: {FIX_RUN_LEVEL}",
    source=ENGINE_CODE,
    outcome="drops",
)
def mask_token_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """mask_token_id has one value wherever it is stated."""
    contradiction = different_values(subject, "mask_token_id")
    if contradiction is not None:
        yield Problem(subject.location(subject.stated.values("mask_token_id")[0].key), contradiction)


@check(
    "C14",
    "warning",
    effect="the draft cannot tell a masked position from the real token",
    fix=f"{FIX_RUN_LEVEL} # tries the target's other special tokens",
    source="sgl-project/SpecForge longcat-flash config",
    outcome="serves",
)
def mask_token_is_spare(subject: Subject) -> Iterator[Problem]:
    """The mask token differs from the stop, start and padding tokens of the config."""
    value = subject.stated.value("mask_token_id")
    if not is_int(value):
        return
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        stated = subject.stated.body.get(key)
        if value in (stated if isinstance(stated, list) else [stated]):
            yield Problem(subject.expected_at("mask_token_id"), f"{value} is also {key}")


@check(
    "C28",
    "info",
    effect="engines load the draft as usual; a program that saves it again may leave out a tensor",
    fix=FIX_COPY,
    source="z-lab/Qwen3-4B-DFlash-b16 config.json",
)
def embeddings_are_not_tied(subject: Subject) -> Iterator[Problem]:
    """tie_word_embeddings is false, because a draft's head is the target's, or a tensor of its own."""
    if subject.stated.body.get("tie_word_embeddings") is True:
        yield Problem(subject.body_at("tie_word_embeddings"), "true, expected false in a draft")


@check(
    "C29",
    "warning",
    effect="only some engines apply the scale, and not every dialect can state it",
    fix="dflash validate {draft} --engine vllm,sglang # shows which engines apply it",
    source="vllm-project/vllm#41703; vLLM 0.33.0 qwen3_dflash2.py",
)
def scales_are_neutral(subject: Subject) -> Iterator[Problem]:
    """Scales are absent or change nothing, because some engines ignore them.

    The scales are input_embedding_scale, output_multiplier, logit_scale and final_logit_softcapping. The embedding's
    scale changes every draft. The others leave the likeliest token as it is and change only sampled drafts.
    With --engine, S05 and S21 judge each engine instead.
    """
    if not subject.plan.engines:
        yield from stated_scales(subject)


@check(
    "C35",
    effect="vLLM refuses such a draft; in an engine that serves it as DFlash, predictions are off by one position",
    fix="serve it with an engine that supports DSpark; if the flag is wrong, set it to false: dflash validate {draft}",
    source="vllm-project/vllm#54154",
)
def anchor_is_not_sampled(subject: Subject) -> Iterator[Problem]:
    """The draft predicts at the mask tokens only, not at the anchor, unless its family may."""
    if subject.format.samples_from_anchor:
        return
    for item in subject.stated.statements("sample_from_anchor"):
        if item.value is True:
            yield Problem(
                subject.location(item.key), "true: the draft also predicts at the anchor, as DSpark drafts do"
            )


@check(
    "C50",
    "warning",
    effect="an engine that assumes the other layout accepts almost no token, and does not report it",
    fix=f"{FIX_TO_COMMON} --layout anchor-first # or fill-in; the trainer knows which",
    source="vllm-project/vllm#56792 (0.9 % accepted); ggml-org/llama.cpp#26275",
    is_about_training=True,
)
def layout_is_stated(subject: Subject) -> Iterator[Problem]:
    """A DSpark draft states whether its blocks are anchor-first (sample_from_anchor true) or fill-in (false).

    In an anchor-first block of N rows, every row predicts the token after it: N draft tokens. In a fill-in block, each
    mask predicts its own token: N - 1 draft tokens. If the key is missing, vLLM and SGLang serve native files as
    anchor-first, and vLLM and llama.cpp serve speculators files as fill-in.
    """
    if subject.parsed is None or not subject.parsed.has_unknown_layout:
        return
    assumed = {str(engine): engine.served_layout(subject) for engine in subject.plan.engines}
    known = [f"{name} assumes {layout_in_words(value)}" for name, value in assumed.items() if value is not None]
    message = "missing, expected true (anchor-first) or false (fill-in)"
    yield Problem(subject.expected_at("sample_from_anchor"), "; ".join([message, *known]))


@check(
    "C43",
    effect="every norm of the draft computes with another epsilon than in training",
    fix="write the rms_norm_eps used in training, or export the draft again; then dflash validate {draft}",
    source="transformers Qwen3Config.rms_norm_eps",
    outcome="drops",
)
def eps_is_small(subject: Subject) -> Iterator[Problem]:
    """rms_norm_eps is a small positive number, usually 1e-6."""
    value, location = subject.stated.body.get("rms_norm_eps"), subject.body_at("rms_norm_eps")
    if value is None:  # C32 reports it
        return
    if not is_number(value) or value <= 0:
        yield Problem(location, f"found {value!r}, expected a positive number")
    elif value > LARGEST_EPS:
        yield Problem(location, f"found {value}, the usual value is 1e-6", severity="warning")
