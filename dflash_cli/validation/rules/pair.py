"""Rules on a draft and the target it is given. Silent where no target is given."""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.checkpoints.references import TINY, TINY_TARGET_NAME
from dflash_cli.formats.dialect import named_architectures
from dflash_cli.validation.rule import BFLOAT16, FIX_COPY, FIX_OTHER_TARGET, FIX_RUN_LEVEL, Problem, check
from dflash_cli.validation.subject import CONFIG_FILE, Subject
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.checkpoint.hf_config import read_rope
from dflash_runtime.checkpoint.pair import TargetExpectations, find_misfits
from dflash_runtime.errors import CheckpointError, InvalidConfig
from dflash_runtime.json_values import as_object, is_int

TOKENIZER_CONFIG = "tokenizer_config.json"
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
SCALED_EMBEDDINGS = ("gemma", "muse", "minicpm", "granite")
PUBLISHED = {
    "qwen/qwen3-8b": ((16, (1, 9, 17, 25, 33)), (8, None)),
    "qwen/qwen3-4b": ((16, (1, 9, 17, 25, 33)),),
    "openai/gpt-oss-20b": ((8, (1, 6, 11, 16, 21)),),
    "qwen/qwen3.6-27b": ((16, (1, 16, 31, 46, 61)),),
    "qwen/qwen3.5-27b": ((16, (1, 16, 31, 46, 61)),),
}
"""Hub id of a target -> (block size, taps) of drafts published for it; taps None where they are not known."""


@check(
    "P01",
    effect="the draft borrows the target's embedding and head, which are of another width",
    fix=FIX_OTHER_TARGET,
    source="vllm-project/vllm#48113",
)
def widths_fit(subject: Subject) -> Iterator[Problem]:
    """The draft is as wide as the target."""
    yield from _misfits(subject, "target_hidden_size", subject.location("target_hidden_size"))
    yield from _misfits(subject, "hidden_size", subject.body_location("hidden_size"))


@check(
    "P02",
    effect="vLLM then maps ids through an empty map; nothing accepted has been reported",
    fix="state the target's vocab_size if only the padding differs, then dflash validate {draft} --target {target}",
    source="vllm-project/vllm#46435",
    outcome="drops",
    stops_runtime=True,
)
def vocabularies_fit(subject: Subject) -> Iterator[Problem]:
    """The draft states the target's vocab_size, padding included."""
    yield from _misfits(subject, "vocab_size", subject.body_location("vocab_size"))


@check(
    "P03",
    effect="SGLang refuses the id, vLLM reads past the embedding",
    fix=FIX_OTHER_TARGET,
    source="NVIDIA/Model-Optimizer#1621; SGLang 0.5.23 dflash_worker_v2.py",
)
def mask_has_a_row(subject: Subject) -> Iterator[Problem]:
    """The mask token has a row in the target's embedding."""
    location, value = subject.location("mask_token_id"), subject.stated("mask_token_id")
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
    effect="SGLang refuses a pair whose tokenizer names another mask token",
    fix=FIX_RUN_LEVEL,
    source="SGLang 0.5.23 dflash_worker_v2.py",
)
def tokenizer_names_the_mask(subject: Subject) -> Iterator[Problem]:
    """Where the target's tokenizer has a mask token, it is the draft's, and the draft's id is no ordinary token."""
    value = subject.stated("mask_token_id")
    tokenizer = _target_file(subject, TOKENIZER_CONFIG)
    if not is_int(value) or not tokenizer:
        return
    added = as_object(tokenizer.get("added_tokens_decoder"))
    named = tokenizer.get("mask_token")
    content = as_object(named).get("content", named)
    ids = [key for key, entry in added.items() if content and as_object(entry).get("content") == content]
    if ids and str(value) not in ids:
        yield Problem(subject.location("mask_token_id"), f"{value}, the tokenizer's mask token {content!r} is {ids[0]}")


@check(
    "P05",
    "warning",
    effect="right only if the draft was trained with it",
    fix=FIX_RUN_LEVEL,
    source="NVIDIA/Model-Optimizer hf_spec_export.py; Luce-Org/lucebox#447",
)
def rope_bases_fit(subject: Subject) -> Iterator[Problem]:
    """The draft's rope base is the target's; some drafts differ on purpose."""
    if subject.target is None:
        return
    try:
        theta = read_rope(subject.body, subject.path).theta
    except InvalidConfig:  # C22 and C23 report it
        return
    if theta != subject.target.rope.theta:
        yield Problem(subject.body_location("rope_theta"), f"{theta}, the target's is {subject.target.rope.theta}")


@check(
    "C25",
    "warning",
    effect="longer texts are cut short or drafted badly; vLLM raises it for plain rope only",
    fix="start the engine with a shorter context, as dflash serve-command {draft} --target {target} --engine vllm does",
    source="vllm-project/vllm#48894, #57941",
)
def positions_reach_as_far(subject: Subject) -> Iterator[Problem]:
    """The draft's positions reach as far as the target's."""
    stated = subject.body.get("max_position_embeddings")
    if subject.target is not None and is_int(stated) and stated < subject.target.max_position_embeddings:
        yield Problem(
            subject.body_location("max_position_embeddings"),
            f"{stated}, the target's is {subject.target.max_position_embeddings}",
        )


@check(
    "C11",
    effect="the draft was made for another target; SGLang only warns",
    fix=FIX_OTHER_TARGET,
    source="SGLang 0.5.23 spec_aux_hidden_state.py",
    outcome="drops",
    stops_runtime=True,
)
def target_depth_fits(subject: Subject) -> Iterator[Problem]:
    """num_target_layers is the target's depth."""
    location = next(iter(subject.homes("num_target_layers")), subject.location("num_target_layers"))
    yield from _misfits(subject, "num_target_layers", location)
    stated = subject.stated("num_target_layers")
    if stated is None and not subject.is_speculators:
        yield Problem(
            subject.location("num_target_layers"),
            "missing",
            effect="the z-lab reference and MLX stop",
            fix=FIX_COPY + " --target {target}",
            severity="warning",
            outcome="serves",
        )


@check(
    "P06",
    effect="engines stop, or never capture the layer",
    fix=FIX_OTHER_TARGET,
    source="charlie12345/ROCmFPX#44",
)
def taps_exist_in_the_target(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer exists in the target that is given."""
    yield from _misfits(subject, "target_layer_ids", subject.tap_location)


@check(
    "P08",
    "warning",
    effect="a draft accepts less with another target, even one of the same shape",
    fix=FIX_RUN_LEVEL,
    source="z-lab/dflash#149; AEON-7#6",
)
def verifier_is_the_target(subject: Subject) -> Iterator[Problem]:
    """The verifier that the draft names is the target that is given."""
    name = as_object(_verifier(subject)).get("name_or_path")
    reference = subject.target_reference
    if not isinstance(name, str) or not name or reference is None:
        return
    given = TINY_TARGET_NAME if reference == TINY else reference.partition("@")[0].rstrip("/")
    if given != name and given.rpartition("/")[2] != name.rpartition("/")[2]:
        yield Problem(
            subject.location("speculators_config.verifier.name_or_path"), f"trained for {name}, given {reference}"
        )


@check(
    "P16",
    "warning",
    effect="the draft was trained on the hidden states of another kind of model",
    fix=FIX_OTHER_TARGET,
    source="speculators 0.9.0 VerifierConfig",
)
def verifier_is_of_the_targets_kind(subject: Subject) -> Iterator[Problem]:
    """The verifier's architecture is the target's."""
    stated, given = named_architectures(_verifier(subject)), named_architectures(subject.target_json)
    if stated and given and not set(stated) & set(given):
        yield Problem(
            subject.location("speculators_config.verifier.architectures"),
            f"{', '.join(stated)}, the target is {', '.join(given)}",
        )


@check(
    "P09",
    "warning",
    effect="ids mean other text than in training: nearly nothing is accepted",
    fix=FIX_OTHER_TARGET,
    source="ggml-org/llama.cpp#25733",
)
def tokenizers_agree(subject: Subject) -> Iterator[Problem]:
    """A tokenizer that lies beside the draft is the target's.

    Compared by the special tokens of tokenizer_config.json, which differ between model families.
    """
    if "tokenizer_config.json" not in subject.files or subject.checkpoint is None:
        return
    ours, theirs = _tokens(_own_file(subject, TOKENIZER_CONFIG)), _tokens(_target_file(subject, TOKENIZER_CONFIG))
    for key in sorted(ours.keys() & theirs.keys(), key=str):
        if ours[key] != theirs[key]:
            yield Problem(
                f"{TOKENIZER_CONFIG}:added_tokens_decoder.{key}", f"{ours[key]!r}, the target's is {theirs[key]!r}"
            )
            return


@check(
    "P10",
    "warning",
    effect="the draft is fed the target's raw embedding; the target itself scales or norms it",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#41703; SGLang 0.5.23 models/dflash.py",
)
def embedding_scale_is_known(subject: Subject) -> Iterator[Problem]:
    """A draft for a target that scales its embedding says by how much it scales it."""
    kind = subject.target.model_type.lower() if subject.target is not None else ""
    if kind.startswith(SCALED_EMBEDDINGS) and subject.stated("input_embedding_scale") is None:
        yield Problem(subject.location("dflash_config.input_embedding_scale"), f"missing, with a {kind} target")


@check(
    "P11",
    "warning",
    effect="a draft borrows the head and computes plain products with it",
    fix="serve a target whose head is left unpacked; dflash inspect {target} --tensors",
    source="sgl-project/sglang#39362; sgl-project/SpecForge#473",
    outcome="stops",
)
def head_is_plain(subject: Subject) -> Iterator[Problem]:
    """The target's head and embedding, which the draft borrows, are not packed."""
    for name, info in _target_tensors(subject).items():
        is_borrowed = name.startswith(("lm_head.", "model.embed_tokens.", "model.language_model.embed_tokens."))
        if is_borrowed and info.dtype not in ("F16", "BF16", "F32", "F64"):
            yield Problem(f"target {info.file.name}:{name}", f"packed weights ({info.dtype})")


@check(
    "P12",
    "info",
    effect="none by itself; another block or other taps than usual are worth a second look",
    fix=FIX_RUN_LEVEL,
    source="configs of published drafts, 2026",
)
def settings_are_the_published_ones(subject: Subject) -> Iterator[Problem]:
    """Block and taps are those of drafts published for the same target."""
    reference = (subject.target_reference or "").partition("@")[0].lower()
    known = PUBLISHED.get(reference)
    if known is None or subject.taps is None or subject.block_size is None:
        return
    mine = (subject.block_size, tuple(subject.taps))
    if not any(block == mine[0] and taps in (None, mine[1]) for block, taps in known):
        stated = "; ".join(f"block {block}" + (f", taps {list(taps)}" if taps else "") for block, taps in known)
        yield Problem(subject.tap_location, f"block {mine[0]}, taps {list(mine[1])}; published: {stated}")


@check(
    "P13",
    "warning",
    effect="engines number layers by loop, so that a tap may mean another pass",
    fix=FIX_RUN_LEVEL,
    source="SGLang 0.5.23 spec_aux_hidden_state.py",
)
def target_does_not_loop(subject: Subject) -> Iterator[Problem]:
    """The target runs each of its layers once."""
    loops = subject.target_json.get("num_loops", as_object(subject.target_json.get("text_config")).get("num_loops"))
    if is_int(loops) and loops > 1:
        yield Problem(f"target {CONFIG_FILE}:num_loops", f"{loops}: layers are run more than once")


@check(
    "P14",
    "warning",
    effect="engines give the draft the target's type, and DFlash activations overflow float16",
    fix="start the engine with bfloat16: dflash serve-command {draft} --target {target} --engine vllm",
    source="vllm-project/vllm#55250, #55294",
    serve_flag=BFLOAT16,
)
def target_is_not_float16(subject: Subject) -> Iterator[Problem]:
    """The target is not served in float16."""
    if subject.target is not None and subject.target.dtype == "float16":
        yield Problem(f"target {CONFIG_FILE}:dtype", "float16")


@check(
    "P15",
    effect="ids past the embedding's end have no row; the padded size is the one that counts",
    fix="correct the target's vocab_size, then dflash inspect {target} --tensors",
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
                f"{list(info.shape)}, the target's vocab_size is {subject.target.vocab_size}",
            )


def _misfits(subject: Subject, field: str, location: str) -> Iterator[Problem]:
    """Where one field of the draft does not fit the target that is given."""
    if subject.target is None:
        return
    expected = TargetExpectations(
        hidden_size=subject.body.get("hidden_size"),
        target_hidden_size=subject.config.get("target_hidden_size"),
        vocab_size=subject.body.get("vocab_size"),
        mask_token_id=subject.stated("mask_token_id"),
        target_layer_ids=tuple(subject.taps or ()),
        num_target_layers=subject.stated("num_target_layers"),
    )
    for misfit in find_misfits(expected, subject.target):
        if misfit.field == field:
            yield Problem(location, f"{misfit.found}, {misfit.target}")


def _verifier(subject: Subject) -> Mapping[str, Any]:
    return as_object(as_object(subject.config.get("speculators_config")).get("verifier"))


def _target_tensors(subject: Subject) -> Mapping[str, TensorInfo]:
    """The target's headers, empty where they cannot be read: a target may be given by its config alone."""
    if subject.target_source is None:
        return {}
    try:
        return subject.target_source.checkpoint.tensors
    except CheckpointError:
        return {}


def _target_file(subject: Subject, name: str) -> Mapping[str, Any]:
    """A JSON file beside the target; empty where there is none that can be read."""
    if subject.target_source is None:
        return {}
    try:
        return subject.target_source.checkpoint.read_optional_json(name) or {}
    except CheckpointError:
        return {}


def _own_file(subject: Subject, name: str) -> Mapping[str, Any]:
    try:
        return (subject.checkpoint.read_optional_json(name) if subject.checkpoint is not None else None) or {}
    except CheckpointError:
        return {}


def _tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    entries = as_object(tokenizer.get("added_tokens_decoder"))
    return {key: as_object(entry).get("content") for key, entry in entries.items()}
