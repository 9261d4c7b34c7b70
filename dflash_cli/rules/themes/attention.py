"""Rules on layers: kinds, windows, causality, heads."""

from collections.abc import Iterator

from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.dialect import COMMON
from dflash_cli.formats.fields import look_up
from dflash_cli.rules.rule import FIX_COPY, FIX_TO_COMMON, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.json_values import is_int

FIX_CAUSALITY = (
    f"dflash validate {{draft}} --target {{target}} --level run # then dflash convert {{draft}} {{out}} --to {COMMON} "
    f"--causality causal (or non-causal)"
)

WINDOW_KEY = "true, expected the sliding layers in layer_types"
PUBLISHED_NON_CAUSAL = (
    "vLLM, SGLang and z-lab's code make such layers causal; published drafts of this family are "
    "trained without causality"
)
QWEN3 = "transformers Qwen3Config"


@check(
    "C15",
    effect="engines stop, or treat every layer as full attention",
    fix="write one kind for each layer, then check it: dflash validate {draft}",
    source="SGLang 0.5.23 models/dflash.py",
)
def layer_types_fit(subject: Subject) -> Iterator[Problem]:
    """layer_types names one known kind of attention for each layer."""
    value, count = subject.stated.body.get("layer_types"), subject.stated.body.get("num_hidden_layers")
    location = subject.body_at("layer_types")
    if value is None:
        return
    if not isinstance(value, list):
        yield Problem(location, f"found {value!r}, expected a list")
        return
    if is_int(count) and len(value) != count:
        yield Problem(location, f"found {len(value)} entries for {count} layers")
    for kind in sorted({repr(item) for item in value if item not in LAYER_KINDS}):
        yield Problem(location, f"found {kind}, expected one of {', '.join(LAYER_KINDS)}")


@check(
    "C16",
    effect="transformers drops sliding_window, so readers attend to the whole context or stop",
    fix=FIX_COPY,
    source=f"{QWEN3}; SGLang 0.5.23 and vLLM 0.33.0 raise",
)
def windows_take_effect(subject: Subject) -> Iterator[Problem]:
    """If the draft has sliding layers, sliding_window is a positive integer and use_sliding_window is true."""
    body = subject.stated.body
    if SLIDING not in subject.stated.layer_types or body.get("layer_types") is None:
        return
    window = body.get("sliding_window")
    if not is_int(window) or window < 1:
        yield Problem(
            subject.body_at("sliding_window"),
            f"found {window!r}, expected a positive integer for sliding layers",
            fix="write the window used in training, then check it: dflash validate {draft}",
        )
    elif body.get("use_sliding_window") is not True:
        found = body.get("use_sliding_window", "missing")
        yield Problem(
            subject.body_at("use_sliding_window"),
            f"{found}, expected true, since layer_types has sliding layers".lower(),
            repair={subject.format.decoder_key("use_sliding_window"): True},
        )


@check(
    "C17",
    "warning",
    effect="vLLM gives every layer a window; SGLang and the reference code attend to the whole context",
    fix=FIX_TO_COMMON,
    source="NVIDIA/Model-Optimizer#2149; vllm-project/vllm#46104",
)
def windows_are_in_layer_types(subject: Subject) -> Iterator[Problem]:
    """layer_types says which layers have a window."""
    for key in subject.stated.window_keys:
        yield Problem(subject.location(key), WINDOW_KEY)


@check(
    "C18",
    effect="vLLM and SGLang use is_causal; the draft may have been trained with the other value",
    fix=FIX_CAUSALITY,
    source="NVIDIA-NeMo/Automodel train_jetspec.py",
    outcome="drops",
)
def causality_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """All keys that state causality agree."""
    stated = subject.stated.causality
    values = {key: look_up(subject.config, key) for key in stated}
    for key, causal in stated.items():
        if causal is None:
            yield Problem(subject.location(key), f"found {values[key]!r}, expected true or false")
    known = [(key, causal) for key, causal in stated.items() if causal is not None]
    for key, causal in known[1:]:
        first, expected = known[0]
        if causal != expected:
            yield Problem(subject.location(first), f"{values[first]}, but {key} is {values[key]}".lower())


@check(
    "C19",
    "warning",
    effect="readers take sliding layers as their dialect does; SpecForge and Automodel train them as non-causal",
    fix=FIX_CAUSALITY,
    source="z-lab/dflash model.py; sgl-project/SpecForge modeling/draft/dflash.py",
    is_about_training=True,
)
def causality_of_windows_is_stated(subject: Subject) -> Iterator[Problem]:
    """A draft with sliding layers states whether they are causal.

    `dflash inspect` shows how each layer is read if the key is absent.
    """
    if not subject.stated.states_causality:
        effect = PUBLISHED_NON_CAUSAL if subject.format.is_trained_non_causal else ""
        yield Problem(subject.expected_at("causal"), "missing, although the draft has sliding layers", effect)


@check(
    "C38",
    effect="no reader can group the heads",
    fix="correct the numbers of heads, then check them: dflash validate {draft}",
    source="transformers Qwen3Attention",
)
def heads_divide(subject: Subject) -> Iterator[Problem]:
    """The number of attention heads is a multiple of the number of key-value heads."""
    heads = subject.stated.body.get("num_attention_heads")
    groups = subject.stated.body.get("num_key_value_heads")
    if is_int(heads) and is_int(groups) and (groups < 1 or heads % groups):
        location = subject.body_at("num_attention_heads")
        yield Problem(location, f"{heads} is not a multiple of {groups} key-value heads")


@check(
    "C39",
    "warning",
    effect="readers that use transformers alternate sliding and full layers; others take all as full",
    fix=f"write layer_types as in training; if every layer was full, {FIX_TO_COMMON} writes that",
    source="transformers GptOssConfig; z-lab/gpt-oss-20b-DFlash",
    is_about_training=True,
)
def gpt_oss_states_its_layers(subject: Subject) -> Iterator[Problem]:
    """A gpt_oss draft states layer_types.

    If it is absent, the gpt_oss config class of transformers alternates sliding and full layers.
    """
    if subject.stated.body.get("model_type") == "gpt_oss" and subject.stated.body.get("layer_types") is None:
        yield Problem(subject.body_at("layer_types"), "missing, expected one kind for each layer of a gpt_oss draft")


@check(
    "C42",
    "warning",
    effect="transformers gives a window to the layers from max_window_layers on, other readers to no layer",
    fix="write layer_types as in training, then check it: dflash validate {draft}",
    source=f"{QWEN3}.layer_types",
    is_about_training=True,
)
def kinds_are_not_derived(subject: Subject) -> Iterator[Problem]:
    """If use_sliding_window is true, layer_types says which layers slide."""
    body = subject.stated.body
    if body.get("use_sliding_window") is True and body.get("layer_types") is None and body.get("sliding_window"):
        yield Problem(subject.body_at("layer_types"), "missing, although use_sliding_window is true")
