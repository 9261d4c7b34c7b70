"""vLLM: its releases, its causality, its serve command, its rules, and the dialect that is written for it.

Source: the code of each release from 0.24.0 to 0.33.0, in model_executor/models/qwen3_dflash.py,
transformers_utils/configs/speculators/algos.py, v1/spec_decode/dflash.py and v1/worker/gpu/spec_decode/dflash/.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.serving_engine import (
    ENGINES,
    Habit,
    Release,
    ServeCommand,
    ServedPair,
    ServingEngine,
    problem_of_causality,
    release_text,
    stated_once,
    words_of,
)
from dflash_cli.engines.split_model import SplitModel
from dflash_cli.engines.splitting import Misfit
from dflash_cli.engines.vllm_reading import (
    READS_IS_CAUSAL,
    READS_KINDS,
    READS_ROPE_STYLE,
    READS_WINDOWS,
    read_native,
)
from dflash_cli.engines.vllm_speculators_reading import read_speculators
from dflash_cli.engines.vllm_splitting import vllm_misfits
from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.dialect import FORMATS, Format, Json, named_architectures, refuse_scales
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.engine_native import EngineNative
from dflash_cli.formats.fields import LOGIT_SCALE, ZLAB_SCALES
from dflash_cli.formats.native import Native
from dflash_cli.formats.speculators import SpeculatorsFormat
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.formats.unserved import asks_for_latent_attention
from dflash_cli.rules.rule import BFLOAT16, FIX_COPY, Outcome, Problem, check
from dflash_cli.rules.shapes import stated_scales
from dflash_cli.rules.subject import CONFIG_FILE, WEIGHTS, NamedEngine, Subject
from dflash_runtime.checkpoint.layout import CONFIDENCE, DRAFT_TO_TARGET, SINKS
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.json_values import as_object
from dflash_runtime.notices import Notice

NAME = "vllm"
ENGINE = (NAME,)
check_vllm = partial(check, engines=ENGINE)
RELEASES: tuple[Release, ...] = tuple((0, minor) for minor in range(24, 34))
NEWEST = f"vLLM {release_text(RELEASES[-1])}"
READS_ANCHOR: Release = (0, 27)
"""The first release that reads sample_from_anchor of DSpark drafts. Before, speculators drafts are always fill-in, and
native drafts state dspark_bonus_anchor.
"""
READS_DSPARK_NAME: Release = (0, 29)
"""The first release that serves a DSparkDraftModel of model_type qwen3; the name also stands for a part of a target."""
READS_SCHEDULE: Release = (0, 28)
"""The first release that reads num_speculative_tokens_per_batch_size, a list of ranges (vllm-project/vllm#45953)."""
FIX_SERVE = "dflash serve-command {draft} --target {target} --engine vllm"
FIX_NEWER = f"no file helps this release; use {NEWEST} or later: {FIX_SERVE}"
FIX_TO_VLLM = "dflash convert {draft} {out} --to vllm --target {target}"
V2_RUNNER = "v2-runner"
"""A serve flag: only the V2 model runner serves the draft."""
PLAIN_KV_CACHE = "plain-kv-cache"
"""A serve flag: the target asks for a quantised KV cache, and the draft's attention may not support it."""


@ENGINES.register(NAME)
class VllmEngine(ServingEngine):
    """vLLM. It reads native and speculators drafts."""

    name: ClassVar[str] = NAME
    reads: ClassVar[tuple[type[Format], ...]] = (Native, SpeculatorsFormat)
    read_families: ClassVar[frozenset[str]] = frozenset({"dflash", "dflash2", "dspark"})
    releases: ClassVar[tuple[Release, ...]] = RELEASES
    dialect: ClassVar[str] = NAME
    serves_as_is: ClassVar[frozenset[str]] = frozenset({"speculators"})
    strictness: ClassVar[int] = 0
    finds_by_architecture: ClassVar[bool] = True
    splits_models: ClassVar[bool] = True
    habits: ClassVar[Mapping[Habit, Outcome]] = {
        "model-prefix": "stops",
        "extra-tensors": "stops",
        "other-prefix": "stops",
        "interleaved-rope-by-its-name": "drops",
        "gemma-norms": "drops",
        "unsorted-taps": "drops",
        "repeated-taps": "stops",
        "mask-safetensors": "stops",
        "nested-style": "drops",
    }
    """Source: 0.33.0 qwen3_dflash.py load_weights, interfaces.py, model_loader/default_loader.py."""

    models: ClassVar[Mapping[str, Release]] = {
        "Qwen3DSparkModel": (0, 25),
        "Gemma4DSparkModel": (0, 26),
        "K3DSparkModel": (0, 27),
        "DFlash2DraftModel": (0, 28),
        "Qwen3OmniDSparkModel": (0, 29),
        "MuseSparkDSparkModel": (0, 33),
    }
    """Source: model_executor/models/registry.py of each release. DSparkDraftModel names a part of a target there."""
    speculators_types: ClassVar[Mapping[str, Release]] = {"dspark": (0, 25), "dflash2": (0, 29)}
    """speculators_model_type -> the first release that reads it. Source: configs/speculators/algos.py of each."""

    learnt: ClassVar[Mapping[Habit, tuple[Release, Outcome]]] = {
        "encoder-names": (READS_IS_CAUSAL, "stops"),
        "interleaved-rope": (READS_ROPE_STYLE, "drops"),
        "mask-pickle": (READS_WINDOWS, "drops"),
    }
    """Habit -> the first release that serves it as meant, and the outcome in earlier releases."""

    def outcome_of(self, habit: Habit) -> Outcome:
        """The outcome if this release serves a draft with the habit. Earlier releases know fewer names and keys."""
        first, before = self.learnt.get(habit, ((), "serves"))
        return before if self.release < first else self.habits.get(habit, "serves")

    def ignores_extra_tensor(self, name: str) -> bool:
        """0.25 passes over attention sinks, and every release over a confidence head, if the config asks for none."""
        passes_over = READS_WINDOWS <= self.release < READS_KINDS and name.endswith(SINKS)
        return passes_over or name.startswith(CONFIDENCE) or super().ignores_extra_tensor(name)

    def serves_kind(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """A speculators config names its kind; vLLM replaces its architectures."""
        kind = config.get("speculators_model_type")
        if isinstance(dialect, Kind):
            return super().serves_kind(dialect, config)
        if kind is None and "DSparkDraftModel" in named_architectures(config):
            is_known = config.get("model_type") == "qwen3" and self.release >= READS_DSPARK_NAME
            return is_known and not asks_for_latent_attention(config)
        if not isinstance(kind, str):
            return super().serves_kind(dialect, config)
        first = self.speculators_types.get(kind)
        return first is not None and self.release >= first and not asks_for_latent_attention(config)

    def read_values(self, subject: Subject) -> EngineReading | None:
        """The values that this release reads."""
        read = read_speculators if isinstance(subject.format, SpeculatorsFormat) else read_native
        return read(subject, self.release)

    def causality(self, subject: Subject) -> tuple[bool, ...]:
        """Causality of the keys that this release reads, else by kind of layer."""
        stated = subject.stated.body.get("is_causal") if self.release >= READS_IS_CAUSAL else None
        if not isinstance(stated, bool):
            stated = self._flag(subject)
        return stated_once(stated, subject)

    def _flag(self, subject: Subject) -> object:
        """The value of dflash_config.causal after vLLM has read the config.

        `update_dflash` writes it, `update_dspark` does not: sliding layers of such a file are causal.
        """
        if subject.format.samples_from_anchor and isinstance(subject.format, SpeculatorsFormat):
            return None
        is_speculators = isinstance(subject.format, SpeculatorsFormat)
        nested = None if is_speculators else as_object(subject.config.get("dflash_config")).get("causal")
        if self.release < READS_KINDS:
            return nested is True
        return subject.config.get(NON_CAUSAL_FLAG) is False if is_speculators else nested

    def served_layout(self, subject: Subject) -> bool | None:
        """The layout of DSpark. A native key counts at the top level only."""
        if not subject.format.samples_from_anchor:
            return None
        if self.release < READS_ANCHOR:
            is_native = isinstance(subject.format, Native)
            return is_native and not subject.config.get("dspark_bonus_anchor", False)
        return bool(subject.config.get("sample_from_anchor", isinstance(subject.format, Native)))

    def split_misfits(self, model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
        """Releases differ only in FP8 blocks of experts."""
        return vllm_misfits(model, num_gpus, self.release)

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """`vllm serve`, in which num_speculative_tokens is block_size - 1 or the largest K of the schedule."""
        model, _, revision = pair.draft.partition("@")
        speculative: Json = {"method": pair.method, "model": model, "num_speculative_tokens": pair.num_draft_tokens}
        speculative |= pair.settings
        if revision:
            speculative["revision"] = revision
        if pair.schedule and self.release >= READS_SCHEDULE:
            # vLLM sizes its buffers by num_speculative_tokens, so it must be the largest K of the schedule.
            speculative["num_speculative_tokens"] = max(number for *_, number in pair.schedule)
            speculative["num_speculative_tokens_per_batch_size"] = [list(item) for item in pair.schedule]
        target, _, target_revision = pair.target.partition("@")
        options = {
            "--speculative-config": json.dumps(speculative),
            "--revision": target_revision,
            "--max-model-len": pair.context_limit,
            "--dtype": BFLOAT16 in pair.flags and "bfloat16",
            "--tensor-parallel-size": pair.tensor_parallel > 1 and pair.tensor_parallel,
            "--kv-cache-dtype": PLAIN_KV_CACHE in pair.flags and "bfloat16",
        }
        words = ["vllm", "serve", target, *words_of(options)]
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if V2_RUNNER in pair.flags else {}
        return ServeCommand((shlex.join(words),), pair.num_draft_tokens, env)


@check_vllm(
    "C27",
    effect="vLLM stops",
    fix="if the training used silu, write it and run dflash validate {draft}; else use an engine with this activation",
    source="vLLM 0.33.0 qwen3_dflash.py",
    unnamed="warning",
)
def activation_is_silu(subject: Subject) -> Iterator[Problem]:
    """hidden_act is silu, the only activation that vLLM's DFlash model has."""
    value = subject.stated.body.get("hidden_act", "silu")
    if value != "silu":
        yield Problem(subject.body_at("hidden_act"), f"found {value!r}, expected 'silu'")


@check_vllm(
    "M02",
    effect="vLLM does not know d2t and stops",
    fix=f"{FIX_COPY} # drops the map if it maps every id to itself",
    source="vLLM 0.33.0 models/utils.py",
    unnamed="warning",
)
def full_vocabulary_has_no_map(subject: Subject) -> Iterator[Problem]:
    """The id map (d2t) is absent if the draft has the whole output vocabulary."""
    found = subject.stated.vocabulary_sizes
    if found is None or subject.tensors is None or found[0] != found[1]:
        return
    if DRAFT_TO_TARGET in subject.tensors:
        yield Problem(
            f"{WEIGHTS}:{DRAFT_TO_TARGET}",
            f"present, although draft_vocab_size is the whole vocabulary of {found[1]}",
        )


@check_vllm(
    "S01",
    "info",
    effect="vLLM cannot infer the method from the name, so the command must state it",
    fix=f"{FIX_SERVE} # states the method",
    source="vLLM 0.33.0 config/speculative.py",
)
def name_says_dflash(subject: Subject) -> Iterator[Problem]:
    """The draft's name contains dflash, and neither eagle- nor eagle3.

    vLLM looks for eagle- and eagle3 first.
    """
    name = subject.served_name.lower()
    if not isinstance(subject.format, Native) or subject.format.serve_method != "dflash":
        return
    if "dflash" not in name:
        yield Problem(CONFIG_FILE, "the draft's name does not contain dflash")
    elif "eagle-" in name or "eagle3" in name:
        yield Problem(CONFIG_FILE, "the draft's name contains eagle, so vLLM infers that method")


@check_vllm(
    "S02",
    effect="the draft has never seen masks past the trained block; vLLM does not report it",
    fix=f"{FIX_SERVE} # asks for block_size - 1",
    source="vllm-project/vllm#41834; vLLM 0.33.0 config/speculative.py",
    outcome="drops",
)
def k_is_the_trained_one(subject: Subject) -> Iterator[Problem]:
    """--num-speculative-tokens is block_size - 1 on vLLM.

    A larger number drafts more tokens than in training. A smaller number shortens the block, and in a non-causal block
    every row depends on the number of rows after it.
    """
    asked, block, trained = subject.plan.num_speculative_tokens, subject.stated.block_size, subject.num_trained_drafts
    if asked is None or block is None or trained is None or asked == trained:
        return
    location, message = subject.expected_at("block_size"), f"{block}, which drafts {trained}, but {asked} are asked for"
    if asked > trained:
        yield Problem(location, message)
    else:
        effect = "vLLM shortens the block to match, which the draft was not trained for"
        yield Problem(location, message, effect, severity="warning", outcome="serves")


@check_vllm(
    "S03",
    "warning",
    effect="only vLLM's V2 model runner serves sliding and full layers together",
    fix=f"{FIX_SERVE} # selects that runner",
    source="vLLM 0.33.0 qwen3_dflash.py",
    serve_flag=V2_RUNNER,
)
def layers_are_of_one_kind(subject: Subject) -> Iterator[Problem]:
    """All layers are sliding, or all are full attention."""
    engine = subject.engine(NAME)
    if engine is not None and engine.release < READS_KINDS:  # neither runner of it serves them
        return
    if set(subject.stated.layer_types) >= set(LAYER_KINDS):
        yield Problem(subject.body_at("layer_types"), "found both sliding and full layers")


@check_vllm(
    "S04",
    effect="vLLM stops with an assertion",
    fix="export the draft without this tensor, then check it: dflash validate {draft} --engine vllm",
    source="vLLM 0.33.0 qwen3_dflash.py load_weights",
)
def no_mask_hidden(subject: Subject) -> Iterator[Problem]:
    """Tensor names do not contain mask_hidden."""
    for name in subject.tensors or ():
        if "mask_hidden" in name:
            yield Problem(f"{WEIGHTS}:{name}", "vLLM asserts that no tensor has such a name")


@check_vllm(
    "S05",
    effect="vLLM ignores the scale for DFlash; only its DFlash 2 model reads it",
    fix="dflash serve-command {draft} --target {target} --engine sglang # for other scales than input_embedding_scale",
    source="vLLM 0.33.0 qwen3_dflash2.py",
    outcome="drops",
)
def vllm_applies_no_scale(subject: Subject) -> Iterator[Problem]:
    """Scales are absent or change nothing, because vLLM's DFlash model ignores all of them but logit_scale.

    Its DFlash 2 model applies all of them but logit_scale.
    Without its embedding scale a draft proposes noise. Without a multiplier or a soft cap, only sampled drafts change.
    """
    yield from stated_scales(subject, (LOGIT_SCALE,) if subject.format.family == "dflash2" else ZLAB_SCALES)


@check_vllm(
    "S07",
    effect="vLLM serves some layers with another causality than the config states",
    fix=FIX_TO_VLLM,
    source="vLLM 0.24.0 to 0.33.0 qwen3_dflash.py, algos.py; vllm-project/vllm#47745",
    outcome="drops",
)
def vllm_serves_the_stated_causality(subject: Subject) -> Iterator[Problem]:
    """vLLM serves every layer with the causality that the config states.

    C20 and C21 report the flag that vLLM from 0.26 on also applies to full layers. S28 reports layers that 0.24 and
    0.25 do not serve. This rule reports every other difference. Releases before 0.28 read only dflash_config.causal,
    not is_causal.
    """
    engine, problem = subject.engine(NAME), problem_of_causality(NAME, subject)
    if engine is None or problem is None or _problem_of_windows(engine, subject) is not None:
        return
    served = engine.served_causality(subject) or ()
    is_speculators = isinstance(subject.format, SpeculatorsFormat)
    is_told = is_speculators and subject.config.get(NON_CAUSAL_FLAG) is False and all(served)
    if not is_told or subject.stated.body.get("is_causal") is not None:
        yield problem


@check_vllm(
    "S22",
    "warning",
    effect="attention backends for a quantised KV cache may not support non-causal attention",
    fix=f"{FIX_SERVE} # adds --kv-cache-dtype bfloat16",
    source="vllm-project/vllm#41559, #53979",
    serve_flag=PLAIN_KV_CACHE,
)
def kv_cache_is_plain(subject: Subject) -> Iterator[Problem]:
    """The target asks for a plain KV cache if the draft is non-causal."""
    decoder, _ = decoder_config(subject.target_json, subject.path)
    packing = as_object(subject.target_json.get("quantization_config") or decoder.get("quantization_config"))
    wanted = packing.get("kv_cache_scheme") or packing.get("kv_cache_quant_algo")
    trained = subject.trained_causality
    if wanted and trained is not None and not all(trained):
        yield Problem(f"target {CONFIG_FILE}:quantization_config", "the target asks for a quantised KV cache")


@check_vllm(
    "S28",
    effect="this release of vLLM attends to the whole context on every layer",
    fix=FIX_NEWER,
    source="vLLM 0.24.0 and 0.25.0 qwen3_dflash.py; vllm-project/vllm#46104, #47745",
    outcome="drops",
)
def vllm_knows_windows(subject: Subject) -> Iterator[Problem]:
    """The release of vLLM serves sliding layers, also together with full layers.

    0.24 serves sliding layers as full layers, and 0.25 refuses a draft with both kinds.
    """
    engine = subject.engine(NAME)
    problem = _problem_of_windows(engine, subject) if engine is not None else None
    if problem is not None:
        yield problem


def _problem_of_windows(engine: NamedEngine, subject: Subject) -> Problem | None:
    """The problem if the release cannot serve the kinds of layers. It includes their causality."""
    kinds, location = subject.stated.layer_types, subject.body_at("layer_types")
    is_mixed = set(kinds) >= set(LAYER_KINDS)
    if READS_WINDOWS <= engine.release < READS_KINDS and is_mixed:
        message = f"both sliding and full layers, which {engine} refuses"
        return Problem(location, message, effect="vLLM stops", outcome="stops")
    if engine.release >= READS_WINDOWS or not (SLIDING in kinds or subject.stated.window_keys):
        return None
    causality = problem_of_causality(NAME, subject)
    also = f"; {causality.message}" if causality is not None else ""
    return Problem(location, f"sliding layers, which {engine} serves as full layers{also}")


# The dialect that is written for vLLM


@FORMATS.register(NAME)
class Vllm(EngineNative):
    """The native dialect, written so that vLLM serves the draft as trained.

    Detection finds the file as native. Unlike other engines, vLLM also reads a reduced head with its id map, and a
    target of another width. Of the scales it reads logit_scale; the others only for DFlash 2.
    Source: vLLM 0.33.0 model_executor/models/qwen3_dflash.py.
    """

    name: ClassVar[str] = NAME
    title: ClassVar[str] = f"DFlash, native dialect for {NEWEST}"
    priority: ClassVar[int] = 200
    engine: ClassVar[str] = NAME
    keeps_head: ClassVar[bool] = True
    style_flags: ClassVar[frozenset[str]] = frozenset({"is_neox_style", "rope_is_neox_style"})
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", *ZLAB_SCALES})

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the native keys and the keys that only vLLM reads."""
        return {
            **super().write_config(config, carried),
            **({"draft_vocab_size": config.draft_vocab_size} if config.has_reduced_vocab else {}),
            **({} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}),
        }

    def refuse_to_write(self, config: DraftConfig) -> None:
        self.refuse_common(config)
        refuse_scales(config, NEWEST, ZLAB_SCALES)

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[Notice]:
        yield from super().warnings(config, carried)
        if any(window is not None for window in config.windows):
            yield Notice(
                f"vLLM {release_text(RELEASES[0])} ignores windows and runs every layer as a full layer; use {NEWEST}",
                id="window-ignored",
            )
        if len(set(config.windows)) > 1:
            yield Notice(
                f"only some layers have a window: {NEWEST} needs VLLM_USE_V2_MODEL_RUNNER=1", id="mixed-windows"
            )
