"""vLLM: its releases, how it attends, its serve command, its rules, and the dialect that is written for it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

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
)
from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.dialect import FORMATS, Json
from dflash_cli.formats.engine_native import EngineNative
from dflash_cli.formats.native import refuse_common
from dflash_cli.formats.native_fields import SCALES, write_scales
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.validation.rule import BFLOAT16, FIX_COPY, Outcome, Problem, Severity, check
from dflash_cli.validation.rules.drafting import NEUTRAL
from dflash_cli.validation.rules.tensors import WEIGHTS
from dflash_cli.validation.subject import CONFIG_FILE, Subject
from dflash_runtime.checkpoint.hf_config import SLIDING
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion
from dflash_runtime.json_values import as_object

NAME = "vllm"
ENGINE = (NAME,)
RELEASES: tuple[Release, ...] = tuple((0, minor) for minor in range(24, 34))
NEWEST = f"vLLM {release_text(RELEASES[-1])}"
WITHOUT_CAUSALITY: Release = (0, 24)
"""Reads neither windows nor causality (its qwen3_dflash.py): every layer is full and non-causal."""
WIDENS_FLAG: Release = (0, 33)
"""The first release in which the speculators flag was seen to be taken for every layer (vllm-project/vllm#47745)."""
FIX_SERVE = "dflash serve-command {draft} --target {target} --engine vllm"
FIX_NEWER = f"no file helps this release; use {NEWEST} or later: {FIX_SERVE}"
V2_RUNNER = "v2-runner"
"""A serve flag: only the V2 model runner serves the draft."""
PLAIN_KV_CACHE = "plain-kv-cache"
"""A serve flag: the target asks for a quantised KV cache, which the draft may find no attention for."""


@ENGINES.register(NAME)
class VllmEngine(ServingEngine):
    """vLLM, which reads native and speculators drafts."""

    name: ClassVar[str] = NAME
    releases: ClassVar[tuple[Release, ...]] = RELEASES
    dialect: ClassVar[str] = NAME
    serves_as_is: ClassVar[frozenset[str]] = frozenset({"speculators"})
    strictness: ClassVar[int] = 0
    finds_by_architecture: ClassVar[bool] = True
    habits: ClassVar[Mapping[Habit, Outcome]] = {
        "model-prefix": "stops",
        "other-prefix": "stops",
        "interleaved-rope-by-its-name": "drops",
        "gemma-norms": "drops",
        "unsorted-taps": "drops",
        "repeated-taps": "stops",
        "mask-safetensors": "stops",
    }
    """Read in 0.33.0: qwen3_dflash.py load_weights, interfaces.py, model_loader/default_loader.py."""

    early_habits: ClassVar[Mapping[Habit, Outcome]] = {
        "encoder-names": "stops",
        "interleaved-rope": "drops",
        "use-swa": "drops",
        "mask-pickle": "drops",
    }
    """What 0.24.0 does besides, read in its qwen3_dflash.py."""

    def outcome_of(self, habit: Habit) -> Outcome:
        """0.24 reads fewer names and keys than the releases after it."""
        if self.release[:2] == WITHOUT_CAUSALITY and habit in self.early_habits:
            return self.early_habits[habit]
        return self.habits.get(habit, "serves")

    def served_causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """The top-level is_causal, else dflash_config.causal, else the layers' kinds."""
        if self.release[:2] == WITHOUT_CAUSALITY:
            return (False,) * len(subject.layer_types)
        if subject.is_speculators:
            return self._speculators_causality(subject)
        top, nested = subject.config.get("is_causal"), subject.nested.get("causal")
        if self.release < WIDENS_FLAG and top != nested and SLIDING in subject.layer_types:
            return None
        return stated_once(top if isinstance(top, bool) else nested, subject)

    def _speculators_causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """Source: vLLM 0.33.0 algos.py (`causal = not flag`, absent false) and qwen3_dflash.py (is_causal first)."""
        count = len(subject.layer_types)
        flag, stated = subject.config.get(NON_CAUSAL_FLAG), subject.body.get("is_causal")
        if isinstance(stated, bool):
            return (stated,) * count
        if flag is False and self.release < WIDENS_FLAG:
            return None
        return (flag is False,) * count

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """num_speculative_tokens is block_size - 1."""
        model, _, revision = pair.draft.partition("@")
        speculative = {"method": "dflash", "model": model, "num_speculative_tokens": pair.num_draft_tokens}
        if revision:
            speculative["revision"] = revision
        target, _, target_revision = pair.target.partition("@")
        words = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
        if target_revision:
            words += ["--revision", target_revision]
        if pair.context_limit is not None:
            words += ["--max-model-len", str(pair.context_limit)]
        if BFLOAT16 in pair.flags:
            words += ["--dtype", "bfloat16"]
        if PLAIN_KV_CACHE in pair.flags:
            words += ["--kv-cache-dtype", "bfloat16"]
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if V2_RUNNER in pair.flags else {}
        return ServeCommand((shlex.join(words),), pair.num_draft_tokens, env)


@check(
    "C20",
    effect=f"{NEWEST} makes every layer causal; full layers of this dialect are non-causal",
    fix=FIX_COPY,
    source="vllm-project/vllm#56692, open in 0.33.0; #47745 brought it",
    outcome="drops",
    engines=ENGINE,
    unnamed="warning",
)
def full_layers_stay_non_causal(subject: Subject) -> Iterator[Problem]:
    """sliding_window_non_causal is true or absent if every layer is full attention.

    In the speculators dialect the flag concerns sliding layers only, so for a draft of full layers both values mean the
    same. vLLM applies it to every layer since #47745; 0.24 does not look at it. The value true is right for both.
    """
    if not subject.is_speculators or SLIDING in subject.layer_types or subject.config.get(NON_CAUSAL_FLAG) is not False:
        return
    severity = _flag_severity(subject)
    if severity is not None and subject.body.get("is_causal") is not False:
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            f"false, although all {len(subject.layer_types)} layers are full attention",
            severity=severity,
            repair={NON_CAUSAL_FLAG: True},
        )


@check(
    "C21",
    effect=f"{NEWEST} makes the full-attention layers causal too",
    fix="dflash convert {draft} {out} --to vllm --target {target}",
    source="vLLM 0.33.0 transformers_utils/configs/speculators/algos.py",
    outcome="drops",
    engines=ENGINE,
    unnamed="warning",
)
def layers_agree_for_vllm(subject: Subject) -> Iterator[Problem]:
    """All layers of a speculators draft share one causality.

    One value for all layers is all that vLLM takes from the speculators dialect.
    """
    if not subject.is_speculators or subject.config.get(NON_CAUSAL_FLAG) is not False:
        return
    severity = _flag_severity(subject)
    if severity is not None and set(subject.layer_types) == set(LAYER_KINDS):
        yield Problem(
            subject.location(NON_CAUSAL_FLAG),
            "false with both sliding and full layers: sliding ones are causal, full ones are not",
            severity=severity,
        )


@check(
    "C27",
    effect="vLLM stops",
    fix=(
        "if the training used silu, write it and run dflash validate {draft}; otherwise use an engine that has this "
        "activation"
    ),
    source="vLLM 0.33.0 qwen3_dflash.py",
    engines=ENGINE,
    unnamed="warning",
)
def activation_is_silu(subject: Subject) -> Iterator[Problem]:
    """hidden_act is silu, the only activation that vLLM's DFlash model has."""
    value = subject.body.get("hidden_act", "silu")
    if value != "silu":
        yield Problem(subject.body_location("hidden_act"), f"found {value!r}, expected 'silu'")


@check(
    "C34",
    effect="vLLM cannot serve the draft by its own name; naming the target with --model works",
    fix="dflash convert {draft} {out} --to speculators --verifier ORG/REPO",
    source="vLLM 0.33.0 transformers_utils/config.py refuses a path",
    engines=ENGINE,
    unnamed="warning",
)
def names_a_hub_verifier(subject: Subject) -> Iterator[Problem]:
    """The draft names its verifier, the target, by hub repository."""
    if not subject.is_speculators:
        return
    name = as_object(as_object(subject.config.get("speculators_config")).get("verifier")).get("name_or_path")
    is_repository = isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_repository:
        yield Problem(
            subject.location("speculators_config.verifier.name_or_path"),
            f"found {name!r}, which is not a hub repository",
        )


@check(
    "M02",
    effect="vLLM has nowhere to load d2t and stops",
    fix=f"{FIX_COPY} # drops the map if it maps every id to itself",
    source="vLLM 0.33.0 models/utils.py",
    engines=ENGINE,
    unnamed="warning",
)
def full_vocabulary_has_no_map(subject: Subject) -> Iterator[Problem]:
    """A draft with the whole output vocabulary has no id map (d2t)."""
    found = subject.vocabulary_sizes
    if found is None or subject.tensors is None or found[0] != found[1]:
        return
    if DRAFT_TO_TARGET in subject.tensors:
        yield Problem(
            f"{WEIGHTS}:{DRAFT_TO_TARGET}",
            f"present, although draft_vocab_size is the whole vocabulary of {found[1]}",
        )


@check(
    "S01",
    "info",
    effect="vLLM infers the method from the name; otherwise the method must be given",
    fix=f"{FIX_SERVE} # gives the method",
    source="vLLM 0.33.0 config/speculative.py",
    engines=ENGINE,
)
def name_says_dflash(subject: Subject) -> Iterator[Problem]:
    """The draft's name contains dflash, and neither eagle- nor eagle3.

    vLLM looks for eagle- and eagle3 first.
    """
    name = subject.served_name.lower()
    if subject.is_speculators:
        return
    if "dflash" not in name:
        yield Problem(CONFIG_FILE, "the draft's name does not contain dflash")
    elif "eagle-" in name or "eagle3" in name:
        yield Problem(CONFIG_FILE, "the draft's name contains eagle, which vLLM takes for the method")


@check(
    "S02",
    effect="masks past the trained block are positions the draft has never seen; vLLM does not check",
    fix=f"{FIX_SERVE} # asks for block_size - 1",
    source="vllm-project/vllm#41834; vLLM 0.33.0 config/speculative.py",
    outcome="drops",
    engines=ENGINE,
)
def k_is_the_trained_one(subject: Subject) -> Iterator[Problem]:
    """--num-speculative-tokens is block_size - 1 on vLLM.

    A larger number goes beyond the training. A smaller one shortens the block itself, and every row of a non-causal
    block depends on how many follow.
    """
    asked, block = subject.num_speculative_tokens, subject.block_size
    if asked is None or block is None or asked == block - 1:
        return
    location = subject.location("block_size")
    if asked > block - 1:
        yield Problem(location, f"{block}, which drafts {block - 1}, but {asked} are asked for")
    else:
        effect = "vLLM shortens the block to match, which the draft was not trained for"
        yield Problem(
            location, f"{block}, which drafts {block - 1}, but {asked} are asked for", effect, severity="warning",
            outcome="serves",
        )  # fmt: skip


@check(
    "S03",
    "warning",
    effect="only vLLM's V2 model runner serves sliding and full layers together",
    fix=f"{FIX_SERVE} # selects that runner",
    source="vLLM 0.33.0 qwen3_dflash.py",
    engines=ENGINE,
    serve_flag=V2_RUNNER,
)
def layers_are_of_one_kind(subject: Subject) -> Iterator[Problem]:
    """All layers are sliding, or all are full attention."""
    engine = subject.engine(NAME)
    if engine is not None and engine.release[:2] == WITHOUT_CAUSALITY:  # it serves every layer as a full one
        return
    if set(subject.layer_types) >= set(LAYER_KINDS):
        yield Problem(subject.body_location("layer_types"), "found both sliding and full layers")


@check(
    "S04",
    effect="vLLM stops with an assertion",
    fix="export the draft without this tensor, then check it: dflash validate {draft} --engine vllm",
    source="vLLM 0.33.0 qwen3_dflash.py load_weights",
    engines=ENGINE,
)
def no_mask_hidden(subject: Subject) -> Iterator[Problem]:
    """Tensor names do not contain mask_hidden."""
    for name in subject.tensors or ():
        if "mask_hidden" in name:
            yield Problem(f"{WEIGHTS}:{name}", "vLLM asserts that no tensor has such a name")


@check(
    "S05",
    effect="vLLM ignores the scale for DFlash; only its DFlash 2 model reads it",
    fix=(
        "dflash serve-command {draft} --target {target} --engine sglang # unless the scale is input_embedding_scale "
        "(see S21)"
    ),
    source="vLLM 0.33.0 qwen3_dflash2.py",
    outcome="drops",
    engines=ENGINE,
)
def vllm_applies_no_scale(subject: Subject) -> Iterator[Problem]:
    """Scales are neutral or absent, because vLLM's DFlash model has none.

    Leaving out an embedding scale ruins the drafts; leaving out a multiplier or a soft cap only changes sampled ones.
    """
    for key in SCALES:
        value = subject.stated(key)
        if value is not None and value not in NEUTRAL[key]:
            yield Problem(next(iter(subject.homes(key))), f"found {value}, expected the neutral value or none")


@check(
    "S07",
    effect="whether masked positions attend to later ones differs from training",
    fix="dflash convert {draft} {out} --to vllm --target {target}",
    source="vLLM 0.33.0 qwen3_dflash.py, algos.py; vllm-project/vllm#47453 before #47745",
    outcome="drops",
    engines=ENGINE,
)
def vllm_serves_the_trained_causality(subject: Subject) -> Iterator[Problem]:
    """vLLM serves every layer with the causality that the config states.

    C20 and C21 report the flag that vLLM 0.33 applies to full layers too; this rule reports every other difference,
    such as vLLM 0.24, which serves causal sliding layers of the speculators dialect non-causally.
    """
    engine, problem = subject.engine(NAME), problem_of_causality(NAME, subject)
    if engine is None or problem is None:
        return
    served = engine.served_causality(subject) or ()
    is_told = subject.is_speculators and subject.config.get(NON_CAUSAL_FLAG) is False and all(served)
    if not is_told or subject.body.get("is_causal") is not None:
        location = subject.location(NON_CAUSAL_FLAG) if subject.is_speculators else problem.location
        is_early = engine.release[:2] == WITHOUT_CAUSALITY
        yield replace(problem, location=location, fix=FIX_NEWER if is_early else "")


@check(
    "S22",
    "warning",
    effect="attention backends that read a quantised KV cache may have no non-causal attention",
    fix=f"{FIX_SERVE} # adds --kv-cache-dtype bfloat16",
    source="vllm-project/vllm#41559, #53979",
    engines=ENGINE,
    serve_flag=PLAIN_KV_CACHE,
)
def kv_cache_is_plain(subject: Subject) -> Iterator[Problem]:
    """The target asks for a plain KV cache if the draft is non-causal."""
    packing = as_object(subject.target_json.get("quantization_config"))
    wanted = packing.get("kv_cache_scheme") or packing.get("kv_cache_quant_algo")
    trained = subject.trained_causality
    if wanted and trained is not None and not all(trained):
        yield Problem(f"target {CONFIG_FILE}:quantization_config", "the target asks for a quantised KV cache")


@check(
    "S28",
    effect="vLLM 0.24 attends to the whole context on every layer",
    fix=FIX_NEWER,
    source="vLLM 0.24.0 model_executor/models/qwen3_dflash.py; vllm-project/vllm#46104",
    outcome="drops",
    engines=ENGINE,
)
def vllm_knows_windows(subject: Subject) -> Iterator[Problem]:
    """The release of vLLM serves sliding layers."""
    engine = subject.engine(NAME)
    has_windows = "sliding_attention" in subject.layer_types or bool(subject.nested.get("use_swa"))
    if engine is not None and engine.release[:2] == WITHOUT_CAUSALITY and has_windows:
        yield Problem(subject.body_location("layer_types"), f"sliding layers, which {engine} serves as full ones")


def _flag_severity(subject: Subject) -> Severity | None:
    """Error for a vLLM that has the change (#47745), nothing for one that has not."""
    engine = subject.engine(NAME)
    if engine is None:
        return "warning"
    if engine.release[:2] == WITHOUT_CAUSALITY:
        return None
    return "error" if engine.release >= WIDENS_FLAG else "warning"


# The dialect that is written for vLLM


@FORMATS.register(NAME)
class Vllm(EngineNative):
    """The native dialect as vLLM reads it as trained. Source: vLLM 0.33.0 model_executor/models/qwen3_dflash.py.

    Written only; the file is a native one. vLLM reads more from it than other engines do: a reduced head with its id
    map, and a target of another width. It reads scales for DFlash 2 only.
    """

    name: ClassVar[str] = NAME
    title: ClassVar[str] = f"DFlash, native dialect for {NEWEST}"
    priority: ClassVar[int] = 200
    engine: ClassVar[str] = NAME
    keeps_head: ClassVar[bool] = True
    style_flags: ClassVar[frozenset[str]] = frozenset({"is_neox_style", "rope_is_neox_style"})
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", *SCALES})

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write the native keys, and those that only vLLM reads."""
        return {
            **super().write_config(config, carried),
            **({"draft_vocab_size": config.draft_vocab_size} if config.has_reduced_vocab else {}),
            **({} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}),
        }

    def refuse_to_write(self, config: DraftConfig) -> None:
        refuse_common(config)
        lost = list(write_scales(config))
        if lost:
            raise LossyConversion(f"{', '.join(lost)}: {NEWEST} reads scales for DFlash 2 only")

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[str]:
        yield from super().warnings(config, carried)
        if any(window is not None for window in config.windows) or any(config.causal):
            yield (
                f"vLLM {release_text(WITHOUT_CAUSALITY)} reads neither windows nor causality and runs every "
                f"layer with full, non-causal attention; use {release_text(RELEASES[-1])}"
            )
        if len(set(config.windows)) > 1:
            yield f"some layers have a window and some have none: {NEWEST} needs VLLM_USE_V2_MODEL_RUNNER=1"
