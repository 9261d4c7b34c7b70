"""SGLang: its releases, its causality, its serve command, its rules, and the dialect that is written for it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import (
    EngineReading,
    causal_of,
    check_architecture,
    check_captured,
    check_mask,
    check_packing,
    check_rope,
    check_shapes,
    real,
    resolve_auto,
    whole,
    windows_of,
)
from dflash_cli.engines.serving_engine import (
    ENGINES,
    Habit,
    Release,
    ServeCommand,
    ServedPair,
    ServingEngine,
    release_text,
    repairable_causality,
    words_of,
)
from dflash_cli.engines.several_engines import FIX_VLLM, unknown_dialect
from dflash_cli.engines.sglang_dspark import check_markov, prefixed_keys
from dflash_cli.formats.dialect import FORMATS, Format, refuse_scales
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.engine_native import EngineNative
from dflash_cli.formats.fields import LOGIT_SCALE, SCALES, guess_taps
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import BFLOAT16, Outcome, Problem, check
from dflash_cli.rules.shapes import reduced_vocabulary, stated_scales
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_runtime.config import DraftConfig
from dflash_runtime.json_values import as_object, is_int, is_number

NAME = "sglang"
ENGINE = (NAME,)
check_sglang = partial(check, engines=ENGINE)
RELEASES: tuple[Release, ...] = ((0, 5, 23),)
NEWEST = f"SGLang {release_text(RELEASES[-1])}"
IGNORED_SCALES = ("input_embedding_scale", LOGIT_SCALE)
CODE = "SGLang 0.5.23 models/dflash.py"
FIX_TO_SGLANG = "dflash convert {draft} {out} --to sglang --target {target}"
FIX_SERVE = "dflash serve-command {draft} --target {target} --engine sglang"
ALGORITHMS = {"mtp": "NEXTN"}
"""Way of drafting -> its name in SGLang, unless it is the same in capitals."""
LEAST_DEPTH = 4
"""The fewest layers from which SGLang guesses the tapped ones."""
PLAIN_DRAFT = "plain-draft"
"""A serve flag: the target is packed, and the draft must stay plain."""

BLOCK_METHODS = ("dflash", "dspark")
"""Ways of drafting whose number of draft tokens is an option of the command."""

SERVED = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4", "gemma4_text", "gemma4_unified", "glm4_moe_lite",
        "glm5_next", "glm_moe_dsa", "gpt_oss", "inkling", "kimi_k25", "kimi_k3", "laguna", "lfm2", "lfm2_moe",
        "lfm2_vl", "llama", "mellum", "mimo_v2", "mimo_v2_flash", "minicpmv", "minimax_m3_vl", "ministral3", "mistral",
        "muse_glimmer", "muse_spark", "nanbeige", "nemotron_h", "phi3", "qwen3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen4_exp",
    }
)  # fmt: skip
"""Values of model_type for which SGLang's model, or its base class, can hand out layers to DFlash."""

NO_LAST_LAYER = frozenset(
    {
        "llama", "mellum", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    }
)  # fmt: skip
"""Values of model_type for which SGLang never captures the last layer's output."""


@ENGINES.register(NAME)
class SglangEngine(ServingEngine):
    """SGLang. It reads only the native dialect."""

    name: ClassVar[str] = NAME
    reads: ClassVar[tuple[type[Format], ...]] = (Native,)
    read_families: ClassVar[frozenset[str]] = frozenset({"dflash", "dflash2", "dspark"})
    has_dialect_rule: ClassVar[bool] = True
    releases: ClassVar[tuple[Release, ...]] = RELEASES
    dialect: ClassVar[str] = NAME
    strictness: ClassVar[int] = 2
    finds_by_architecture: ClassVar[bool] = True
    takes_other_widths: ClassVar[bool] = False
    models: ClassVar[Mapping[str, Release]] = dict.fromkeys(
        (
            "DFlash2DraftModel", "DSparkDraftModel", "DSparkMiniMaxDraftModel", "Lfm2DSparkDraftModel",
            "LingDSparkModel", "MiniMaxDFlash2DraftModel", "Qwen3DSparkModel",
        ),
        RELEASES[0],
    )  # fmt: skip
    """Source: EntryClass of 0.5.23 models/dflash.py, dspark.py, dspark_minimax.py and lfm2_dspark.py."""
    habits: ClassVar[Mapping[Habit, Outcome]] = {
        "other-prefix": "drops",
        "unsorted-taps": "drops",
        "repeated-taps": "stops",
        "use-swa": "drops",
        "mask-safetensors": "drops",
        "nested-style": "drops",
    }
    """Source: 0.5.23 models/dflash.py load_weights, models/qwen3.py layers_to_capture, dflash_worker_v2.py."""

    def serves_kind(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """Variants of DSpark need a Markov head."""
        if isinstance(dialect, Kind):
            return super().serves_kind(dialect, config)
        nested = as_object(config.get("dflash_config"))
        has_head = nested.get("markov_rank", config.get("markov_rank")) != 0 or not dialect.difference
        return "speculators_model_type" not in config and has_head and super().serves_kind(dialect, config)

    def read_values(self, subject: Subject) -> EngineReading | None:
        """The values of SGLang's parser and model. Source: 0.5.23 speculative/dflash_utils.py, models/dflash.py."""
        config = subject.config
        nested = as_object(config.get("dflash_config"))
        expected = subject.format.architecture  # S34 reports the models of other families
        if expected is not None and config.get("architectures") != expected:
            check_architecture(config, expected)
        found = resolve_auto(config)
        _check_type(config)
        check_packing(config)
        if found is None or _has_own_embedding(config):
            return None
        stated = {**config, **nested, **prefixed_keys(config)}
        depth = _optional("num_target_layers", stated)
        block = _optional("block_size", stated)
        mask, taps = _mask(stated), _taps(stated, depth, found, subject)
        sinks, scale = nested.get("attention_sink_bias", False), nested.get("attention_value_scale")
        if not isinstance(sinks, bool):
            raise EngineStops("dflash_config.attention_sink_bias", f"found {sinks!r}, expected true or false")
        if scale is not None and not is_number(scale):
            raise EngineStops("dflash_config.attention_value_scale", f"found {scale!r}, expected a number")
        multiplier = real("dflash_config.output_multiplier", nested.get("output_multiplier", 1.0))
        if multiplier <= 0:
            raise EngineStops("dflash_config.output_multiplier", f"found {multiplier}, expected a positive number")
        softcap = real("dflash_config.final_logit_softcapping", nested.get("final_logit_softcapping") or 0.0)
        _check_model(found, subject)
        if subject.format.family == "dspark":
            check_markov(config, nested, mask, found)
        check_shapes(found, len(taps), subject)
        return EngineReading(
            windows=tuple(window if (window or 0) > 0 else None for window in windows_of(found)),
            causal=causal_of(config.get("is_causal"), found),
            taps=tuple(sorted(taps)),
            mask_token_id=mask,
            rope=found["rope_parameters"],
            eps=found["rms_norm_eps"],
            block_size=block,
            neox=bool(config.get("rope_is_neox_style", config.get("is_neox_style", True))),
            gemma_norms=bool(config.get("use_gemma_norm", False)),
            sinks=sinks,
            value_scale=scale,
            output_multiplier=multiplier,
            final_logit_softcapping=softcap if softcap > 0 else None,
        )

    def served_layout(self, subject: Subject) -> bool | None:
        """The layout of DSpark, which it reads at the top level only."""
        return bool(subject.config.get("sample_from_anchor", True)) if subject.format.samples_from_anchor else None

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """The command of the server. --speculative-num-draft-tokens counts the anchor beside the draft tokens.

        A draft that proposes one token after another takes a number of steps instead, here of one token each.
        """
        draft, _, revision = pair.draft.partition("@")
        target, _, target_revision = pair.target.partition("@")
        counts_tokens = pair.method in BLOCK_METHODS or pair.is_chain
        options = {
            "--model-path": target,
            "--revision": target_revision,
            "--speculative-algorithm": ALGORITHMS.get(pair.method, pair.method.upper()),
            "--speculative-draft-model-path": draft,
            "--speculative-draft-model-revision": revision,
            "--speculative-num-steps": pair.is_chain and pair.num_draft_tokens,
            "--speculative-eagle-topk": pair.is_chain and 1,
            "--speculative-num-draft-tokens": counts_tokens and pair.num_draft_tokens + 1,
            "--context-length": pair.context_limit,
            "--dtype": BFLOAT16 in pair.flags and "bfloat16",
            "--speculative-draft-model-quantization": PLAIN_DRAFT in pair.flags and "unquant",
        }
        words = ["python3", "-m", "sglang.launch_server", *words_of(options)]
        return ServeCommand((shlex.join(words),), pair.num_draft_tokens)


def _optional(key: str, stated: Mapping[str, Any]) -> int | None:
    """A count that may be absent or null."""
    return None if stated.get(key) is None else whole(key, stated[key], least=1)


def _mask(stated: Mapping[str, Any]) -> int | None:
    """The mask token's id; None if the tokenizer has to tell it."""
    mask, token = stated.get("mask_token_id"), stated.get("mask_token")
    if token is not None and not (isinstance(token, str) and token):
        raise EngineStops("mask_token", f"found {token!r}, expected a text")
    if mask is not None and not (is_int(mask) and mask >= 0):
        raise EngineStops("mask_token_id", f"found {mask!r}, expected an id of 0 or more")
    return mask


def _taps(stated: Mapping[str, Any], depth: int | None, found: Mapping[str, Any], subject: Subject) -> list[int]:
    """The tapped layers, which SGLang captures before the next layer and so never after the target's last."""
    given, runtime = stated.get("target_layer_ids"), subject.num_target_layers
    if given is None:
        count = depth or found["num_hidden_layers"]
        taps = guess_taps(runtime or count, found["num_hidden_layers"])
        if min(count, runtime or count) < LEAST_DEPTH and found["num_hidden_layers"] > 1:
            raise EngineStops("num_target_layers", f"too few to guess the tapped layers from: {count}")
    elif not isinstance(given, list) or not given:
        raise EngineStops("target_layer_ids", f"found {given!r}, expected a list of integers")
    else:
        taps = [whole("target_layer_ids", item) for item in given]
        limit = depth or max(taps) + 1
        if any(not 0 <= tap < limit for tap in taps):
            raise EngineStops("target_layer_ids", f"lists layers outside 0..{limit - 1}")
    check_captured(taps, found["hidden_size"], subject)
    is_lost = subject.target is not None and subject.target.model_type in NO_LAST_LAYER and runtime == max(taps) + 1
    if len(set(taps)) < len(taps) or is_lost:
        raise EngineStops("target_layer_ids", f"{taps}: SGLang captures fewer layers than the draft reads")
    return taps


def _check_model(found: Mapping[str, Any], subject: Subject) -> None:
    """Require what SGLang builds the draft's modules from."""
    check_rope(found["rope_parameters"], "factor")
    real("partial_rotary_factor", found.get("partial_rotary_factor", 1.0))
    check_mask(subject.stated.value("mask_token_id"), subject)
    if found["max_position_embeddings"] < 0:
        raise EngineStops("max_position_embeddings", "negative")
    is_clamped = found["hidden_act"] == "swigluoai" and {"swiglu_alpha", "swiglu_limit"} <= found.keys()
    if found["hidden_act"] != "silu" and not is_clamped:
        raise EngineStops("hidden_act", f"found {found['hidden_act']!r}, expected silu")


def _check_type(config: Mapping[str, Any]) -> None:
    """Require a model type whose config class the DFlash model reads. Source: 0.5.23, run on drafts of each type."""
    if config["model_type"] == "qwen3_5_text":
        raise EngineStops("model_type", "found qwen3_5_text, whose config class gives a rope without a type")
    if config["model_type"] == "minimax" and config.get("layer_types") is None:
        raise EngineStops("layer_types", "missing, and for minimax every second layer is then linear attention")


def _has_own_embedding(config: Mapping[str, Any]) -> bool:
    """Whether the file may be a Nemotron 3.5 draft, which SGLang reads in its own way."""
    return bool(config.get("has_embed_tokens")) and bool(config.get("quantization_config"))


@check_sglang(
    "S08",
    "warning",
    effect="SGLang drafts a block of another length than in training",
    fix=f"{FIX_SERVE} # asks for block_size",
    source=CODE,
)
def block_is_the_trained_one(subject: Subject) -> Iterator[Problem]:
    """The number of draft tokens is the one of training on SGLang. --speculative-num-draft-tokens is one more."""
    asked, block, trained = subject.plan.num_speculative_tokens, subject.stated.block_size, subject.num_trained_drafts
    if asked is not None and block is not None and trained is not None and asked != trained:
        rows = block + asked - trained
        yield Problem(subject.expected_at("block_size"), f"{block}, but {asked} drafted tokens make a block of {rows}")


@check_sglang(
    "S09",
    effect="SGLang finds no num_hidden_layers at the top level and stops",
    fix=FIX_TO_SGLANG,
    source="SGLang 0.5.23 speculative/dflash_utils.py",
)
def sglang_reads_the_dialect(subject: Subject) -> Iterator[Problem]:
    """The draft is in the native dialect, the only dialect that SGLang reads."""
    is_reduced = any(reduced_vocabulary(subject))
    for problem in unknown_dialect(subject, SglangEngine):
        yield replace(problem, fix=f"{FIX_TO_SGLANG} --allow-lossy # proposes other tokens") if is_reduced else problem


@check_sglang(
    "S10",
    effect="SGLang ignores the draft's head and id map and proposes over the whole vocabulary",
    fix=FIX_VLLM,
    source=CODE,
    outcome="drops",
)
def sglang_has_no_reduced_head(subject: Subject) -> Iterator[Problem]:
    """A draft for SGLang proposes over the target's whole vocabulary."""
    for problem in reduced_vocabulary(subject):
        effect = "SGLang stops at the Markov head, which has a row per token of the reduced vocabulary"
        has_head = subject.stated.value("markov_rank") not in (None, 0)
        yield replace(problem, effect=effect, outcome="stops") if has_head else problem


@check_sglang(
    "S11",
    effect="SGLang does not read the key, and takes causality from each layer's kind",
    fix="dflash validate {draft} --engine sglang --fix-out {out}",
    source=CODE,
    outcome="drops",
)
def sglang_reads_top_level_keys(subject: Subject) -> Iterator[Problem]:
    """Causality is stated in the top-level is_causal, where SGLang reads it."""
    yield from repairable_causality(NAME, subject)


@check_sglang(
    "S12",
    effect="SGLang never captures the last layer, so fc.weight gets fewer features than it reads",
    fix=FIX_VLLM,
    source="SGLang 0.5.23 models/qwen3.py, llama.py; sgl-project/sglang#32204",
)
def sglang_captures_every_tap(subject: Subject) -> Iterator[Problem]:
    """The target's last layer is not tapped if SGLang cannot hand out its output."""
    depth = subject.num_target_layers
    kind = subject.target.model_type if subject.target is not None else None
    is_last = depth is not None and depth - 1 in (subject.stated.taps or ())
    if is_last and kind in NO_LAST_LAYER:
        yield Problem(subject.at("target_layer_ids"), f"lists the last of {depth} layers of a {kind} target")


@check_sglang(
    "S21",
    effect="SGLang ignores the scale, so the block's embeddings or the logits have another scale than in training",
    fix=f"dflash eval-acceptance {{draft}} --target {{target}} # applies it; {NEWEST} cannot",
    source=CODE,
    outcome="drops",
)
def sglang_scales_no_embedding(subject: Subject) -> Iterator[Problem]:
    """input_embedding_scale and logit_scale are 1 or absent, because SGLang does not apply them.

    SGLang applies the other two scales, output_multiplier and final_logit_softcapping, except to DSpark drafts.
    """
    yield from stated_scales(subject, SCALES if subject.format.samples_from_anchor else IGNORED_SCALES)


@check_sglang(
    "S23",
    "warning",
    effect="SGLang quantises the draft like its target, unless an option turns that off",
    fix=f"{FIX_SERVE} # adds --speculative-draft-model-quantization unquant",
    source="sgl-project/sglang#28196, #34622, #35629",
    serve_flag=PLAIN_DRAFT,
)
def target_packing_is_not_inherited(subject: Subject) -> Iterator[Problem]:
    """A draft with plain weights is not quantised like its target."""
    if subject.target is not None and subject.target.quantization is not None:
        yield Problem(f"target {CONFIG_FILE}:quantization_config", "the target is packed, the draft is not")


@check_sglang(
    "P07",
    effect="SGLang cannot capture this target's layers and stops",
    fix=FIX_VLLM,
    source="SGLang 0.5.23 set_dflash_layers_to_capture",
)
def target_can_be_tapped(subject: Subject) -> Iterator[Problem]:
    """SGLang's model of the target can hand out its layers to a draft."""
    if subject.target is None:
        return
    kind = subject.target.model_type
    if SERVED & {kind, kind.removesuffix("_text"), subject.target_json.get("model_type")}:
        return
    yield Problem(
        f"target {CONFIG_FILE}:model_type",
        f"{kind!r} is not among the models that can hand out layers",
        severity="error" if kind == "qwen2" else "warning",
        outcome="stops" if kind == "qwen2" else "serves",
    )


# The dialect that is written for SGLang


@FORMATS.register(NAME)
class Sglang(EngineNative):
    """The native dialect, written so that SGLang serves the draft as trained.

    Detection finds the file as native. SGLang reads causality only at the top level, uses the target's head, assumes
    the target's width, and applies output_multiplier and final_logit_softcapping
    of the scales.
    Source: SGLang 0.5.23 speculative/dflash_utils.py::parse_dflash_draft_config, models/dflash.py.
    """

    name: ClassVar[str] = NAME
    title: ClassVar[str] = f"DFlash, native dialect for {NEWEST}"
    priority: ClassVar[int] = 201
    engine: ClassVar[str] = NAME
    style_flags: ClassVar[frozenset[str]] = frozenset({"use_gemma_norm", "is_neox_style", "rope_is_neox_style"})
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", *IGNORED_SCALES})

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        refuse_scales(config, NEWEST, IGNORED_SCALES)
