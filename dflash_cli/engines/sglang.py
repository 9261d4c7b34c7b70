"""Rules on serving with SGLang; silent unless it is named."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native
from dflash_cli.validation.rule import CONFIG_FILE, FIX_OUT, TO_NATIVE, Problem, Subject, check
from dflash_cli.validation.rules.vocabulary import sizes
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion

SGLANG = ("sglang",)
LAUNCH = "dflash launch DRAFT --target TARGET --engine sglang"
CODE = "SGLang 0.5.23 models/dflash.py"

SERVED = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "gemma4", "gemma4_text", "glm4_moe_lite", "glm5_next", "gpt_oss", "inkling",
        "kimi_k25", "kimi_k3", "laguna", "lfm2", "lfm2_moe", "lfm2_vl", "llama", "mimo_v2", "minicpmv", "minimax_m3_vl",
        "muse_glimmer", "muse_spark", "nanbeige", "nemotron_h", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_moe",
        "qwen3_next", "qwen3_vl",
    }
)  # fmt: skip
"""Values of the target's model_type whose SGLang model can hand out layers to DFlash."""

NO_LAST_LAYER = frozenset({"qwen2", "qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_5_text"})
"""Those that never capture the last layer's output."""


@check("S08", "warning", effect="SGLang drafts another block than was trained", fix=LAUNCH, source=CODE, engines=SGLANG)
def block_is_the_trained_one(subject: Subject) -> Iterator[Problem]:
    """--speculative-num-draft-tokens is block_size on SGLang, which counts the anchor."""
    asked, block = subject.num_speculative_tokens, subject.block_size
    if subject.engine("sglang") is not None and None not in (asked, block) and asked != block - 1:  # type: ignore[operator]
        yield Problem(subject.place("block_size"), f"{block}; {asked} drafts make a block of {(asked or 0) + 1}")


@check(
    "S09",
    effect="SGLang finds no num_hidden_layers at the top level and stops",
    fix=TO_NATIVE,
    source="SGLang 0.5.23 speculative/dflash_utils.py",
    engines=SGLANG,
)
def sglang_reads_the_dialect(subject: Subject) -> Iterator[Problem]:
    """The draft is in the native dialect, the only one SGLang reads."""
    if subject.is_speculators and subject.engine("sglang") is not None:
        yield Problem(subject.place("speculators_config"), "speculators dialect")


@check(
    "S10",
    effect="SGLang ignores the draft's head and map and proposes over the whole vocabulary",
    fix="serve it with vLLM: dflash launch DRAFT --target TARGET --engine vllm",
    source=CODE,
    outcome="drops",
    engines=SGLANG,
)
def sglang_has_no_reduced_head(subject: Subject) -> Iterator[Problem]:
    """The draft proposes over the target's whole vocabulary."""
    found = sizes(subject)
    if found is not None and found[0] < found[1] and subject.engine("sglang") is not None:
        yield Problem(subject.place("draft_vocab_size"), f"{found[0]} of {found[1]}")


@check(
    "S11",
    effect="SGLang does not read it: full attention, and causality by the layers' kind",
    fix=FIX_OUT,
    source=CODE,
    outcome="drops",
    engines=SGLANG,
)
def sglang_reads_top_level_keys(subject: Subject) -> Iterator[Problem]:
    """Windows and causality are stated where SGLang looks: layer_types and the top-level is_causal."""
    if subject.engine("sglang") is None:
        return
    if subject.nested.get("use_swa"):
        yield Problem(subject.place("dflash_config.use_swa"), "true")
    nested = subject.nested.get("causal")
    by_kind = {kind == "sliding_attention" for kind in subject.layer_types}
    if isinstance(nested, bool) and subject.config.get("is_causal") is None and by_kind != {nested}:
        yield Problem(
            subject.place("dflash_config.causal"), f"{nested}, and no is_causal".lower(), repair={"is_causal": nested}
        )


@check(
    "S12",
    effect="the last layer is never captured, so that fc gets fewer features than it reads",
    fix="serve it with vLLM: dflash launch DRAFT --target TARGET --engine vllm",
    source="SGLang 0.5.23 models/qwen3.py, llama.py; sgl-project/sglang#32204",
    engines=SGLANG,
)
def sglang_captures_every_tap(subject: Subject) -> Iterator[Problem]:
    """The last layer is not tapped where SGLang's model for the target cannot hand it out."""
    depth = subject.num_target_layers
    kind = subject.target.model_type if subject.target is not None else None
    is_last = depth is not None and depth - 1 in (subject.taps or ())
    if subject.engine("sglang") is not None and is_last and kind in NO_LAST_LAYER:
        yield Problem(subject.tap_place, f"taps the last of {depth} layers of a {kind} target")


@check(
    "S21",
    effect="SGLang ignores it: the draft embeds its block at another scale",
    fix="dflash generate --draft DRAFT --target TARGET applies it; SGLang 0.5.23 cannot",
    source=CODE,
    outcome="drops",
    engines=SGLANG,
)
def sglang_scales_no_embedding(subject: Subject) -> Iterator[Problem]:
    """The embedding is not scaled; SGLang applies the other two scales only."""
    value = subject.stated("input_embedding_scale")
    if subject.engine("sglang") is not None and value not in (None, 1):
        yield Problem(next(iter(subject.homes("input_embedding_scale"))), f"{value}")


@check(
    "S23",
    "warning",
    effect="SGLang packs the draft like its target unless it is told not to",
    fix="dflash launch DRAFT --target TARGET --engine sglang adds --speculative-draft-model-quantization unquant",
    source="sgl-project/sglang#28196, #34622, #35629",
    engines=SGLANG,
)
def target_packing_is_not_inherited(subject: Subject) -> Iterator[Problem]:
    """A packed target does not pass its packing on to a plain draft."""
    if subject.engine("sglang") is not None and subject.target_json.get("quantization_config"):
        yield Problem(f"target {CONFIG_FILE}:quantization_config", "the target is packed, the draft is not")


@check(
    "P07",
    effect="SGLang cannot tap this target's layers and stops",
    fix="serve it with vLLM: dflash launch DRAFT --target TARGET --engine vllm",
    source="SGLang 0.5.23 set_dflash_layers_to_capture",
    engines=SGLANG,
)
def target_can_be_tapped(subject: Subject) -> Iterator[Problem]:
    """SGLang's model of the target can hand out its layers."""
    kind = subject.target.model_type if subject.target is not None else None
    if subject.engine("sglang") is None or kind is None or kind in SERVED:
        return
    yield Problem(
        f"target {CONFIG_FILE}:model_type",
        f"{kind!r} is not among the models that do",
        severity="error" if kind == "qwen2" else "warning",
        outcome="stops" if kind == "qwen2" else "serves",
    )


# The dialect that is written for SGLang


@FORMATS.register("sglang")
class Sglang(Native):
    """The native dialect as SGLang reads it as trained.

    Written only; the file is a native one. SGLang takes causality from the top level alone, has no reduced head, takes
    the draft's width for the target's, and knows two of the three scales.
    Source: SGLang 0.5.23 speculative/dflash_utils.py::parse_dflash_draft_config, models/dflash.py.
    """

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "DFlash, native dialect for SGLang 0.5.23"
    priority: ClassVar[int] = 201
    sorts_taps: ClassVar[bool] = True
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", "input_embedding_scale"})

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return None

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        if config.input_embedding_scale != 1.0:
            raise LossyConversion("input_embedding_scale: SGLang 0.5.23 has no key for it")
