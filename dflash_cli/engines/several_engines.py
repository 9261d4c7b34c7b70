"""Rules about several engines at once, and about habits of exporters that engines treat differently."""

from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.partial_loads import changes_nothing
from dflash_cli.engines.serving_engine import (
    EnginesWhere,
    Habit,
    HabitProblem,
    ServingEngine,
    all_engines,
    by_engine,
    engines_that_differ,
)
from dflash_cli.formats.dialect import COMMON, named_architectures, word_of
from dflash_cli.rules.rule import FIX_COPY, FIX_REEXPORT, FIX_TO_COMMON, Problem, check
from dflash_cli.rules.shapes import reduced_vocabulary
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_cli.rules.themes.attention import WINDOW_KEY
from dflash_cli.rules.themes.tensors import ALIASES, common_prefix, fused_names
from dflash_runtime.checkpoint.stored.files import INDEX_FILE

FIX_VLLM = "dflash serve-command {draft} --target {target} --engine vllm # vLLM serves it"
NORMALISE = f"dflash convert {{draft}} {{out}} --to {COMMON} --normalise-taps"
FIX_ROPE_STYLE = (
    "serve it with vLLM, from a copy that states is_neox_style, the key it reads: dflash convert {draft} {out} "
    "--to vllm --target {target}"
)
NOT_FOUND = "the engine finds no tensor under these names, and leaves the weights at random values"
IGNORES_FILE = "the engine ignores the file, and uses the mask token's own row"
TABLES = "code of vLLM 0.33.0, SGLang 0.5.23 and z-lab 0.1.0, run on the configs of tests/golden/engine_verdicts.json"
MAY_BE_UNSTATED = {"windows": (), "rope": ("rope_scaling", "rope_parameters")}
"""Field -> decoder keys. If none is stated, the meaning of the config is not known. Windows follow from more keys."""
EVERY = EnginesWhere(lambda engine: True)
LIKE_THE_REFERENCE = EnginesWhere(lambda engine: engine.follows_reference)


@check(
    "C36",
    effect="vLLM, SGLang and llama.cpp's converter do not know the architecture",
    fix=FIX_TO_COMMON,
    source="NVIDIA-NeMo/Automodel serve_vllm.py; vLLM 0.33.0 model registry",
    engines=EnginesWhere(lambda engine: engine.finds_by_architecture),
    unnamed="warning",
)
def architecture_is_known(subject: Subject) -> Iterator[Problem]:
    """architectures names DFlashDraftModel, the only name that engines register.

    Automodel writes Qwen3DFlashDraftModel. A config saved through another class has the name of that class.
    """
    named, expected = named_architectures(subject.config), subject.format.architecture
    if expected is not None and expected not in named:
        yield Problem(
            subject.location("architectures"),
            f"found {', '.join(named) or 'no architecture'}; expected {expected}",
            repair={"architectures": [expected]},
        )


@check(
    "C37",
    effect="SGLang, the z-lab reference code and speculators itself size fc.weight by hidden_size",
    fix=f"if the draft has its own embedding and head, serve it with an engine that reads the key: {FIX_VLLM}",
    source="vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    engines=EnginesWhere(lambda engine: not engine.takes_other_widths),
    unnamed="warning",
)
def draft_is_as_wide_as_its_target(subject: Subject) -> Iterator[Problem]:
    """The draft is as wide as its target: target_hidden_size equals hidden_size.

    Only vLLM serves a draft of another width than its target.
    """
    stated, width = subject.stated.value("target_hidden_size"), subject.stated.body.get("hidden_size")
    if stated is not None and stated != width:
        yield Problem(subject.expected_at("target_hidden_size"), f"found {stated!r}, but hidden_size is {width!r}")


@check(
    "S14",
    effect="the engine does not know the dialect and cannot load the draft",
    fix=FIX_TO_COMMON,
    source="transformers 5.23 modeling_auto.py; z-lab/dflash model.py; llama.cpp conversion/qwen.py",
    engines=EnginesWhere(lambda engine: not engine.has_dialect_rule),
)
def dialect_is_read(subject: Subject) -> Iterator[Problem]:
    """The draft is in a dialect that the engine reads.

    Every engine reads the native dialect. vLLM also reads the speculators dialect.
    """
    yield from unknown_dialect(subject, *(engine for engine in all_engines() if not engine.has_dialect_rule))


@check(
    "S17",
    effect="transformers, llama.cpp and TensorRT-LLM use the target's head and ignore the draft's head and id map",
    fix=FIX_VLLM,
    source="z-lab/dflash model.py; ggml-org/llama.cpp src/models/dflash.cpp; TensorRT-LLM modeling_dflash.py, 009d8fa4",
    outcome="drops",
    engines=LIKE_THE_REFERENCE,
)
def head_is_the_targets(subject: Subject) -> Iterator[Problem]:
    """A draft for transformers, llama.cpp or TensorRT-LLM proposes over the target's whole vocabulary."""
    yield from reduced_vocabulary(subject)


@check(
    "N03",
    effect="vLLM looks for model.model.* and stops",
    fix=FIX_COPY,
    source="vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py; z-lab 0.1.0; llama.cpp conversion/qwen.py",
    engines=engines_that_differ("model-prefix", "other-prefix"),
    unnamed="warning",
)
@by_engine(stops="the engine puts its own prefix before every name, finds no tensor, and stops", drops=NOT_FOUND)
def names_are_flat(subject: Subject) -> Iterator[HabitProblem]:
    """Tensor names start without a prefix, because vLLM puts `model.` before every name.

    SGLang and transformers remove `model.`. No engine knows another prefix.
    """
    prefix = common_prefix(subject)
    if prefix is not None:
        fix = FIX_REEXPORT if prefix == "encoder." else ""
        habit: Habit = "model-prefix" if prefix == "model." else "other-prefix"
        yield habit, Problem(WEIGHTS, f"names start with {prefix!r}, expected no prefix", fix=fix)


@check(
    "N08",
    effect="readers do not find q_proj, k_proj, v_proj, gate_proj and up_proj",
    fix=FIX_COPY,
    source="vLLM 0.33.0 and SGLang 0.5.23 layers/linear.py; z-lab 0.1.0, run; llama.cpp conversion/qwen.py",
    engines=engines_that_differ("fused-projections"),
    unnamed="warning",
)
@by_engine(stops="the engine does not know fused projections, and stops", drops=NOT_FOUND)
def projections_are_apart(subject: Subject) -> Iterator[HabitProblem]:
    """Projections are stored one by one, as in every dialect of DFlash.

    vLLM and SGLang fuse them in memory, and also load fused projections.
    """
    names = fused_names(subject)
    if names:
        message = f"fused projections: {len(names)}, expected separate ones"
        yield "fused-projections", Problem(f"{WEIGHTS}:{names[0]}", message)


@check(
    "N23",
    effect="readers that do not know the other names leave fc and hidden_norm at random values",
    fix=FIX_COPY,
    source="vLLM 0.33.0 hf_to_vllm_mapper; SGLang 0.5.23 models/dflash.py; z-lab 0.1.0, run",
    engines=engines_that_differ("encoder-names"),
    unnamed="warning",
)
@by_engine(stops="the engine does not know the name, and stops", drops=NOT_FOUND)
def tensors_have_their_usual_names(subject: Subject) -> Iterator[HabitProblem]:
    """fc and hidden_norm have these names, not encoder.fc and encoder.output_norm_enc."""
    names = [name for name in subject.tensors or () if name.startswith(ALIASES)]
    if names and common_prefix(subject) is None:
        message = f"{len(names)} tensors under other names than fc and hidden_norm"
        yield "encoder-names", Problem(f"{WEIGHTS}:{names[0]}", message)


@check(
    "C07",
    effect="engines that sort the tapped layers do not sort the columns of fc.weight, so features are mixed up",
    fix=NORMALISE,
    source="vLLM 0.33.0 models/interfaces.py; SGLang 0.5.23 models/qwen3.py; z-lab/dflash model.py",
    engines=engines_that_differ("unsorted-taps", "repeated-taps"),
    unnamed="warning",
)
@by_engine(
    stops="the engine captures each layer once, so fc.weight gets fewer features than it has columns",
    drops="the engine passes features in the order of the layers, but the columns of fc.weight are in the listed order",
)
def taps_ascend(subject: Subject) -> Iterator[HabitProblem]:
    """Tapped layers are listed in ascending order without repeats.

    The reference code concatenates the features as listed. vLLM sorts the layers and drops repeats. SGLang captures
    each layer when it runs. --normalise-taps sorts the list together with the columns of fc.weight, so the draft
    computes the same.
    """
    taps, location = subject.stated.taps or [], subject.at("target_layer_ids")
    stated = subject.stated.value("target_layer_ids")
    if len(set(taps)) != len(taps):
        fix = f"{NORMALISE} --allow-lossy # adds up the columns of repeated layers, which rounds"
        yield "repeated-taps", Problem(location, f"{stated} repeats a layer", fix=fix)
    elif taps != sorted(taps):
        yield "unsorted-taps", Problem(location, f"{stated} is not in ascending order")


@check(
    "C41",
    effect="vLLM from 0.29 on and SGLang rotate neighbouring pairs; dflash and the reference code rotate halves",
    fix=f"serve it with an engine that reads the key: {FIX_VLLM}",
    source="vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    engines=engines_that_differ("interleaved-rope", "interleaved-rope-by-its-name", "nested-style"),
    unnamed="warning",
    stops_runtime=True,
)
@by_engine(drops="the engine ignores the key, and rotates halves")
def rope_rotates_halves(subject: Subject) -> Iterator[HabitProblem]:
    """Rope rotates halves, as in NeoX.

    No engine reports a mismatch. vLLM from 0.29 on and SGLang follow the key. vLLM 0.28 rotates like its target.
    Earlier releases of vLLM, transformers, llama.cpp and dflash rotate halves.
    """
    keys: dict[str, Habit] = {"is_neox_style": "interleaved-rope", "rope_is_neox_style": "interleaved-rope-by-its-name"}
    for key, habit in keys.items():
        for item in subject.stated.statements(key):
            if item.value is False:
                is_nested = not _is_outermost(subject, item.key)
                fix = FIX_ROPE_STYLE if is_nested or key == "rope_is_neox_style" else ""
                problem = Problem(subject.location(item.key), "false: the draft rotates interleaved pairs", fix=fix)
                yield "nested-style" if is_nested else habit, problem


@check(
    "C44",
    effect="SGLang adds 1 to every norm weight and other readers do not, so some of them serve another model",
    fix="export the draft again with plain norms, then check it: dflash validate {draft}",
    source="SGLang 0.5.23 models/dflash.py use_gemma_norm",
    engines=engines_that_differ("gemma-norms", "nested-style"),
    unnamed="warning",
    stops_runtime=True,
)
@by_engine(drops="the engine multiplies by the weight alone, but the config asks for 1 plus the weight")
def norms_are_plain(subject: Subject) -> Iterator[HabitProblem]:
    """Norms multiply by their weight, not by 1 plus their weight.

    If use_gemma_norm is true, SGLang adds 1. vLLM, dflash and the z-lab reference code ignore the key.
    """
    for item in subject.stated.statements("use_gemma_norm"):
        if item.value is True:
            message = "true; only SGLang reads the key, and only at the top level"
            problem = Problem(subject.location(item.key), message)
            yield "gemma-norms" if _is_outermost(subject, item.key) else "nested-style", problem


@check(
    "S29",
    effect="engines that do not read use_swa attend to the whole context on every layer",
    fix=FIX_TO_COMMON,
    source="z-lab 0.1.0, run; SGLang 0.5.23 models/dflash.py; llama.cpp conversion/qwen.py; vllm-project/vllm#46104",
    engines=engines_that_differ("use-swa"),
)
@by_engine(drops="the engine ignores the key, and attends to the whole context")
def windows_are_where_engines_look(subject: Subject) -> Iterator[HabitProblem]:
    """Windows are stated in layer_types, which every engine reads, and not only in use_swa."""
    for key in subject.stated.window_keys:
        yield "use-swa", Problem(subject.location(key), WINDOW_KEY)


@check(
    "N15",
    effect="acceptance drops in readers that use the mask token's own row",
    fix="dflash serve-command {draft} --target {target} --engine vllm # or sglang: they read mask_embedding.pt",
    source="vLLM 0.33.0 qwen3_dflash.py, default_loader.py; SGLang 0.5.23 dflash_worker_v2.py; vllm-project/vllm#46104",
    engines=engines_that_differ("mask-pickle", "mask-safetensors"),
    unnamed="warning",
)
@by_engine(stops="the engine loads every safetensors file, does not know this tensor, and stops", drops=IGNORES_FILE)
def no_mask_embedding(subject: Subject) -> Iterator[HabitProblem]:
    """The mask embedding is the mask token's row, not a learned tensor in a file.

    vLLM from 0.25 on and SGLang read mask_embedding.pt. No engine reads mask_embedding.safetensors, and vLLM loads it
    as weights of the draft unless an index excludes it.
    """
    if "mask_embedding.pt" in subject.files:
        yield "mask-pickle", Problem("mask_embedding.pt", "a learned mask embedding in a pickle file")
    if "mask_embedding.safetensors" in subject.files:
        fix = "serve the draft with its mask_embedding.pt, in vLLM or SGLang; then check it: dflash validate {draft}"
        effect = IGNORES_FILE if INDEX_FILE in subject.files else ""
        message = "a learned mask embedding that no engine reads"
        yield "mask-safetensors", Problem("mask_embedding.safetensors", message, effect, fix)


@check(
    "S32",
    effect="the engine stops when it reads the config or builds the draft's modules",
    fix="correct the key in config.json, then check it: dflash validate {draft}",
    source=TABLES,
    engines=EVERY,
    stage="unexplained",
)
def engine_accepts_the_config(subject: Subject) -> Iterator[Problem]:
    """The engine's own code accepts the config: every key has the type that the engine reads.

    A key that is absent or null takes the default of the engine or of transformers' config class.
    """
    for engine, reading in _readings(subject):
        if isinstance(reading, EngineStops):
            location = reading.key if reading.key.startswith(WEIGHTS) else subject.location(reading.key)
            yield Problem(location, f"{engine}: {reading.why}", engines=(engine.name,))


@check(
    "S33",
    effect="the engine serves the draft with another value than its config states",
    fix="state the value under the key that the engine reads, then check it: dflash validate {draft}",
    source=TABLES,
    engines=EVERY,
    outcome="drops",
    stage="unexplained",
)
def engine_reads_what_is_stated(subject: Subject) -> Iterator[Problem]:
    """The engine reads the windows, taps, mask token, block, rope, epsilon and sinks that the config states.

    It also loads every row of every tensor, and adds none. S07, S11, S24 and S25 compare the causality.
    """
    for engine, reading in _readings(subject):
        if isinstance(reading, EngineReading) and reading.cut:
            message = f"{engine} loads only the first rows or columns of {len(reading.cut)} tensors"
            yield Problem(f"{WEIGHTS}:{reading.cut[0]}", message, engines=(engine.name,))
        if isinstance(reading, EngineReading) and reading.padded:
            message = f"{engine} adds zeros to {len(reading.padded)} tensors, up to the size that the config states"
            problem = Problem(f"{WEIGHTS}:{reading.padded[0]}", message, engines=(engine.name,))
            is_harmless = changes_nothing(reading.padded, subject)
            yield replace(problem, severity="warning", outcome="serves") if is_harmless else problem
        if not isinstance(reading, EngineReading) or subject.parsed is None:
            continue
        for field, (found, meant) in reading.differences(subject.parsed.config).items():
            keys = MAY_BE_UNSTATED.get(field)
            is_read_alike = field == "windows" and (subject.stated.states_kinds or bool(subject.stated.window_keys))
            is_stated = keys is None or is_read_alike or any(map(subject.stated.body.get, keys))
            yield Problem(
                subject.at(field),
                f"{engine} reads {found!r}, the config states {meant!r}" if is_stated else f"{engine} reads {found!r}",
                engines=(engine.name,),
                severity=None if is_stated else "warning",
                outcome=None if is_stated else "serves",
            )


@check(
    "S42",
    effect="the engine leaves scales at random values, or takes packed numbers for plain ones",
    fix=(
        "list the plain modules by the engine's names, or convert the unpacked draft, with --to sglang for a plain fc; "
        "then dflash validate {draft}"
    ),
    source="tests/golden/quantised_verdicts.json",
    engines=EVERY,
    outcome="drops",
    stage="unexplained",
)
def engine_fills_packed_weights(subject: Subject) -> Iterator[Problem]:
    """The engine finds every part of packed weights, and packs the same modules as the file.

    vLLM looks for modules by the numbers of the target's layers, so its lists of plain modules need names such as
    `model.fc` and `model.layers.36.self_attn.o_proj` for a target of 36 layers.
    """
    for engine, reading in _readings(subject):
        if isinstance(reading, EngineReading) and reading.packed:
            message = f"{engine} does not load {len(reading.packed)} parts of packed weights as they are meant"
            yield Problem(f"{WEIGHTS}:{reading.packed[0]}", message, engines=(engine.name,))


def _readings(subject: Subject) -> Iterator[tuple[ServingEngine, EngineReading | EngineStops | None]]:
    """Each engine that the user named, with its reading of the config."""
    for engine in subject.plan.engines:
        assert isinstance(engine, ServingEngine)
        yield engine, engine.read_config(subject)


def unknown_dialect(subject: Subject, *engines: type[ServingEngine]) -> Iterator[Problem]:
    """A problem about each named engine that does not read the draft's dialect."""
    unable = tuple(
        engine.name
        for engine in engines
        if subject.engine(engine.name) is not None and not isinstance(subject.format, engine.reads)
    )
    if unable:
        location = subject.location(next(iter(subject.format.signs), "architectures"))
        message = f"found the {word_of(subject.format)} dialect, expected the {COMMON} one"
        yield Problem(location, message, engines=unable)


def _is_outermost(subject: Subject, key: str) -> bool:
    """Whether a key is stated where engines look for it: at the top level, or among the decoder keys."""
    return "." not in key.removeprefix(subject.format.body)
