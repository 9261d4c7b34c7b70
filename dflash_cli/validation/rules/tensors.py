"""Rules on the weights' headers: names, shapes, element types."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from dflash_cli.validation.rule import FIX_COPY, FIX_INSPECT, FIX_REEXPORT, Problem, check
from dflash_cli.validation.subject import Subject
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.checkpoint.layout import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    TARGET_TO_DRAFT,
    body_shapes,
    compare_tensors,
    layer_indices,
    owned_shapes,
)
from dflash_runtime.json_values import is_int

WEIGHTS = "model.safetensors"
PREFIXES = ("model.", "dflash_module.", "draft_model.", "encoder.")
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
FUSED = re.compile(r".*\b(qkv_proj|gate_up_proj)\.")
EXPLAINED = (
    (r"(embed_tokens|lm_head)\.", "the target's, which a draft borrows"),
    (r"prefix_gru\.|embed_proj\.|logit_head\.", "part of a Domino head"),
    (r"markov_|confidence_", "part of a DSpark head"),
    (r".*(exp_avg|optimizer|step$)", "left over from training"),
    (r".*(weight_scale|weight_packed|weight_zero_point|input_scale)", "packed weights"),
    (r".*mask_(hidden|embedding)", "a learned mask embedding, which this tool does not serve"),
)


@check(
    "N01",
    effect="vLLM and SGLang load the rest and keep random values there",
    fix=FIX_REEXPORT,
    source="vLLM 0.33.0 and SGLang 0.5.23 load_weights report no missing tensor",
    outcome="drops",
    stops_runtime=True,
)
def every_tensor_is_there(subject: Subject) -> Iterator[Problem]:
    """No tensor is missing: 3, and 11 a layer, 15 with attention bias."""
    if subject.dims is None or subject.tensors is None or _states_packing(subject):
        return
    if _prefix(subject) is not None or _fused(subject):
        return
    missing, _, _ = compare_tensors(body_shapes(subject.dims), _shapes(subject))
    if missing:
        yield Problem(WEIGHTS, f"missing: {_listed(missing)}")


@check(
    "N02",
    effect="engines stop at it, or leave out something the draft was trained with",
    fix=FIX_INSPECT,
    source="jundot/omlx#1299; charlie12345/ROCmFPX#44",
    stops_runtime=True,
)
def no_tensor_is_unexpected(subject: Subject) -> Iterator[Problem]:
    """No tensor that DFlash does not have."""
    if subject.dims is None or subject.tensors is None or _states_packing(subject) or _prefix(subject) is not None:
        return
    _, unexpected, _ = compare_tensors(owned_shapes(subject.dims), _shapes(subject))
    layers = subject.dims.num_layers
    beyond = [name for name in unexpected if any(index >= layers for index in layer_indices([name]))]
    biases = [name for name in unexpected if name.endswith(".bias") and name not in beyond]
    for name in unexpected:
        if name in beyond or name in biases or FUSED.match(name):  # N06, N07 and N08 report these
            continue
        reason = next((text for pattern, text in EXPLAINED if re.match(pattern, name)), "")
        yield Problem(f"{WEIGHTS}:{name}", f"unexpected{f': {reason}' if reason else ''}")
    if not subject.is_speculators and not subject.dims.has_reduced_vocab:
        for name in (HEAD, EMBEDDING):
            if name in subject.tensors:
                effect = "vLLM uses it where it differs from the target's, other engines ignore it"
                yield Problem(
                    f"{WEIGHTS}:{name}", "a copy of the target's weights", effect, severity="warning", outcome="serves"
                )


@check(
    "N03",
    effect="vLLM looks for model.model.* and stops",
    fix=FIX_COPY,
    source="NVIDIA-NeMo/Automodel serve_vllm.py; vLLM 0.33.0 qwen3_dflash.py",
)
def names_are_flat(subject: Subject) -> Iterator[Problem]:
    """Tensor names have no prefix: vLLM puts `model.` before every name."""
    prefix = _prefix(subject)
    if prefix is not None:
        yield Problem(WEIGHTS, f"names start with {prefix!r}")


@check(
    "N04",
    effect="loading stops at the shape, in vLLM only at the first forward",
    fix=FIX_INSPECT,
    source="vllm-project/vllm#48113, #42505, #42704",
)
def shapes_fit(subject: Subject) -> Iterator[Problem]:
    """Every shape follows from the config."""
    if subject.dims is None or subject.tensors is None or _states_packing(subject):
        return
    expected = body_shapes(subject.dims)
    if subject.taps is None:
        del expected["fc.weight"]
    _, _, wrong = compare_tensors(expected, _shapes(subject))
    for name, (found, wanted) in wrong.items():
        dims = subject.dims
        why = f" = {dims.num_taps} taps x {dims.feature_size}" if name == "fc.weight" else ""
        yield Problem(f"{WEIGHTS}:{name}", f"{found}, expected {wanted}{why}")


@check(
    "N05",
    effect="the first forward stops: the target's features have another width than fc reads",
    fix="name the target it was made for: dflash validate {draft} --target OTHER_TARGET",
    source="vllm-project/vllm#48113",
)
def features_fit_the_target(subject: Subject) -> Iterator[Problem]:
    """fc reads one target width for each tap."""
    info, taps = (subject.tensors or {}).get("fc.weight"), subject.taps
    if subject.target is None or info is None or taps is None or len(info.shape) != 2:
        return
    width = subject.target.hidden_size
    if info.shape[1] != len(taps) * width:
        yield Problem(
            f"{WEIGHTS}:fc.weight",
            f"reads {info.shape[1]} values, expected {len(taps)} taps x the target's {width} = {len(taps) * width}",
        )


@check(
    "N06",
    effect="layers are left out, or keep random values",
    fix=FIX_INSPECT,
    source="vLLM 0.33.0 and SGLang 0.5.23 load_weights",
    outcome="drops",
    stops_runtime=True,
)
def layers_are_counted(subject: Subject) -> Iterator[Problem]:
    """The layers in the file are 0 to num_hidden_layers - 1."""
    count = subject.body.get("num_hidden_layers")
    if subject.tensors is None or not is_int(count) or _prefix(subject) is not None:
        return
    found = layer_indices(subject.tensors)
    if len(found) != 0 and (len(found) != count or found != list(range(len(found)))):
        yield Problem(WEIGHTS, f"has the layers {_numbers(found)}, expected 0..{count - 1}")


@check(
    "N07",
    effect="a bias that the config does not call for is left out",
    fix="set attention_bias to what the draft was trained with, then dflash validate {draft}",
    source="z-lab/gpt-oss-20b-DFlash",
    outcome="drops",
    stops_runtime=True,
)
def biases_fit(subject: Subject) -> Iterator[Problem]:
    """Biases are there exactly where attention_bias says so, o_proj included."""
    if subject.tensors is None:
        return
    pattern = re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj\.bias$")
    biases = [name for name in subject.tensors if pattern.match(name)]
    if biases and subject.body.get("attention_bias") is not True:
        yield Problem(f"{WEIGHTS}:{biases[0]}", f"{len(biases)} biases, but attention_bias is not true")


@check(
    "N08",
    effect="readers that look for q_proj, k_proj, v_proj, gate_proj and up_proj find none of them",
    fix=FIX_COPY,
    source="poolside Laguna drafts; vLLM keeps weights so in memory",
)
def projections_are_apart(subject: Subject) -> Iterator[Problem]:
    """Projections are stored one by one, as every dialect of DFlash has them."""
    names = _fused(subject)
    if names:
        yield Problem(f"{WEIGHTS}:{names[0]}", f"{len(names)} fused projections")


@check(
    "N09",
    "warning",
    effect="loaders cast all of them to one type",
    fix=FIX_REEXPORT,
    source="InternLM/lmdeploy#4991; vllm-project/vllm#55250",
)
def one_element_type(subject: Subject) -> Iterator[Problem]:
    """Weights have one element type, and not float16."""
    counts = Counter(info.dtype for info in _body_tensors(subject).values())
    if len(counts) > 1 and not _states_packing(subject):
        yield Problem(WEIGHTS, f"mixed element types: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}")
    if "F16" in counts:
        yield Problem(
            WEIGHTS,
            "float16 weights",
            effect="DFlash activations overflow float16: nearly nothing is accepted",
            fix="export in bfloat16, then dflash validate {draft}",
            severity="error",
            outcome="drops",
        )


@check(
    "N10",
    "warning",
    effect="loaders that trust the config cast the weights",
    fix=FIX_COPY,
    source="transformers from_pretrained dtype=auto",
)
def dtype_is_told_truly(subject: Subject) -> Iterator[Problem]:
    """The config's dtype is that of the weights."""
    stated = subject.body.get("dtype") or subject.body.get("torch_dtype") or subject.config.get("dtype")
    kinds = {info.dtype for info in _body_tensors(subject).values()} & FLOATS
    if isinstance(stated, str) and stated in STORED_AS and kinds and STORED_AS[stated] not in kinds:
        yield Problem(subject.body_location("dtype"), f"{stated}, but the weights are {'/'.join(sorted(kinds))}")


@check(
    "N11",
    effect="readers take packed numbers for plain ones",
    fix="serve it with the engine it was packed for; dflash inspect {draft} --tensors",
    source="nvidia Nemotron 3.5 NVFP4 draft; sgl-project/sglang#39087",
)
def weights_are_plain(subject: Subject) -> Iterator[Problem]:
    """Weights are plain floats; packed ones need a quantization_config and are not read here."""
    packed = sorted(
        {info.dtype for info in _body_tensors(subject).values() if info.dtype not in FLOATS and len(info.shape) > 1}
    )
    if _states_packing(subject):
        yield Problem(
            subject.location("quantization_config"),
            "quantised weights",
            effect="names and shapes are the packer's own: they are not judged here, and this tool does not run them",
            severity="warning",
            outcome="serves",
        )
    elif packed:
        yield Problem(WEIGHTS, f"packed weights ({', '.join(packed)}) without a quantization_config")


@check(
    "N15",
    "warning",
    effect="vLLM and SGLang use it; readers that take the mask token's own row draft worse",
    fix="serve it with vLLM or SGLang: dflash serve-command {draft} --target {target} --engine vllm",
    source="vllm-project/vllm#46104; XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash",
)
def no_mask_embedding(subject: Subject) -> Iterator[Problem]:
    """No learned mask embedding beside the weights, which most readers ignore."""
    for name in ("mask_embedding.pt", "mask_embedding.safetensors"):
        if name in subject.files:
            kind = " in a pickle file" if name.endswith(".pt") else ""
            yield Problem(name, f"a learned mask embedding{kind}")


def _states_packing(subject: Subject) -> bool:
    """Whether the config says that weights are quantised; their tensors are then the packer's business."""
    return bool(subject.config.get("quantization_config") or subject.body.get("quantization_config"))


def _shapes(subject: Subject) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in (subject.tensors or {}).items()}


def _fused(subject: Subject) -> list[str]:
    return [name for name in subject.tensors or () if FUSED.match(name)]


def _body_tensors(subject: Subject) -> Mapping[str, TensorInfo]:
    """The tensors that are the draft's own: no map, and no copy of the target's."""
    skipped = {EMBEDDING, HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT}
    return {name: info for name, info in (subject.tensors or {}).items() if name not in skipped}


def _prefix(subject: Subject) -> str | None:
    """A prefix that every layer's name has."""
    names = [name for name in subject.tensors or () if "layers." in name]
    return next((prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names)), None)


def _listed(names: list[str], limit: int = 6) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _numbers(found: list[int], limit: int = 20) -> str:
    return str(found) if len(found) <= limit else f"[{', '.join(map(str, found[:limit]))}, ...]"
