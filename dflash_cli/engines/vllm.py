"""Rules on serving with vLLM; silent unless it is named."""

from collections.abc import Iterator

from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.native_fields import SCALES
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.validation.rule import CONFIG_FILE, TO_NATIVE, Problem, Subject, as_object, check
from dflash_cli.validation.rules.drafting import NEUTRAL
from dflash_cli.validation.rules.tensors import WEIGHTS
from dflash_cli.validation.verdict import served_causality, trained_causality

VLLM = ("vllm",)
LAUNCH = "dflash launch DRAFT --target TARGET --engine vllm"


@check(
    "S01",
    "info",
    effect="vLLM tells the method by the name; without it, method must be given",
    fix=LAUNCH,
    source="vLLM 0.33.0 config/speculative.py",
    engines=VLLM,
)
def name_says_dflash(subject: Subject) -> Iterator[Problem]:
    """The draft's name has dflash in it, and not eagle- or eagle3, which vLLM looks for first."""
    name = (subject.reference or str(subject.path)).lower()
    if subject.engine("vllm") is None or subject.is_speculators:
        return
    if "dflash" not in name:
        yield Problem(CONFIG_FILE, "the draft's name does not say dflash")
    elif "eagle-" in name or "eagle3" in name:
        yield Problem(CONFIG_FILE, "the draft's name says eagle, which vLLM takes for the method")


@check(
    "S02",
    effect="masks past the trained block are positions the draft has never seen; vLLM does not check",
    fix=LAUNCH,
    source="vllm-project/vllm#41834; vLLM 0.33.0 config/speculative.py",
    outcome="drops",
    engines=VLLM,
)
def k_is_the_trained_one(subject: Subject) -> Iterator[Problem]:
    """--num-speculative-tokens is block_size - 1 on vLLM.

    More is outside of the training; fewer shortens the block itself, and every row of a non-causal block depends on
    how many follow.
    """
    asked, block = subject.num_speculative_tokens, subject.block_size
    if subject.engine("vllm") is None or asked is None or block is None or asked == block - 1:
        return
    place = subject.place("block_size")
    if asked > block - 1:
        yield Problem(place, f"{block}, which drafts {block - 1}; {asked} are asked for")
    else:
        effect = "vLLM shortens the block to it, which the draft was not trained for"
        yield Problem(
            place, f"{block}, which drafts {block - 1}; {asked} are asked for", effect, severity="warning",
            outcome="serves",
        )  # fmt: skip


@check(
    "S03",
    "warning",
    effect="only the V2 model runner serves sliding and full layers together",
    fix=LAUNCH,
    source="vLLM 0.33.0 qwen3_dflash.py",
    engines=VLLM,
)
def layers_are_of_one_kind(subject: Subject) -> Iterator[Problem]:
    """All layers are sliding or all are full."""
    if subject.engine("vllm") is not None and set(subject.layer_types) >= set(LAYER_KINDS):
        yield Problem(subject.body_place("layer_types"), "both sliding and full layers")


@check(
    "S04",
    effect="vLLM stops with an assertion",
    fix="take the tensor out where the draft was trained, then dflash validate OUT --engine vllm",
    source="vLLM 0.33.0 qwen3_dflash.py load_weights",
    engines=VLLM,
)
def no_mask_hidden(subject: Subject) -> Iterator[Problem]:
    """No tensor's name contains mask_hidden."""
    for name in subject.tensors or () if subject.engine("vllm") is not None else ():
        if "mask_hidden" in name:
            yield Problem(f"{WEIGHTS}:{name}", "a name that vLLM asserts against")


@check(
    "S05",
    effect="vLLM ignores it for DFlash; only its DFlash 2 model reads it",
    fix="serve it with SGLang: dflash launch DRAFT --target TARGET --engine sglang",
    source="vLLM 0.33.0 qwen3_dflash2.py",
    outcome="drops",
    engines=VLLM,
)
def vllm_applies_no_scale(subject: Subject) -> Iterator[Problem]:
    """No scale is stated, since vLLM's DFlash has none.

    An embedding scale that is left out ruins the drafts; a multiplier or a soft cap only changes sampled ones.
    """
    for key in SCALES if subject.engine("vllm") is not None else ():
        value = subject.stated(key)
        if value is not None and value not in NEUTRAL[key]:
            yield Problem(next(iter(subject.homes(key))), f"{value}")


@check(
    "S07",
    effect="masked positions see, or do not see, those after them, other than in training",
    fix=TO_NATIVE,
    source="vLLM 0.33.0 qwen3_dflash.py, algos.py; vllm-project/vllm#47453 before #47745",
    outcome="drops",
    engines=VLLM,
)
def vllm_serves_the_trained_causality(subject: Subject) -> Iterator[Problem]:
    """vLLM serves every layer with the causality the config states for its dialect.

    C20 and C21 report the flag that vLLM 0.33 widens to full layers; this rule reports every other difference, such as
    vLLM 0.24, which serves causal sliding layers of the speculators dialect non-causally.
    """
    engine = subject.engine("vllm")
    served = served_causality(subject, engine) if engine is not None else None
    trained = trained_causality(subject)
    if engine is None or served is None or trained is None or served == trained:
        return
    is_told = subject.is_speculators and subject.config.get(NON_CAUSAL_FLAG) is False and all(served)
    if not is_told or subject.body.get("is_causal") is not None:
        yield Problem(
            subject.body_place("is_causal") if not subject.is_speculators else subject.place(NON_CAUSAL_FLAG),
            f"{engine} serves {sum(served)} of {len(served)} layers causally, the draft has {sum(trained)}",
        )


@check(
    "S22",
    "warning",
    effect="backends that read a quantised KV cache may have no non-causal attention",
    fix="dflash launch DRAFT --target TARGET --engine vllm adds --kv-cache-dtype bfloat16",
    source="vllm-project/vllm#41559, #53979",
    engines=VLLM,
)
def kv_cache_is_plain(subject: Subject) -> Iterator[Problem]:
    """The target does not ask for a quantised KV cache while the draft is non-causal."""
    packing = as_object(subject.target_json.get("quantization_config"))
    wanted = packing.get("kv_cache_scheme") or packing.get("kv_cache_quant_algo")
    trained = trained_causality(subject)
    if subject.engine("vllm") is not None and wanted and trained is not None and not all(trained):
        yield Problem(f"target {CONFIG_FILE}:quantization_config", "asks for a quantised KV cache")


@check(
    "S28",
    effect="vLLM 0.24 attends to the whole context on every layer",
    fix="serve it with vLLM 0.33 or later: dflash validate DRAFT --engine vllm@0.33",
    source="vLLM 0.24.0 model_executor/models/qwen3_dflash.py; vllm-project/vllm#46104",
    outcome="drops",
    engines=VLLM,
)
def vllm_knows_windows(subject: Subject) -> Iterator[Problem]:
    """The release of vLLM serves sliding layers."""
    engine = subject.engine("vllm")
    has_windows = "sliding_attention" in subject.layer_types or bool(subject.nested.get("use_swa"))
    if engine is not None and engine.release[:2] == (0, 24) and has_windows:
        yield Problem(subject.body_place("layer_types"), f"sliding layers, which {engine} serves as full ones")
