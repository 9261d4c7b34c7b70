"""Rules on the weights' headers: names, shapes, element types."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from dflash_cli.checkpoints.unpacking import states_known_packing, unpacked
from dflash_cli.formats.decoder_body import STORED_AS
from dflash_cli.formats.dialect import COMMON
from dflash_cli.rules.rule import FIX_COPY, FIX_INSPECT, FIX_REEXPORT, FIX_TO_COMMON, Problem, check
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint import layout
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.layout import (
    CODEBOOK,
    CONFIDENCE,
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    TARGET_TO_DRAFT,
    body_shapes,
    canonical_name,
    compare_tensors,
    layer_indices,
    owned_shapes,
)
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format, refuse_unless_fp8
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import CheckpointError, DFlashError
from dflash_runtime.json_values import is_int

PREFIXES = ("model.", "dflash_module.", "draft_model.", "encoder.")
ALIASES = tuple(layout.ALIASES)
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
SEVERAL_A_WORD = frozenset({"U8", "I32", "U32"})
"""Element types that may hold several packed numbers, so that a shape does not count numbers."""
HEAD_NORM = re.compile(r"self_attn\.[qk]_norm\.")
ATTENTION_BIAS = re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj\.bias$")
FUSED = re.compile(r".*\b(qkv_proj|gate_up_proj)\.")
EXPLAINED = (
    (r"(embed_tokens|lm_head)\.", "a draft borrows the target's"),
    (r"prefix_gru\.|embed_proj\.|logit_head\.", "part of a Domino head"),
    (r"markov_|confidence_", "part of a DSpark head"),
    (r".*(exp_avg|optimizer|step$)", "left over from training"),
    (r".*(weight_scale|weight_packed|weight_zero_point|input_scale)", "packed weights"),
    (r".*self_attn\.(attention_sink_bias|sinks)$", "attention sinks that the config does not state"),
    (r".*mlp\.(experts|shared_expert|gate)\.", "experts; a DFlash draft has none"),
    (r".*mask_(hidden|embedding)", "a learned mask embedding, which dflash does not apply"),
)


@check(
    "N01",
    effect="vLLM and SGLang load the other tensors and leave the missing ones at random values",
    fix=FIX_REEXPORT,
    source="vLLM 0.33.0 and SGLang 0.5.23 load_weights report no missing tensor",
    outcome="drops",
    stops_runtime=True,
)
def every_tensor_is_there(subject: Subject) -> Iterator[Problem]:
    """Every tensor that the config needs is present.

    A draft has 3 tensors, and 11 per layer. Attention biases add 4 per layer, and attention sinks add 1.
    """
    dims = _checked_sizes(subject)
    if dims is None or common_prefix(subject) is not None or fused_names(subject):
        return
    missing, _, _ = compare_tensors(body_shapes(dims), _shapes(subject))
    if missing:
        has_no_norms = all(HEAD_NORM.search(name) for name in missing)
        why = "; DFlash normalises queries and keys" if has_no_norms else ""
        yield Problem(WEIGHTS, f"missing: {_listed(missing)}{why}")


@check(
    "N02",
    effect="engines stop at the tensor, or ignore it although the draft was trained with it",
    fix="remove the tensor if it is a leftover, else use an engine made for such drafts; then dflash validate {draft}",
    source="jundot/omlx#1299; charlie12345/ROCmFPX#44",
    stops_runtime=True,
)
def no_tensor_is_unexpected(subject: Subject) -> Iterator[Problem]:
    """Every tensor belongs to a DFlash draft."""
    dims = _checked_sizes(subject)
    if dims is None or common_prefix(subject) is not None:
        return
    _, unexpected, _ = compare_tensors(owned_shapes(dims), _shapes(subject))
    stopping = _names_of(subject, WEIGHTS, ignoring=False)
    for name in subject.tensors or ():
        if name.startswith("verifier_") and stopping:
            yield Problem(f"{WEIGHTS}:{name}", "unexpected: left over from training", engines=stopping)
    beyond = [name for name in unexpected if any(index >= dims.num_layers for index in layer_indices([name]))]
    biases = [name for name in unexpected if ATTENTION_BIAS.match(name) and name not in beyond]
    for name in unexpected:
        if name in beyond or name in biases or FUSED.match(name):  # N06, N07 and N08 report these
            continue
        reason = next((text for pattern, text in EXPLAINED if re.match(pattern, name)), "")
        yield from extra_tensor(subject, Problem(f"{WEIGHTS}:{name}", f"unexpected{f': {reason}' if reason else ''}"))
    if not subject.format.keeps_head and not dims.has_reduced_vocab and not dims.has_own_width:
        for name in (HEAD, EMBEDDING):
            if name in (subject.tensors or {}):
                effect = "vLLM uses it if it differs from the target's, other engines ignore it"
                yield Problem(
                    f"{WEIGHTS}:{name}",
                    "a copy of the target's weights",
                    effect,
                    severity="warning",
                    outcome="serves",
                    fix=f"if it is an exact copy, drop it: {FIX_TO_COMMON}",
                )


@check(
    "N04",
    effect="loading stops at the wrong shape, in vLLM only at the first forward pass",
    fix="correct the sizes in config.json or export the draft again, then check it: dflash validate {draft}",
    source="vllm-project/vllm#48113, #42505, #42704",
)
def shapes_fit(subject: Subject) -> Iterator[Problem]:
    """Every tensor has the shape that the config gives it."""
    dims = _checked_sizes(subject)
    if dims is None:
        return
    expected = body_shapes(dims)
    if subject.stated.taps is None:
        del expected["fc.weight"]
    _, _, wrong = compare_tensors(expected, _shapes(subject))
    for name, (found, wanted) in wrong.items():
        why = f" = {dims.num_taps} tapped layers x {dims.feature_size}" if name == "fc.weight" else ""
        problem = Problem(f"{WEIGHTS}:{name}", f"found {found}, expected {wanted}{why}")
        loading = [engine.name for engine in subject.plan.engines if engine.loads_config(subject)]
        others = tuple(engine.name for engine in subject.plan.engines if engine.name not in loading)
        yield replace(problem, engines=others) if others else problem if not loading else _harmless(problem)


@check(
    "N05",
    effect="the first forward pass stops, because fc.weight does not fit the width of the target's features",
    fix="check the draft against the target it was trained for: dflash validate {draft} --target ORG/REPO",
    source="vllm-project/vllm#48113",
)
def features_fit_the_target(subject: Subject) -> Iterator[Problem]:
    """fc.weight has as many columns as the tapped layers have features together."""
    tensors = _plain_tensors(subject) or subject.tensors or {}
    info, taps = tensors.get("fc.weight"), subject.stated.taps
    if subject.target is None or info is None or taps is None or len(info.shape) != 2 or info.dtype in SEVERAL_A_WORD:
        return
    width = subject.target.hidden_size
    if info.shape[1] != len(taps) * width:
        yield Problem(
            f"{WEIGHTS}:fc.weight",
            f"reads {info.shape[1]}, expected {len(taps)} tapped layers x the target's {width} = {len(taps) * width}",
        )


@check(
    "N06",
    effect="engines ignore layers, or leave them at random values",
    fix="correct num_hidden_layers or export the draft again, then check it: dflash validate {draft}",
    source="vLLM 0.33.0 and SGLang 0.5.23 load_weights",
    outcome="drops",
    stops_runtime=True,
)
def layers_are_counted(subject: Subject) -> Iterator[Problem]:
    """The file holds the layers 0 to num_hidden_layers - 1."""
    count = subject.stated.body.get("num_hidden_layers")
    if subject.tensors is None or not is_int(count) or common_prefix(subject) is not None:
        return
    found = layer_indices(subject.tensors)
    if len(found) != 0 and (len(found) != count or found != list(range(len(found)))):
        problem = Problem(WEIGHTS, f"found the layers {_numbers(found)}, expected 0..{count - 1}")
        stopping = _names_of(subject, WEIGHTS, ignoring=False) if max(found) >= count else ()
        if stopping:
            yield replace(problem, engines=stopping, outcome="stops", effect="the engine does not know the layers")
        if not stopping or _names_of(subject, WEIGHTS, ignoring=True):
            yield replace(problem, engines=_names_of(subject, WEIGHTS, ignoring=True) or None)


@check(
    "N07",
    effect="readers ignore a bias that the config does not state",
    fix="set attention_bias as in training, then check it: dflash validate {draft}",
    source="z-lab/gpt-oss-20b-DFlash",
    outcome="drops",
    stops_runtime=True,
)
def biases_fit(subject: Subject) -> Iterator[Problem]:
    """Attention biases, including the bias of o_proj, are present exactly if attention_bias is true."""
    if subject.tensors is None:
        return
    biases = [name for name in subject.tensors if ATTENTION_BIAS.match(name)]
    if biases and subject.stated.body.get("attention_bias") is not True:
        yield Problem(f"{WEIGHTS}:{biases[0]}", f"found {len(biases)} biases, but attention_bias is not true")


@check(
    "N09",
    "warning",
    effect="loaders cast all weights to one type",
    fix=FIX_REEXPORT,
    source="InternLM/lmdeploy#4991; vllm-project/vllm#55250",
)
def one_element_type(subject: Subject) -> Iterator[Problem]:
    """All weights have the same element type, and it is not float16."""
    is_packed = _states_packing(subject)
    body = _body_tensors(subject).items()
    has_wide_vectors = bool(subject.format.vector_type_key)
    counts = Counter(
        info.dtype
        for name, info in body
        if not (is_packed and layout.PACKED.match(name)) and not (has_wide_vectors and len(info.shape) == 1)
    )
    if len(counts) > 1 and not is_packed:
        yield Problem(WEIGHTS, f"mixed element types: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}")
    if "F16" in counts:
        yield Problem(
            WEIGHTS,
            "float16 weights",
            effect="DFlash activations overflow float16, so almost no token is accepted",
            fix="export the draft in bfloat16, then check it: dflash validate {draft}",
            severity="error",
            outcome="drops",
        )


@check(
    "N10",
    "warning",
    effect="loaders that follow the config cast the weights to its dtype",
    fix=FIX_COPY,
    source="transformers from_pretrained dtype=auto",
)
def dtype_is_told_truly(subject: Subject) -> Iterator[Problem]:
    """The dtype in the config is the element type of the weights. N11 judges packed matrices."""
    stated = subject.stated.value("dtype")
    if any(len(info.shape) > 1 and info.dtype not in FLOATS for info in _body_tensors(subject).values()):
        return
    kinds = {info.dtype for info in _body_tensors(subject).values()} & FLOATS
    if isinstance(stated, str) and stated in STORED_AS and kinds and STORED_AS[stated] not in kinds:
        fix = "" if len(kinds) == 1 else "correct dtype in config.json, then check it: dflash validate {draft}"
        message = f"{stated}, but the weights are {'/'.join(sorted(kinds))}"
        yield Problem(subject.body_at("dtype"), message, fix=fix)


FIX_UNPACK = f"dflash convert {{draft}} {{out}} --to {COMMON} --target {{target}} --dequantize"
"""Writes the numbers that packed matrices stand for."""


@check(
    "N11",
    effect="readers take packed numbers for plain floats",
    fix=f"{FIX_INSPECT} # lists the element types; serve the draft with the engine it was packed for",
    source="nvidia Nemotron 3.5 NVFP4 draft; sgl-project/sglang#39087",
)
def weights_are_plain(subject: Subject) -> Iterator[Problem]:
    """Weights are plain floats, or quantization_config says how they are packed.

    dflash reads no packed weights but FP8. S32 and S42 say how named engines load them.
    """
    if subject.checkpoint is not None and subject.tensors and read_fp8_format(subject.checkpoint) is not None:
        try:
            refuse_unless_fp8(subject.checkpoint)
        except DFlashError as error:
            yield from _mild_for_loading(subject, Problem(WEIGHTS, error.message))
        return
    packed = sorted(
        {info.dtype for info in _body_tensors(subject).values() if info.dtype not in FLOATS and len(info.shape) > 1}
    )
    if _states_packing(subject):
        is_known = states_known_packing(subject.config)
        if is_known and subject.checkpoint is not None and subject.tensors:
            try:
                unpacked(subject.checkpoint)
            except CheckpointError as error:
                yield Problem(WEIGHTS, error.message.removeprefix(f"{error.path}: "))
            except DFlashError:
                is_known = False
        yield Problem(
            subject.at("quantization_config"),
            "quantised weights",
            effect="dflash cannot run the draft, and checks its packed weights only for engines that the user names",
            fix=FIX_UNPACK if is_known else "",
            severity="warning",
            outcome="serves",
        )
    elif packed and subject.format.one_file:
        yield Problem(
            WEIGHTS,
            f"quantised weights ({', '.join(packed)})",
            effect="dflash checks the shapes of the draft, and does not run it",
            fix=FIX_UNPACK,
            severity="info",
            outcome="serves",
        )
    elif packed:
        problem = Problem(WEIGHTS, f"packed weights ({', '.join(packed)}) without a quantization_config")
        yield from _mild_for_loading(subject, problem)


def _mild_for_loading(subject: Subject, problem: Problem) -> Iterator[Problem]:
    """A problem, as a warning for the named engines that load the draft. S42 lists the parts that they misread."""
    loading = tuple(engine.name for engine in subject.plan.engines if engine.loads_config(subject))
    others = tuple(engine.name for engine in subject.plan.engines if engine.name not in loading)
    if others or not loading:
        yield replace(problem, engines=others or None)
    if loading:
        yield replace(problem, engines=loading, severity="warning", outcome="serves")


def _states_packing(subject: Subject) -> bool:
    """Whether the draft says that its weights are quantised."""
    is_stated = bool(subject.stated.value("quantization_config")) or states_known_packing(subject.config)
    return is_stated or QUANTIZATION_FILE in subject.files


def _plain_tensors(subject: Subject) -> Mapping[str, TensorInfo] | None:
    """Every tensor with the shape that it stands for; None if a packed form or the headers are not known."""
    if subject.tensors is None or not _states_packing(subject):
        return subject.tensors
    if "plain tensors" not in subject.known:
        subject.known["plain tensors"] = None
        if subject.checkpoint is not None and states_known_packing(subject.config):
            with suppress(DFlashError):
                subject.known["plain tensors"] = unpacked(subject.checkpoint).tensors
    found: Mapping[str, TensorInfo] | None = subject.known["plain tensors"]
    return found


def _checked_sizes(subject: Subject) -> DraftConfig | None:
    """The sizes to check tensors by; None if they, the headers or a packed form are not known."""
    return None if _plain_tensors(subject) is None else subject.dims


def _shapes(subject: Subject) -> dict[str, tuple[int, ...]]:
    """Tensor name -> its shape; fc, hidden_norm and codebooks under their usual names."""
    return {
        canonical_name(name) if name.startswith(ALIASES) or CODEBOOK.match(name) else name: info.shape
        for name, info in (_plain_tensors(subject) or {}).items()
    }


def fused_names(subject: Subject) -> list[str]:
    """The names of fused projections."""
    return [name for name in subject.tensors or () if FUSED.match(name)]


def _body_tensors(subject: Subject) -> Mapping[str, TensorInfo]:
    """The draft's own tensors, without the id map, copies of the target's tensors, and a head in float32 by design."""
    skipped = {EMBEDDING, HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT}
    every = (subject.tensors or {}).items()
    return {name: info for name, info in every if name not in skipped and not name.startswith(CONFIDENCE)}


def extra_tensor(subject: Subject, problem: Problem) -> Iterator[Problem]:
    """The problem with a tensor that the model lacks: an error about named engines that stop, else a warning."""
    name = problem.location.removeprefix(f"{WEIGHTS}:")
    ignoring, stopping = _names_of(subject, name, ignoring=True), _names_of(subject, name, ignoring=False)
    if stopping or not ignoring:
        yield replace(problem, engines=stopping or None)
    if ignoring:
        effect = "the engine ignores the tensor; if the draft was trained with it, acceptance drops"
        yield replace(problem, engines=ignoring, severity="warning", outcome="serves", effect=effect)


def _harmless(problem: Problem) -> Problem:
    """The problem as a warning: the named engines take the sizes from other keys, and load the file."""
    return replace(problem, severity="warning", outcome="serves", effect="readers that follow every key stop at it")


def _names_of(subject: Subject, name: str, *, ignoring: bool) -> tuple[str, ...]:
    """The named engines that ignore a tensor that the config does not ask for, or the named engines that stop at it."""
    return tuple(item.name for item in subject.plan.engines if item.ignores_extra_tensor(name) is ignoring)


def common_prefix(subject: Subject) -> str | None:
    """The prefix of the names of all layer tensors."""
    names = [name for name in subject.tensors or () if "layers." in name]
    return next((prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names)), None)


def _listed(names: list[str], limit: int = 6) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _numbers(found: list[int], limit: int = 20) -> str:
    return str(found) if len(found) <= limit else f"[{', '.join(map(str, found[:limit]))}, ...]"
