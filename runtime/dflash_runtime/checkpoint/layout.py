"""Which tensors a draft has, and their shapes, from its config alone. Needs no torch for DFlash drafts."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dflash_runtime.draft_config import DraftConfig, MarkovConfig
from dflash_runtime.errors import CheckpointError, TensorMismatch
from dflash_runtime.registry import Registry

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"

SINKS = "attention_sink_bias"
"""Attention sinks: a tensor of self_attn. Sources: vLLM 0.33.0 qwen3_dflash.py, SGLang 0.5.23 models/dflash.py."""

MARKOV = "markov_head"
CONFIDENCE = "confidence_head.proj"
"""Parts of DSpark. Source: speculators 0.9.0 models/dspark/model_definitions.py."""

CONVOLUTIONS = ("attention_conv", "mlp_conv")
SELECTOR = "candidate_selector"
"""Parts of DFlash 2. Source: z-lab/dflash 0.1.0 model.py."""

NOT_OWNED = re.compile(r"^(t2d|d2t|embed_tokens\.weight|lm_head\.weight|verifier_.*|.*rotary_emb\.inv_freq)$")
"""Tensors in a draft's file that the draft does not own: copies of the target's weights, and training leftovers."""

TARGET_LEFTOVERS = re.compile(r"^(lm_head\.weight|.*rotary_emb\.inv_freq)$")
"""Tensors in a target's file that readers may skip: a head tied to the embedding, and buffers."""

EXTRA_LAYER = re.compile(r"(.*\.)?(layers\.\d{1,9})\.")
EXTRA_SIGN = re.compile(r"(.*\.)?(layers\.\d{1,9})\.(eh_proj|enorm|hnorm)\.weight$")
"""A tensor that only a layer for further tokens has: its norms, or the product that joins its two inputs."""

EXTRA_PART = re.compile(r"(model\.)?(mtp|mtp_layers)\.")
"""Names of tensors of a part for further tokens."""

PREFIXES = ("model.", "dflash_module.", "draft_model.")
"""Prefixes that wrappers add to names. Sources: NVIDIA/Model-Optimizer hf_spec_export.py, SGLang models/dflash.py."""

ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Other names of two tensors. Sources: SGLang 0.5.23 models/dflash.py, vLLM 0.33.0 models/qwen3_dflash.py."""

CODEBOOK = re.compile(rf"({SELECTOR}\.(predecessor|successor)_codebook)\.weight$")
"""A codebook under the name that transformers gives it in memory. Files have it without `.weight`, as engines need."""

FUSED = {
    "self_attn.qkv_proj.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    "mlp.gate_up_proj.": ("mlp.gate_proj.", "mlp.up_proj."),
}
"""Fused projections of some files -> the projections they consist of, from the first row to the last."""

PACKED = re.compile(
    r"(.*[._])?(weight_packed|weight_zero_point|weight_shape|qweight|qzeros|scales|g_idx|weight_scale(_2|_inv)?"
    r"|input_scale|(weight|input)_global_scale|[qkv]_scale|absmax|quant_map|quant_state.*|SCB)$"
)
"""Names of tensors that only quantised checkpoints have.

Sources: exports of compressed-tensors, NVIDIA/Model-Optimizer, AutoGPTQ, AWQ and bitsandbytes.
"""

PACKED_DTYPES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I32"})
"""Element types that a matrix has only in a quantised checkpoint."""

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The stored tensor that holds a canonical tensor, and the rows [begin, end) of it, or None for all rows."""

    stored: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """Tensors of a file that a reader loads, because the draft owns them, and tensors that it skips."""

    load: tuple[str, ...]
    skip: tuple[str, ...]


LAYOUTS: Registry[Callable[[DraftConfig], dict[str, Shape]]] = Registry("draft family")
"""Draft family -> the function that lists its tensors, which every family but DFlash registers in `drafts/`."""


def owned_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Return every tensor that a draft owns, by canonical name, with its shape, as its family lists them.

    The layout of a family other than DFlash is in its file in `drafts/`, and importing these files loads torch.

    Raises:
        UnsupportedError: no file registers the family.
    """
    if config.family not in LAYOUTS:
        LAYOUTS.discover("dflash_runtime.drafts")
    return LAYOUTS[config.family](config)


def body_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Return `owned_shapes` without the head and id map of a reduced output vocabulary."""
    shapes = owned_shapes(config)
    if config.has_reduced_vocab:
        shapes.pop(DRAFT_TO_TARGET, None)
        if not config.has_own_width:
            shapes.pop(HEAD, None)
    return shapes


@LAYOUTS.register("dflash2")
@LAYOUTS.register("dspark")
@LAYOUTS.register("dflash")
def dflash_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Return every tensor of a DFlash draft: 3 tensors, and 11 per layer, or 15 per layer with attention biases.

    Attention sinks add one tensor per layer, and convolutions four. A selector adds three tensors. A draft of another
    width than its target has its own embedding and head. A reduced output vocabulary has a head and an id map.
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, config.num_taps * config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    if config.markov is not None:
        shapes |= _markov_shapes(config.markov, config)
    if config.has_confidence:
        token = config.markov.rank if config.markov is not None and config.confidence_reads_token else 0
        shapes |= {f"{CONFIDENCE}.weight": (1, hidden + token), f"{CONFIDENCE}.bias": (1,)}
    if config.selector is not None:
        codebook = (config.vocab_size, config.selector.rank)
        shapes |= {f"{SELECTOR}.predecessor_codebook": codebook, f"{SELECTOR}.successor_codebook": codebook}
        shapes[f"{SELECTOR}.hidden_projection.weight"] = (config.selector.rank, hidden)
    if config.has_own_width:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    if config.has_own_width or config.has_reduced_vocab:
        shapes[HEAD] = (config.draft_vocab_size, hidden)
    if config.has_reduced_vocab:
        shapes[DRAFT_TO_TARGET] = (config.draft_vocab_size,)
    return shapes


def canonical_name(stored: str) -> str:
    """Return a tensor's canonical name: without wrappers' prefixes, and with aliases replaced."""
    name = stored
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    if match := CODEBOOK.match(name):
        return match[1]
    alias = next((alias for alias in ALIASES if name.startswith(alias)), None)
    return name if alias is None else ALIASES[alias] + name.removeprefix(alias)


def find_stored_rows(config: DraftConfig, stored: Shapes, *, path: object = None) -> dict[str, StoredRows]:
    """Return where a file stores each canonical tensor. Names may have prefixes, and projections may be fused.

    Raises:
        CheckpointError: two stored tensors have one canonical name.
        TensorMismatch: the rows of a fused projection are not the sum of its parts' rows.
    """
    found: dict[str, StoredRows] = {}
    for name, shape in stored.items():
        for canonical, rows in _parts(config, canonical_name(name), shape, path):
            if canonical in found:
                names = (found[canonical].stored, name)
                raise CheckpointError(
                    f"{names[0]} and {names[1]} both stand for the tensor {canonical}",
                    id="tensor-stored-twice",
                    path=path,
                    field=canonical,
                    found=names,
                    expected="one stored tensor",
                    hint="export the draft again with each tensor once",
                )
            found[canonical] = StoredRows(name, rows)
    return found


def unapplied_tensors(names: Iterable[str], *, stored: Iterable[str], num_layers: int) -> list[str]:
    """Return the names, sorted, that readers of a target must not skip. `stored` has every name of the file.

    A head that is tied, buffers, and parts that only predict further tokens (MTP) may be skipped. Such a part is a
    layer after the decoder's, with any number.
    """
    extra = {match[2] for name in stored if (match := EXTRA_SIGN.match(name))}
    extra = {layer for layer in extra if int(layer.rpartition(".")[2]) >= num_layers}

    def is_skipped(name: str) -> bool:
        layer = EXTRA_LAYER.match(name)
        is_extra = layer is not None and layer[2] in extra
        return is_extra or bool(TARGET_LEFTOVERS.match(name) or EXTRA_PART.match(name))

    return sorted(name for name in names if not is_skipped(name))


def select_tensors(expected: Shapes, found: Shapes, *, path: object = None) -> TensorSelection:
    """Return which tensors of a file a reader loads, after comparing them with the `expected` tensors of the draft.

    Raises:
        TensorMismatch: lists every missing, unexpected and misshapen tensor at once.
    """
    missing, unexpected, wrong = compare_tensors(expected, found)
    if missing or unexpected or wrong:
        raise TensorMismatch(missing=missing, unexpected=unexpected, wrong=wrong, path=path)
    return TensorSelection(load=tuple(expected), skip=tuple(name for name in found if name not in expected))


def compare_tensors(expected: Shapes, found: Shapes) -> tuple[list[str], list[str], dict[str, tuple[str, str]]]:
    """Return missing names, unexpected names, and name -> (found shape, expected shape) of misshapen tensors."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not NOT_OWNED.match(name)]
    wrong = {
        name: (_show(found[name]), _show(shape))
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    }
    return missing, unexpected, wrong


def layer_indices(names: Iterable[str]) -> list[int]:
    """Return the layer numbers in tensor names, in ascending order."""
    return sorted({int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,9})\.", name))})


def _parts(config: DraftConfig, name: str, shape: Shape, path: object) -> list[tuple[str, tuple[int, int] | None]]:
    """Return the canonical tensors that a stored tensor holds, each with its rows, or None if it holds only one."""
    fused = next((key for key in FUSED if f".{key}" in name), None)
    if fused is None:
        return [(name, None)]
    heights = {
        "self_attn.q_proj.": config.num_heads * config.head_dim,
        "self_attn.k_proj.": config.num_kv_heads * config.head_dim,
        "self_attn.v_proj.": config.num_kv_heads * config.head_dim,
        "mlp.gate_proj.": config.intermediate_size,
        "mlp.up_proj.": config.intermediate_size,
    }
    wanted = [heights[part] for part in FUSED[fused]]
    if not shape or shape[0] != sum(wanted):
        expected = f"{' + '.join(map(str, wanted))} rows"
        raise TensorMismatch(wrong={name: (_show(shape), expected)}, path=path)
    parts: list[tuple[str, tuple[int, int] | None]] = []
    begin = 0
    for part, height in zip(FUSED[fused], wanted, strict=True):
        parts.append((name.replace(fused, part), (begin, begin + height)))
        begin += height
    return parts


def _layer_shapes(config: DraftConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        shapes |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
            "self_attn.o_proj.bias": (hidden,),
        }
    if config.has_sinks:
        shapes[f"self_attn.{SINKS}"] = (config.num_heads,)
    if config.convolution is not None:
        taps = config.convolution.kernel_size
        projected = 2 * taps * (hidden // config.convolution.group_size)
        for name in CONVOLUTIONS:
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (projected, hidden)
    return shapes


def _markov_shapes(markov: MarkovConfig, config: DraftConfig) -> dict[str, Shape]:
    hidden, rank = config.hidden_size, markov.rank
    shapes: dict[str, Shape] = {
        f"{MARKOV}.markov_w1.weight": (config.vocab_size, rank),
        f"{MARKOV}.markov_w2.weight": (config.draft_vocab_size, rank),
    }
    if markov.head_type == "gated":
        shapes |= {f"{MARKOV}.gate_proj.weight": (rank, hidden + rank), f"{MARKOV}.gate_proj.bias": (rank,)}
    if markov.head_type == "rnn":
        shapes |= {
            f"{MARKOV}.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            f"{MARKOV}.joint_proj.bias": (3 * rank,),
        }
    return shapes


def _show(shape: Iterable[int]) -> str:
    return str(list(shape))
