"""Rules on layers: kinds, windows, causality, rope, activation."""

from collections.abc import Iterator
from typing import Any

from dflash_cli.checks.base import Problem, Severity, Subject, as_object, check, is_int, is_number

KINDS = ("full_attention", "sliding_attention")
SLIDING = "sliding_attention"
FLAG = "sliding_window_non_causal"


@check("C15")
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
    for kind in sorted({repr(item) for item in value if item not in KINDS}):
        yield Problem(place, f"found {kind}, expected one of {', '.join(KINDS)}")


@check("C16")
def windows_take_effect(subject: Subject) -> Iterator[Problem]:
    """Sliding layers have a window that takes effect (transformers Qwen3Config drops it otherwise)."""
    if SLIDING not in subject.layer_types:
        return
    window = subject.body.get("sliding_window")
    if not is_int(window) or window < 1:
        yield Problem(
            subject.body_place("sliding_window"), f"found {window!r}, expected a positive integer for sliding layers"
        )
    elif subject.body.get("use_sliding_window") is not True:
        yield Problem(
            subject.body_place("use_sliding_window"),
            f"{subject.body.get('use_sliding_window', 'missing')} beside sliding layers".lower(),
            effect="transformers drops sliding_window, so readers attend to everything or stop",
            fix="set use_sliding_window to true",
        )


@check("C17", "warning")
def use_swa_is_not_portable(subject: Subject) -> Iterator[Problem]:
    """Windows are stated in layer_types, not in use_swa (NVIDIA/Model-Optimizer#2149)."""
    if subject.nested.get("use_swa"):
        yield Problem(
            subject.place("dflash_config.use_swa"),
            "true",
            effect="vLLM puts a window on every layer; SGLang and the reference attend to everything",
            fix="dflash convert SRC DST --to native states the windows in layer_types",
            severity=subject.severity_for("sglang"),
        )


@check("C18")
def causality_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """Causality is the same wherever it is stated (NVIDIA-NeMo/Automodel's JetSpec recipe)."""
    top, nested = subject.body.get("is_causal"), subject.nested.get("causal")
    for place, value in ((subject.body_place("is_causal"), top), (subject.place("dflash_config.causal"), nested)):
        if value is not None and not isinstance(value, bool):
            yield Problem(place, f"found {value!r}, expected true or false")
    if isinstance(top, bool) and isinstance(nested, bool) and top != nested:
        yield Problem(
            subject.place("is_causal"),
            f"{top} but dflash_config.causal is {nested}".lower(),
            effect="engines take is_causal, the training may have used the other",
            fix="state the value the draft was trained with in both",
        )
    flag = subject.config.get(FLAG)
    if subject.is_speculators and isinstance(top, bool):
        stated = {flag is False and kind == SLIDING for kind in subject.layer_types}
        if stated != {top}:
            yield Problem(
                subject.body_place("is_causal"),
                f"{top}, which {FLAG} {flag} contradicts".lower(),
                effect="vLLM takes is_causal, speculators the flag",
            )


@check("C19", "warning")
def causality_of_windows_is_stated(subject: Subject) -> Iterator[Problem]:
    """A draft with sliding layers says whether they are causal."""
    if SLIDING not in subject.layer_types:
        return
    if subject.is_speculators:
        if FLAG not in subject.config:
            yield Problem(subject.place(FLAG), "missing beside sliding layers", effect="readers take non-causal")
    elif subject.body.get("is_causal") is None and subject.nested.get("causal") is None:
        yield Problem(
            subject.place("is_causal"),
            "missing beside sliding layers",
            effect="readers serve sliding layers causally; SpecForge and Automodel train them non-causally",
            fix="state is_causal as the draft was trained; leave it out only for sliding causal and full not",
        )


@check("C20")
def full_layers_stay_non_causal(subject: Subject) -> Iterator[Problem]:
    """vLLM does not take the sliding flag for full layers (vllm#56692, open in 0.33.0)."""
    if not subject.is_speculators or SLIDING in subject.layer_types or subject.config.get(FLAG) is not False:
        return
    if subject.body.get("is_causal") is False:
        return
    yield Problem(
        subject.place(FLAG),
        f"false, and all {len(subject.layer_types)} layers are full attention",
        effect="vLLM 0.33 makes every layer causal; this draft was trained non-causal",
        fix=f"set {FLAG} to true, which changes nothing in speculators itself",
        severity=_vllm_severity(subject),
    )


@check("C21")
def layers_agree_for_vllm(subject: Subject) -> Iterator[Problem]:
    """One causality for all layers, which is all that vLLM 0.33.0 takes from this dialect."""
    if not subject.is_speculators or subject.config.get(FLAG) is not False:
        return
    if set(subject.layer_types) == set(KINDS):
        yield Problem(
            subject.place(FLAG),
            "false with both sliding and full layers: sliding ones are causal, full ones are not",
            effect="vLLM 0.33 makes the full layers causal too",
            fix="serve the native form: dflash convert SRC DST --to native",
            severity=_vllm_severity(subject),
        )


@check("C22")
def rope_theta_is_stated(subject: Subject) -> Iterator[Problem]:
    """The rope base is stated; defaults are 10,000 or 1,000,000, depending on the reader."""
    thetas = _rope_values(subject, "rope_theta")
    if not thetas:
        yield Problem(
            subject.body_place("rope_theta"), "missing", effect="vLLM takes 1000000, SGLang and transformers 10000"
        )
    for place, value in thetas.items():
        if not is_number(value) or value <= 0:
            yield Problem(place, f"found {value!r}, expected a positive number")


@check("C23")
def rope_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """Both spellings of rope say the same."""
    thetas = _rope_values(subject, "rope_theta")
    kinds = {**_rope_values(subject, "rope_type"), **_rope_values(subject, "type")}
    for name, values in (("rope_theta", thetas), ("rope_type", kinds)):
        if any(value != next(iter(values.values())) for value in values.values()):
            stated = ", ".join(f"{place.split(':')[1]} {value}" for place, value in values.items())
            yield Problem(subject.body_place(name), f"stated twice with different values: {stated}")


@check("C24")
def yarn_is_complete(subject: Subject) -> Iterator[Problem]:
    """YaRN has its factor and its original length (Avarok/atlas#78)."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = as_object(subject.body.get(key))
        if rope.get("rope_type", rope.get("type")) != "yarn":
            continue
        for field in ("factor", "original_max_position_embeddings"):
            if not is_number(rope.get(field)):
                yield Problem(subject.body_place(f"{key}.{field}"), "missing for rope type yarn")


@check("C26", "warning")
def rope_is_whole(subject: Subject) -> Iterator[Problem]:
    """No partial or multimodal rope keys, which only some readers apply."""
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        for place, value in _rope_values(subject, key).items():
            if value not in (1, 1.0):
                yield Problem(
                    place,
                    f"{value!r}",
                    effect="SGLang applies it, the reference does not",
                    fix="remove it unless the draft was trained with it",
                )


@check("C27")
def activation_is_silu(subject: Subject) -> Iterator[Problem]:
    """hidden_act is silu, the only one vLLM's DFlash has."""
    value = subject.body.get("hidden_act", "silu")
    if value != "silu":
        yield Problem(subject.body_place("hidden_act"), f"found {value!r}, expected 'silu'")


@check("C38")
def heads_divide(subject: Subject) -> Iterator[Problem]:
    """Attention heads are a multiple of the key-value heads."""
    heads, groups = subject.body.get("num_attention_heads"), subject.body.get("num_key_value_heads")
    if is_int(heads) and is_int(groups) and (groups < 1 or heads % groups):
        yield Problem(subject.body_place("num_attention_heads"), f"{heads} is no multiple of {groups} key-value heads")


@check("C39", "warning")
def gpt_oss_states_its_layers(subject: Subject) -> Iterator[Problem]:
    """A gpt_oss draft states layer_types, since its config class would alternate them."""
    if subject.body.get("model_type") == "gpt_oss" and subject.body.get("layer_types") is None:
        yield Problem(
            subject.body_place("layer_types"),
            "missing in a gpt_oss config",
            effect="readers through transformers alternate sliding and full layers, others take all as full",
        )


def _vllm_severity(subject: Subject) -> Severity:
    """Error for a vLLM that is named and has the change (#47745, seen in 0.33.0), warning otherwise."""
    engine = subject.engine("vllm")
    return "error" if engine is not None and engine.release >= (0, 33, 0) else "warning"


def _rope_values(subject: Subject, key: str) -> dict[str, Any]:
    """Every place that states a rope key: the body itself and its two rope objects."""
    found = {}
    if subject.body.get(key) is not None and key != "type":
        found[subject.body_place(key)] = subject.body[key]
    for container in ("rope_parameters", "rope_scaling"):
        rope = as_object(subject.body.get(container))
        if rope.get(key) is not None:
            found[subject.body_place(f"{container}.{key}")] = rope[key]
    return found
