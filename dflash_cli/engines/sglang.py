"""SGLang: its releases, its causality, its serve command, its rules, and the dialect that is written for it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.packed_weights import states_packing
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
from dflash_cli.engines.sglang_reading import NO_LAST_LAYER, read_native
from dflash_cli.engines.sglang_splitting import sglang_misfits
from dflash_cli.engines.split_model import SplitModel
from dflash_cli.engines.splitting import Misfit
from dflash_cli.formats.dialect import FORMATS, Format, named_architectures, refuse_scales
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.engine_native import EngineNative
from dflash_cli.formats.fields import LOGIT_SCALE, SCALES
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import BFLOAT16, Outcome, Problem, check
from dflash_cli.rules.shapes import reduced_vocabulary, stated_scales
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.json_values import as_object

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
PLAIN_DRAFT = "plain-draft"
"""A serve flag: the target is packed, and the draft must stay plain."""

BLOCK_METHODS = ("dflash", "dspark")
"""Ways of drafting with an option of the command for the number of draft tokens."""

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
    splits_models: ClassVar[bool] = True
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
        """Variants of DSpark need a Markov head. A single text in `architectures` stops the loader."""
        if isinstance(dialect, Kind):
            return super().serves_kind(dialect, config)
        nested = as_object(config.get("dflash_config"))
        has_head = nested.get("markov_rank", config.get("markov_rank")) != 0 or not dialect.difference
        if not isinstance(config.get("architectures"), list) or "speculators_model_type" in config:
            return False
        return has_head and super().serves_kind(dialect, config)

    def read_values(self, subject: Subject) -> EngineReading | None:
        """The values of SGLang's parser and model."""
        return read_native(subject)

    def loads_without_parts(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """Its DFlash model has the convolutions of DFlash 2, and loads a file under DFlash's name without selector."""
        return dialect.family == "dflash2" and named_architectures(config)[:1] == [Native.architecture]

    def served_layout(self, subject: Subject) -> bool | None:
        """The layout of DSpark, which it reads at the top level only."""
        return bool(subject.config.get("sample_from_anchor", True)) if subject.format.samples_from_anchor else None

    def split_misfits(self, model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
        """Without DP attention."""
        return sglang_misfits(model, num_gpus)

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """The command of the server. --speculative-num-draft-tokens counts the anchor beside the draft tokens.

        For DSpark SGLang takes the number of tokens to draft from the config's block size, unless an option states it,
        and stops if the two options differ. A fill-in block of N rows drafts N - 1 tokens.
        Source: 0.5.23 arg_groups/speculative_hook.py:806.
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
            "--speculative-dspark-block-size": pair.method == "dspark" and pair.num_draft_tokens,
            "--tp-size": pair.tensor_parallel > 1 and pair.tensor_parallel,
            "--context-length": pair.context_limit,
            "--dtype": BFLOAT16 in pair.flags and "bfloat16",
            "--speculative-draft-model-quantization": PLAIN_DRAFT in pair.flags and "unquant",
        }
        words = ["python3", "-m", "sglang.launch_server", *words_of(options)]
        return ServeCommand((shlex.join(words),), pair.num_draft_tokens)


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
    if subject.target is not None and subject.target.quantization is not None and not states_packing(subject):
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
    packs_fc: ClassVar[bool] = False
    style_flags: ClassVar[frozenset[str]] = frozenset({"use_gemma_norm", "is_neox_style", "rope_is_neox_style"})
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size", *IGNORED_SCALES})

    def refuse_to_write(self, config: DraftConfig) -> None:
        super().refuse_to_write(config)
        refuse_scales(config, NEWEST, IGNORED_SCALES)
