"""Rules on layers: kinds, windows, causality, heads, activation."""

from collections.abc import Iterator

from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.validation.rule import (
    FIX_OUT,
    TO_NATIVE,
    TRY,
    Problem,
    Severity,
    Subject,
    check,
    is_int,
)
from dflash_runtime.checkpoint.hf_config import SLIDING

QWEN3 = "transformers Qwen3Config"


@check(
    "C15",
    effect="engines stop, or take every layer as full attention",
    fix="state one kind for each layer, then dflash validate DRAFT",
    source="SGLang 0.5.23 models/dflash.py",
)
def layer_types_fit(subject: Subject) -> Iterator[Problem]:
    """layer_types has one known kind for each layer."""
    value, count = subject.body.get("layer_types"), subject.body.get("num_hidden_layers")
    place = subject.body_place("layer_types")
    if value is None:
        return
    if not isinstance(value, list):
        yield Problem(place, f"found {value!r}, expected a list")
        return
    if is_int(count) and len(value) != count:
        yield Problem(place, f"{len(value)} entries for {count} layers")
    for kind in sorted({repr(item) for item in value if item not in LAYER_KINDS}):
        yield Problem(place, f"found {kind}, expected one of {', '.join(LAYER_KINDS)}")


@check(
    "C16",
    effect="transformers drops sliding_window, so readers attend to everything or stop",
    fix=FIX_OUT,
    source=f"{QWEN3}; SGLang 0.5.23 and vLLM 0.33.0 raise",
)
def windows_take_effect(subject: Subject) -> Iterator[Problem]:
    """Sliding layers have a window, and use_sliding_window lets it take effect."""
    if SLIDING not in subject.layer_types:
        return
    window = subject.body.get("sliding_window")
    if not is_int(window) or window < 1:
        yield Problem(
            subject.body_place("sliding_window"),
            f"found {window!r}, expected a positive integer for sliding layers",
            fix="state the window of the training, then dflash validate DRAFT",
        )
    elif subject.body.get("use_sliding_window") is not True:
        place = subject.body_place("use_sliding_window")
        stated = subject.body.get("use_sliding_window", "missing")
        yield Problem(place, f"{stated} beside sliding layers".lower(), repair={place.partition(":")[2]: True})


@check(
    "C17",
    "warning",
    effect="vLLM puts a window on every layer; SGLang and the reference attend to everything",
    fix=TO_NATIVE,
    source="NVIDIA/Model-Optimizer#2149; vllm-project/vllm#46104",
)
def windows_are_in_layer_types(subject: Subject) -> Iterator[Problem]:
    """Windows are stated in layer_types, not in use_swa."""
    if subject.nested.get("use_swa"):
        yield Problem(subject.place("dflash_config.use_swa"), "true")


@check(
    "C18",
    effect="vLLM and SGLang take the top-level is_causal, the training may have used the other",
    fix=TRY,
    source="NVIDIA-NeMo/Automodel train_jetspec.py",
    outcome="drops",
)
def causality_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """Causality is the same wherever it is stated."""
    top, nested = subject.body.get("is_causal"), subject.nested.get("causal")
    for place, value in ((subject.body_place("is_causal"), top), (subject.place("dflash_config.causal"), nested)):
        if value is not None and not isinstance(value, bool):
            yield Problem(place, f"found {value!r}, expected true or false")
    if isinstance(top, bool) and isinstance(nested, bool) and top != nested:
        yield Problem(subject.place("is_causal"), f"{top} but dflash_config.causal is {nested}".lower())
    flag = subject.config.get(NON_CAUSAL_FLAG)
    if subject.is_speculators and isinstance(top, bool):
        stated = {flag is False and kind == SLIDING for kind in subject.layer_types}
        if stated != {top}:
            yield Problem(
                subject.body_place("is_causal"),
                f"{top}, which {NON_CAUSAL_FLAG} {flag} contradicts".lower(),
                effect="vLLM takes is_causal, speculators the flag",
            )


@check(
    "C19",
    "warning",
    effect="readers serve sliding layers causally; SpecForge and Automodel train them non-causally",
    fix=TRY,
    source="z-lab/dflash model.py; sgl-project/SpecForge modeling/draft/dflash.py",
)
def causality_of_windows_is_stated(subject: Subject) -> Iterator[Problem]:
    """A draft with sliding layers says whether they are causal.

    Leave the key out of a native config only where sliding layers are causal and full layers are not: that is what
    its absence means.
    """
    if SLIDING not in subject.layer_types:
        return
    if subject.is_speculators:
        if NON_CAUSAL_FLAG not in subject.config:
            yield Problem(
                subject.place(NON_CAUSAL_FLAG), "missing beside sliding layers", effect="readers take non-causal"
            )
    elif subject.body.get("is_causal") is None and subject.nested.get("causal") is None:
        yield Problem(subject.place("is_causal"), "missing beside sliding layers")


@check(
    "C20",
    effect="vLLM 0.33 makes every layer causal; this draft was trained non-causal",
    fix=FIX_OUT,
    source="vllm-project/vllm#56692, open in 0.33.0; #47745 brought it",
    outcome="drops",
    engines=("vllm",),
)
def full_layers_stay_non_causal(subject: Subject) -> Iterator[Problem]:
    """sliding_window_non_causal is not false where no layer slides.

    In speculators the flag concerns sliding layers only, so both values mean the same for a draft of full layers.
    vLLM takes it for every layer since #47745; 0.24 does not look at it. Stating true is right for both.
    """
    if not subject.is_speculators or SLIDING in subject.layer_types or subject.config.get(NON_CAUSAL_FLAG) is not False:
        return
    severity = _causality_severity(subject)
    if severity is not None and subject.body.get("is_causal") is not False:
        yield Problem(
            subject.place(NON_CAUSAL_FLAG),
            f"false, and all {len(subject.layer_types)} layers are full attention",
            severity=severity,
            repair={NON_CAUSAL_FLAG: True},
        )


@check(
    "C21",
    effect="vLLM 0.33 makes the full layers causal too",
    fix=TO_NATIVE,
    source="vLLM 0.33.0 transformers_utils/configs/speculators/algos.py",
    outcome="drops",
    engines=("vllm",),
)
def layers_agree_for_vllm(subject: Subject) -> Iterator[Problem]:
    """One causality for all layers, which is all that vLLM takes from the speculators dialect."""
    if not subject.is_speculators or subject.config.get(NON_CAUSAL_FLAG) is not False:
        return
    severity = _causality_severity(subject)
    if severity is not None and set(subject.layer_types) == set(LAYER_KINDS):
        yield Problem(
            subject.place(NON_CAUSAL_FLAG),
            "false with both sliding and full layers: sliding ones are causal, full ones are not",
            severity=severity,
        )


@check(
    "C27",
    effect="vLLM stops; other readers may compute another function",
    fix="serve it with an engine that has the function; dflash validate DRAFT --engine sglang",
    source="vLLM 0.33.0 qwen3_dflash.py",
)
def activation_is_silu(subject: Subject) -> Iterator[Problem]:
    """hidden_act is silu, the only one vLLM's DFlash has."""
    value = subject.body.get("hidden_act", "silu")
    if value != "silu":
        yield Problem(subject.body_place("hidden_act"), f"found {value!r}, expected 'silu'")


@check(
    "C38",
    effect="no reader can group the heads",
    fix="correct the head counts, then dflash validate DRAFT",
    source="transformers Qwen3Attention",
)
def heads_divide(subject: Subject) -> Iterator[Problem]:
    """Attention heads are a multiple of the key-value heads."""
    heads, groups = subject.body.get("num_attention_heads"), subject.body.get("num_key_value_heads")
    if is_int(heads) and is_int(groups) and (groups < 1 or heads % groups):
        yield Problem(subject.body_place("num_attention_heads"), f"{heads} is no multiple of {groups} key-value heads")


@check(
    "C39",
    "warning",
    effect="readers through transformers alternate sliding and full layers, others take all as full",
    fix="dflash convert DRAFT OUT --to native writes layer_types out",
    source="transformers GptOssConfig; z-lab/gpt-oss-20b-DFlash",
)
def gpt_oss_states_its_layers(subject: Subject) -> Iterator[Problem]:
    """A gpt_oss draft states layer_types, since its config class would alternate them."""
    if subject.body.get("model_type") == "gpt_oss" and subject.body.get("layer_types") is None:
        yield Problem(subject.body_place("layer_types"), "missing in a gpt_oss config")


@check(
    "C42",
    "warning",
    effect="transformers gives a window to the layers from max_window_layers on, other readers to none",
    fix="state layer_types, then dflash validate DRAFT",
    source=f"{QWEN3}.layer_types",
)
def kinds_are_not_derived(subject: Subject) -> Iterator[Problem]:
    """use_sliding_window is not on without layer_types, from which kinds would have to be guessed."""
    body = subject.body
    if body.get("use_sliding_window") is True and body.get("layer_types") is None and body.get("sliding_window"):
        yield Problem(subject.body_place("layer_types"), "missing, while use_sliding_window is true")


def _causality_severity(subject: Subject) -> Severity | None:
    """Error for a vLLM that has the change (#47745, seen in 0.33), nothing for one that has not (0.24)."""
    engine = subject.engine("vllm")
    if engine is None:
        return "warning"
    if engine.release[:2] == (0, 24):
        return None
    return "error" if engine.release >= (0, 33) else "warning"
