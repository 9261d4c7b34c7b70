"""Rules on layers: kinds, windows, causality, heads, activation."""

from collections.abc import Iterator

from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.rules.rule import FIX_COPY, FIX_TO_NATIVE, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.hf_config import SLIDING
from dflash_runtime.json_values import is_int

FIX_CAUSALITY = (
    "dflash validate {draft} --target {target} --level run # then dflash convert {draft} {out} --to native "
    "--causality causal (or non-causal)"
)

QWEN3 = "transformers Qwen3Config"


@check(
    "C15",
    effect="engines stop, or treat every layer as full attention",
    fix="write one kind for each layer, then check it: dflash validate {draft}",
    source="SGLang 0.5.23 models/dflash.py",
)
def layer_types_fit(subject: Subject) -> Iterator[Problem]:
    """layer_types gives one known kind of attention for each layer."""
    value, count = subject.body.get("layer_types"), subject.body.get("num_hidden_layers")
    location = subject.body_location("layer_types")
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
    """Sliding layers have a window, and use_sliding_window is true so that it takes effect."""
    if SLIDING not in subject.layer_types:
        return
    window = subject.body.get("sliding_window")
    if not is_int(window) or window < 1:
        yield Problem(
            subject.body_location("sliding_window"),
            f"found {window!r}, expected a positive integer for sliding layers",
            fix="write the window used in training, then check it: dflash validate {draft}",
        )
    elif subject.body.get("use_sliding_window") is not True:
        location = subject.body_location("use_sliding_window")
        stated = subject.body.get("use_sliding_window", "missing")
        yield Problem(
            location,
            f"{stated}, expected true, since layer_types has sliding layers".lower(),
            repair={location.partition(":")[2]: True},
        )


@check(
    "C17",
    "warning",
    effect="vLLM puts a window on every layer; SGLang and the reference code attend to the whole context",
    fix=FIX_TO_NATIVE,
    source="NVIDIA/Model-Optimizer#2149; vllm-project/vllm#46104",
)
def windows_are_in_layer_types(subject: Subject) -> Iterator[Problem]:
    """Sliding windows are stated in layer_types rather than in use_swa."""
    if subject.nested.get("use_swa") and SLIDING not in subject.layer_types:
        yield Problem(subject.location("dflash_config.use_swa"), "true, expected the sliding layers in layer_types")


@check(
    "C18",
    effect="vLLM and SGLang use the top-level is_causal; the training may have used the other value",
    fix=FIX_CAUSALITY,
    source="NVIDIA-NeMo/Automodel train_jetspec.py",
    outcome="drops",
)
def causality_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """Causality has one value wherever it is stated."""
    top, nested = subject.body.get("is_causal"), subject.nested.get("causal")
    homes = {subject.body_location("is_causal"): top, subject.location("dflash_config.causal"): nested}
    for location, value in homes.items():
        if value is not None and not isinstance(value, bool):
            yield Problem(location, f"found {value!r}, expected true or false")
    if isinstance(top, bool) and isinstance(nested, bool) and top != nested:
        yield Problem(subject.location("is_causal"), f"{top}, but dflash_config.causal is {nested}".lower())
    flag = subject.config.get(NON_CAUSAL_FLAG)
    if subject.is_speculators and isinstance(top, bool):
        stated = {flag is False and kind == SLIDING for kind in subject.layer_types}
        if stated != {top}:
            yield Problem(
                subject.body_location("is_causal"),
                f"{top}, which contradicts {NON_CAUSAL_FLAG} {flag}".lower(),
                effect="vLLM uses is_causal, speculators uses sliding_window_non_causal",
            )


@check(
    "C19",
    "warning",
    effect="readers serve sliding layers as causal; SpecForge and Automodel train them as non-causal",
    fix=FIX_CAUSALITY,
    source="z-lab/dflash model.py; sgl-project/SpecForge modeling/draft/dflash.py",
)
def causality_of_windows_is_stated(subject: Subject) -> Iterator[Problem]:
    """A draft with sliding layers states whether they are causal.

    In a native config, leave the key out only if sliding layers are causal and full layers are not: that is what its
    absence means.
    """
    if subject.is_causality_stated:
        return
    if subject.is_speculators:
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            "missing, although the draft has sliding layers",
            effect="readers treat the sliding layers as non-causal",
        )
    else:
        yield Problem(subject.location("is_causal"), "missing, although the draft has sliding layers")


@check(
    "C38",
    effect="no reader can group the heads",
    fix="correct the numbers of heads, then check them: dflash validate {draft}",
    source="transformers Qwen3Attention",
)
def heads_divide(subject: Subject) -> Iterator[Problem]:
    """The number of attention heads is a multiple of the number of key-value heads."""
    heads, groups = subject.body.get("num_attention_heads"), subject.body.get("num_key_value_heads")
    if is_int(heads) and is_int(groups) and (groups < 1 or heads % groups):
        location = subject.body_location("num_attention_heads")
        yield Problem(location, f"{heads} is not a multiple of {groups} key-value heads")


@check(
    "C39",
    "warning",
    effect="readers that use transformers alternate sliding and full layers; others take all as full",
    fix=f"write layer_types as in training; if every layer was full, {FIX_TO_NATIVE} writes that",
    source="transformers GptOssConfig; z-lab/gpt-oss-20b-DFlash",
    is_about_training=True,
)
def gpt_oss_states_its_layers(subject: Subject) -> Iterator[Problem]:
    """A gpt_oss draft states layer_types.

    Without it, the gpt_oss config class of transformers would alternate sliding and full layers.
    """
    if subject.body.get("model_type") == "gpt_oss" and subject.body.get("layer_types") is None:
        yield Problem(
            subject.body_location("layer_types"), "missing, expected one kind for each layer of a gpt_oss draft"
        )


@check(
    "C42",
    "warning",
    effect="transformers gives a window to the layers from max_window_layers on, other readers to none",
    fix="write layer_types as in training, then check it: dflash validate {draft}",
    source=f"{QWEN3}.layer_types",
    is_about_training=True,
)
def kinds_are_not_derived(subject: Subject) -> Iterator[Problem]:
    """If use_sliding_window is true, layer_types says which layers slide."""
    body = subject.body
    if body.get("use_sliding_window") is True and body.get("layer_types") is None and body.get("sliding_window"):
        yield Problem(subject.body_location("layer_types"), "missing, although use_sliding_window is true")
