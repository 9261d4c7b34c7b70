"""Rules on whether a draft fits the given target. Without a target they find nothing."""

from collections.abc import Iterator, Mapping

from dflash_cli.checkpoints.opening import lacks_embedding_scale
from dflash_cli.rules.rule import BFLOAT16, FIX_OTHER_TARGET, FIX_RUN_LEVEL, Problem, Severity, check
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_cli.rules.themes.target_identity import TOKENIZER_CONFIG, read_json, special_tokens
from dflash_runtime.checkpoint.pair import TargetExpectations, find_misfits
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.checkpoint.targets.rank_sizes import split_refusal
from dflash_runtime.checkpoint.targets.rope_fields import read_rope
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.errors import CheckpointError, InvalidConfig
from dflash_runtime.json_values import as_object, is_int

EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")


@check(
    "P01",
    effect="the draft uses the target's embedding and head, which have another width",
    fix=FIX_OTHER_TARGET,
    source="vllm-project/vllm#48113",
)
def widths_fit(subject: Subject) -> Iterator[Problem]:
    """The draft has the hidden_size that the target's features need."""
    yield from _misfits(subject, "target_hidden_size", subject.expected_at("target_hidden_size"))
    yield from _misfits(subject, "hidden_size", subject.body_at("hidden_size"))


@check(
    "P02",
    effect="vLLM maps ids through a map of zeros; in older releases no draft token is accepted",
    fix="if only the padding differs, write the target's vocab_size: dflash validate {draft} --target {target}",
    source="vllm-project/vllm#46435",
    outcome="drops",
    stops_runtime=True,
)
def vocabularies_fit(subject: Subject) -> Iterator[Problem]:
    """The draft's vocab_size equals the target's, padding included."""
    yield from _misfits(subject, "vocab_size", subject.body_at("vocab_size"))


@check(
    "P03",
    effect="SGLang refuses the id; vLLM reads past the end of the embedding",
    fix=FIX_OTHER_TARGET,
    source="NVIDIA/Model-Optimizer#1621; SGLang 0.5.23 dflash_worker_v2.py",
)
def mask_has_a_row(subject: Subject) -> Iterator[Problem]:
    """The mask token has a row in the target's embedding."""
    location, value = subject.expected_at("mask_token_id"), subject.stated.value("mask_token_id")
    yield from _misfits(subject, "mask_token_id", location)
    target = subject.target
    if target is not None and is_int(value) and value < target.vocab_size and value in target.eos_token_ids:
        yield Problem(
            location,
            f"{value} is a stop token of the target",
            effect="the draft cannot tell a masked position from the end of the text",
            severity="warning",
        )


@check(
    "P04",
    "warning",
    effect="SGLang refuses a pair if the tokenizer names another mask token",
    fix=f"{FIX_RUN_LEVEL} # tries the target's special tokens",
    source="SGLang 0.5.23 dflash_worker_v2.py",
)
def tokenizer_names_the_mask(subject: Subject) -> Iterator[Problem]:
    """If the target's tokenizer names a mask token, it is the mask token of the draft."""
    value = subject.stated.value("mask_token_id")
    named = read_json(subject.target_checkpoint, TOKENIZER_CONFIG).get("mask_token")
    content = as_object(named).get("content", named)
    ids = [key for key, text in special_tokens(subject.target_checkpoint).items() if content and text == content]
    if ids and is_int(value) and str(value) not in ids:
        yield Problem(
            subject.expected_at("mask_token_id"), f"found {value}, the tokenizer's mask token {content!r} is {ids[0]}"
        )


@check(
    "P05",
    "warning",
    effect="a different base is right only if the draft was trained with it",
    fix=f"{FIX_RUN_LEVEL} # tries the target's base",
    source="NVIDIA/Model-Optimizer hf_spec_export.py; Luce-Org/lucebox#447",
)
def rope_bases_fit(subject: Subject) -> Iterator[Problem]:
    """The draft has the rope base of the target.

    Some drafts have another base on purpose.
    """
    if subject.target is None or subject.target.rope is None:
        return
    try:
        theta = read_rope(subject.stated.body, subject.path).theta
    except InvalidConfig:  # C22 and C23 report it
        return
    if theta != subject.target.rope.theta:
        yield Problem(subject.body_at("rope_theta"), f"found {theta}, the target's is {subject.target.rope.theta}")


@check(
    "C25",
    "warning",
    effect="longer texts are cut short or drafted badly; vLLM raises the limit only for plain rope",
    fix="dflash serve-command {draft} --target {target} --engine vllm # limits the context to the draft's positions",
    source="vllm-project/vllm#48894, #57941",
)
def positions_reach_as_far(subject: Subject) -> Iterator[Problem]:
    """The draft has at least as many positions as the target."""
    stated = subject.stated.body.get("max_position_embeddings")
    reach = subject.target.max_position_embeddings if subject.target is not None else None
    if reach is not None and is_int(stated) and stated < reach:
        yield Problem(subject.body_at("max_position_embeddings"), f"found {stated}, the target's is {reach}")


@check(
    "C11",
    effect="the draft was made for another target, or the number is wrong; SGLang only warns",
    fix=FIX_OTHER_TARGET,
    source="SGLang 0.5.23 spec_aux_hidden_state.py",
    outcome="drops",
    stops_runtime=True,
)
def target_depth_fits(subject: Subject) -> Iterator[Problem]:
    """num_target_layers is the number of layers of the target."""
    location = subject.at("num_target_layers")
    yield from _misfits(subject, "num_target_layers", location)
    is_missing = subject.stated.value("num_target_layers") is None
    if is_missing and "num_target_layers" in subject.format.needed:
        yield Problem(
            subject.expected_at("num_target_layers"),
            "missing, expected the target's number of layers",
            effect="the z-lab reference code and MLX stop",
            fix="dflash validate {draft} --target {target} --fix-out {out}",
            severity="warning",
            outcome="serves",
        )


@check(
    "P06",
    effect="engines stop, or never capture the layer's output",
    fix=FIX_OTHER_TARGET,
    source="charlie12345/ROCmFPX#44",
)
def taps_exist_in_the_target(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer exists in the given target."""
    yield from _misfits(subject, "target_layer_ids", subject.at("target_layer_ids"))


@check(
    "P10",
    "warning",
    effect="engines differ: SGLang feeds the draft the scaled embedding, vLLM and z-lab's code the unscaled one",
    fix="write the scale used in training (1 for none), then check it: dflash validate {draft} --target {target}",
    source="vllm-project/vllm#41703; SGLang 0.5.23 models/gemma4_causal.py; z-lab/dflash 0.1.0 model.py",
)
def embedding_scale_is_known(subject: Subject) -> Iterator[Problem]:
    """A draft for a target that scales its embedding states input_embedding_scale."""
    if subject.target is not None and lacks_embedding_scale(subject.stated, subject.target):
        yield Problem(
            subject.expected_at("input_embedding_scale"),
            f"missing, although this is a {subject.target.model_type.lower()} target",
        )


@check(
    "P11",
    "warning",
    effect="the draft reads the packed head as plain numbers",
    fix="use a target with a plain head and embedding; dflash inspect {target} --tensors # lists the types",
    source="sgl-project/sglang#39362; sgl-project/SpecForge#473",
    outcome="stops",
)
def head_is_plain(subject: Subject) -> Iterator[Problem]:
    """The target's head and embedding, which the draft borrows, are plain floats."""
    for name, info in _target_tensors(subject).items():
        is_borrowed = name.startswith(("lm_head.", "model.embed_tokens.", "model.language_model.embed_tokens."))
        if is_borrowed and info.dtype not in ("F16", "BF16", "F32", "F64"):
            yield Problem(
                f"target {info.file.name}:{name}", f"found packed weights ({info.dtype}), expected plain floats"
            )


@check(
    "P13",
    "warning",
    effect="engines count the layers of every pass, so they may capture a tapped layer in another pass",
    fix=FIX_RUN_LEVEL,
    source="SGLang 0.5.23 spec_aux_hidden_state.py",
)
def target_does_not_loop(subject: Subject) -> Iterator[Problem]:
    """The target runs each of its layers once."""
    decoder, _ = decoder_config(subject.target_json, subject.path)
    loops = subject.target_json.get("num_loops", decoder.get("num_loops"))
    if is_int(loops) and loops > 1:
        yield Problem(f"target {CONFIG_FILE}:num_loops", f"{loops}: the target runs its layers more than once")


@check(
    "P14",
    "warning",
    effect="engines run the draft in the target's type, and DFlash activations overflow float16",
    fix="dflash serve-command {draft} --target {target} --engine vllm # sets bfloat16",
    source="vllm-project/vllm#55250, #55294",
    serve_flag=BFLOAT16,
)
def target_is_not_float16(subject: Subject) -> Iterator[Problem]:
    """The target is not served in float16."""
    if subject.target is not None and subject.target.dtype == "float16":
        yield Problem(f"target {CONFIG_FILE}:dtype", "float16, expected another type such as bfloat16")


@check(
    "P15",
    effect="readers look up ids past the end of the embedding; vocab_size must include the padding",
    fix="correct vocab_size in the target's config.json; dflash inspect {target} --tensors # lists the rows",
    source="NVIDIA/Model-Optimizer#1621",
)
def target_counts_its_rows(subject: Subject) -> Iterator[Problem]:
    """The target's embedding has vocab_size rows."""
    tensors = _target_tensors(subject)
    for name in EMBEDDINGS:
        info = tensors.get(name)
        if info is not None and subject.target is not None and info.shape[:1] != (subject.target.vocab_size,):
            yield Problem(
                f"target {info.file.name}:{name}",
                f"found {list(info.shape)}, the target's vocab_size is {subject.target.vocab_size}",
            )


@check(
    "P17",
    "info",
    effect="dflash checks this pair and prints commands to serve it, but cannot run it",
    fix="dflash serve-command {draft} --target {target} --engine vllm # then measure acceptance in the engine",
    source="dflash_runtime/checkpoint/targets/runs_here.py",
)
def target_can_be_run_here(subject: Subject) -> Iterator[Problem]:
    """dflash runs the target with its own code.

    The finding says how it runs otherwise, or why it is refused. `docs targets` lists families. Rules of an engine say
    whether that engine serves the target.
    """
    if subject.target_source is None:
        return
    answer = how_it_runs(subject.target_source)
    location = f"target {CONFIG_FILE}:model_type"
    unread = ", ".join(subject.target_source.facts.not_known)
    why = f"; dflash's own code does not read: {unread}" if unread else ""
    if answer.runtime is None:
        yield Problem(location, answer.words + why)
    elif not answer.is_fast:
        slowness = (
            "steps take longer than with dflash's own code"
            if answer.is_captured
            else "times do not show the pair's speed"
        )
        effect = f"acceptance is measured as usual, but {slowness}"
        fix = "dflash eval-acceptance {draft} --target {target} # then measure speed in the engine"
        yield Problem(location, f"runs {answer.words}{why}", effect=effect, fix=fix)


@check(
    "P18",
    "info",
    effect="generate and eval-acceptance refuse --tensor-parallel with this target",
    fix="dflash generate {draft} --target {target} # on one GPU",
    source="dflash_runtime/checkpoint/targets/rank_sizes.py",
)
def gpus_divide_the_target(subject: Subject) -> Iterator[Problem]:
    """The GPUs of --tensor-parallel divide a target that dflash runs with its own code.

    It is an error if no engine is named. dflash splits the target only, and each GPU has the whole draft.
    """
    source, size = subject.target_source, subject.plan.tensor_parallel
    if source is None or size == 1:
        return
    refusal = split_refusal(source, size)
    if refusal is not None:
        key = "model_type" if refusal.field == "tensor_parallel_size" else refusal.field
        severity: Severity = "info" if subject.plan.engines else "error"
        message = f"dflash refuses {size} GPUs: {refusal.message}"
        yield Problem(f"target {CONFIG_FILE}:{key}", message, severity=severity, outcome="serves")


def _misfits(subject: Subject, field: str, location: str) -> Iterator[Problem]:
    """A problem if one field of the draft does not fit the given target."""
    if subject.target is None:
        return
    expected = TargetExpectations(
        hidden_size=subject.stated.body.get("hidden_size"),
        target_hidden_size=subject.stated.value("target_hidden_size"),
        vocab_size=subject.stated.body.get("vocab_size"),
        mask_token_id=subject.stated.value("mask_token_id"),
        target_layer_ids=tuple(subject.stated.taps or ()),
        num_target_layers=subject.stated.value("num_target_layers"),
    )
    for misfit in find_misfits(expected, subject.target):
        if misfit.field == field:
            yield Problem(location, f"{misfit.found}, {misfit.target}")


def _target_tensors(subject: Subject) -> Mapping[str, TensorInfo]:
    """The tensors of the target; empty if its headers cannot be read, because the target may be a config alone."""
    try:
        return subject.target_checkpoint.tensors if subject.target_checkpoint is not None else {}
    except CheckpointError:
        return {}
