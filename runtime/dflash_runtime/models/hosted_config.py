"""What transformers' own config objects say of a target that its modelling code is to run over our pages.

Unlike `checkpoint.hf_config` this fills in a class's defaults: the code that runs the model reads the same object.
Whatever our attention does not do is refused here by name, as far as a config tells; `models.hosted` holds the model
itself to it, once it is loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_runtime.checkpoint.hf_config import FULL, SLIDING, not_run, read_token_ids
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import OwnCache, RopeConfig, TargetConfig
from dflash_runtime.errors import CheckpointError, naming_file
from dflash_runtime.json_values import is_int, is_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REFUSED_KEYS = {
    "latent attention, whose KV are one vector for all heads": ("kv_lora_rank",),
    "chunked attention": ("attention_chunk_size",),
    "linear attention, whose state would keep rejected tokens": ("linear_num_value_heads", "linear_conv_kernel_dim"),
    "convolutions, whose state would keep rejected tokens": ("conv_L_cache", "full_attn_idxs"),
    "state-space layers, whose state would keep rejected tokens": (
        "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "hybrid_override_pattern",
    ),
    "attention to later tokens": ("use_bidirectional_attention",),
    "layers of other sizes than others": ("global_head_dim", "swa_head_dim"),
    "ALiBi": ("alibi",),
}  # fmt: skip
"""What our attention, or our pages, do not do -> the attributes of configs that say a model needs it."""

MAY_DIFFER = frozenset({"head_dim", "num_key_value_heads"})
"""What layers may have that others have otherwise."""

ONLY_IMAGES = "vision"
"""Of `use_bidirectional_attention`: tokens of images alone see later ones."""

NOT_A_CACHE = {"an encoder": "is_encoder_decoder", "attention to later tokens": "use_bidirectional_attention"}
"""What no cache of earlier tokens can do -> the attribute of configs that says a model needs it."""

NUM_STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")
"""What configs call the number of their residual streams: layers with several have no one output for a draft."""

POSITIONS_UNSTATED = 2**17
"""Positions of a target whose config knows no end of a text."""

A_FAMILY = "a native family (a file in dflash_runtime/models, see docs/explanation/architecture.md)"
"""What would run a target that nothing here runs."""

STATEFUL = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
"""Kinds of layers with a state."""

WITHOUT_ONE_FREQUENCY = ("dynamic", "longrope")
"""Rope types whose frequencies depend on how long the longest text of a call is."""

NORM_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def read_hosted_config(source: TargetSource) -> TargetConfig:
    """The target as the engine around transformers' code has to know it, from its config alone.

    Raises:
        UnsupportedError: transformers does not know it, or it needs what our attention and pages do not do.
        CheckpointError: transformers does not take the config.
    """
    path = source.checkpoint.config_path
    whole = _open_config(source)
    text = whole.get_text_config(decoder=True)
    if reasons := _differing(text) or tuple(_refusals(text)) or tuple(_odd_values(text)):
        raise not_run(text.model_type, reasons, path)
    with naming_file(path):
        return _to_target_config(source, whole, text)


def read_own_cache_config(source: TargetSource) -> TargetConfig:
    """The same of a target that keeps its own cache: nothing is asked of its attention, if it has any.

    Raises:
        UnsupportedError: transformers does not know it, it has an encoder, or rows see later ones.
        CheckpointError: transformers does not take the config.
    """
    path = source.checkpoint.config_path
    whole = _open_config(source)
    text = whole.get_text_config(decoder=True)
    reasons = [f"{words} ({key})" for words, key in NOT_A_CACHE.items() if getattr(text, key, None) in (True, "all")]
    reasons += _streams(text)
    if reasons:
        raise not_run(text.model_type, tuple(reasons), path)
    with naming_file(path):
        config = _to_target_config(source, whole, text)
    facts = source.facts  # of a depth that transformers counts by attentions, of which a layer may have two
    windows = (None,) * facts.num_layers
    return replace(
        config,
        own_cache=OwnCache(),
        num_layers=facts.num_layers,
        windows=windows,
        layer_kinds=facts.layer_kinds,
        other_kv_shapes={},
    )


def _to_target_config(source: TargetSource, whole: "PretrainedConfig", text: "PretrainedConfig") -> TargetConfig:
    heads = _count(text, "num_attention_heads", 1)
    (num_kv_heads, head_dim), *others = _kv_shapes(text, heads)
    epsilons = (getattr(text, name, None) for name in NORM_KEYS)
    windows = _windows(text)
    stops = (getattr(config, "eos_token_id", None) for config in (whole, text))
    return TargetConfig(
        model_type=text.model_type,
        hidden_size=_count(text, "hidden_size", source.facts.hidden_size),
        num_layers=_count(text, "num_hidden_layers", source.facts.num_layers),
        vocab_size=text.vocab_size,
        max_position_embeddings=_num_positions(text),
        rope=_rope(text),
        tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
        eos_token_ids=read_token_ids(next((stop for stop in stops if stop is not None), None)),
        dtype=source.facts.dtype,
        intermediate_size=_widest(text),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        other_kv_shapes={layer: shape for layer, shape in enumerate(others, 1) if shape != (num_kv_heads, head_dim)},
        rms_norm_eps=next((value for value in epsilons if is_number(value)), 1e-6),  # transformers' norms apply theirs
        windows=windows,
        layer_kinds=tuple("full" if window is None else "sliding" for window in windows),
    )


def _kv_shapes(text: "PretrainedConfig", heads: int) -> list[tuple[int, int]]:
    """KV heads and their size, of each layer."""
    is_mixed, count = getattr(text, "is_heterogeneous", False), _count(text, "num_hidden_layers", 1)
    layers: Any = text.per_layer_config if is_mixed else (text,) * count
    usual = max(1, _count(text, "hidden_size", 1) // heads)
    shapes = [(_count(layer, "num_key_value_heads", heads), _count(layer, "head_dim", usual)) for layer in layers]
    return [(kv_heads if heads % kv_heads == 0 else heads, size) for kv_heads, size in shapes]


def _open_config(source: TargetSource) -> "PretrainedConfig":
    """The config as transformers reads it, without any code of the checkpoint."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    stated, path = source.checkpoint.config, source.checkpoint.config_path
    kind = str(stated.get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        raise not_run(kind or source.facts.model_type, (_why_unknown(stated),), path)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise not_run(kind, ("transformers has no causal language model of this type",), path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source.checkpoint.path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # each class checks its fields in its own way
        raise CheckpointError(f"transformers does not take this config: {in_one_line(error)}", path=path) from error
    return config


def in_one_line(error: Exception) -> str:
    """What an error of another's code says first; where that ends in a colon, with the reason that follows it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no reason given"]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _why_unknown(stated: Mapping[str, Any]) -> str:
    from transformers import __version__

    known = f"transformers {__version__} does not know this type"
    if stated.get("auto_map"):
        known += (
            ", and code that a checkpoint brings (auto_map) is never run: trust_remote_code would let it do "
            "anything to this machine"
        )
    return f"{known}; a release of transformers that does would be needed, or {A_FAMILY}"


def _differing(text: "PretrainedConfig") -> tuple[str, ...]:
    """In what layers differ that our pages have alike; reading it as if it were of all layers would fail."""
    found = set(getattr(text, "per_layer_attributes", None) or ()) - MAY_DIFFER
    return (f"layers that differ in {', '.join(sorted(found))}",) if found else ()


def _refusals(text: "PretrainedConfig") -> Iterator[str]:
    """What the config asks for and is not done here, each in a few words."""
    missing = [name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
               if not is_int(getattr(text, name, None))]  # fmt: skip
    if missing:
        yield f"its config has no one {' and no one '.join(missing)}"
    if getattr(text, "is_encoder_decoder", False):
        yield "an encoder"
    yield from _streams(text)
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ())
    for kind in kinds:
        if kind in STATEFUL:
            yield f"layer_types {kind}, whose state would keep rejected tokens"
        elif kind not in (FULL, SLIDING):
            yield f"layer_types {kind}"
    for words, keys in REFUSED_KEYS.items():
        stated = next((key for key in keys if _is_stated(getattr(text, key, None))), None)
        if stated is not None:
            yield f"{words} ({stated})"
    for rope in _ropes(text):
        if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY:
            yield f"rope type {rope['rope_type']}, whose frequencies change with the length of the text"


def _odd_values(text: "PretrainedConfig") -> Iterator[str]:
    """Of a model whose layers all have the same sizes: values that are wider or narrower than its keys."""
    width = getattr(text, "v_head_dim", None)
    if width is not None and width != getattr(text, "head_dim", None):
        yield "values of another size than keys (v_head_dim)"


def _count(text: "PretrainedConfig", name: str, otherwise: int) -> int:
    """A number that is the same for all layers."""
    try:
        value: Any = getattr(text, name, None)
    except RuntimeError:  # transformers refuses to name one where layers differ
        return otherwise
    return value if is_int(value) and value > 0 else otherwise


def _num_positions(text: "PretrainedConfig") -> int:
    """Positions a text may have; those of a rope whose frequencies change with its length end before they do."""
    stated = _count(text, "max_position_embeddings", POSITIONS_UNSTATED)
    for rope in _ropes(text):
        if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY:
            first = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", 0)
            stated = min(stated, first or stated)
    return stated


def _is_stated(value: Any) -> bool:
    return value is not None and value is not False and value not in (0, ONLY_IMAGES)


def _ropes(text: "PretrainedConfig") -> tuple[Mapping[str, Any], ...]:
    """The rope of each kind of layer, that of full attention first."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = sorted((kind != FULL, kind) for kind, item in rope.items() if isinstance(item, dict))
    return tuple(rope[kind] for _, kind in nested) if nested else (rope,)


def _rope(text: "PretrainedConfig") -> RopeConfig:
    """For those who compare ropes; what is computed is transformers' own."""
    stated = dict(_ropes(text)[0])
    theta = stated.pop("rope_theta", None)
    kind = stated.pop("rope_type", None) or "default"
    return RopeConfig(theta=float(theta) if is_number(theta) else 10_000.0, kind=kind, params=stated)


def _streams(text: "PretrainedConfig") -> Iterator[str]:
    """Several residual streams, where the config says so."""
    for key in NUM_STREAMS:
        if _count(text, key, 1) > 1:
            yield f"{_count(text, key, 1)} residual streams, of which a draft could be given no one ({key})"


def _windows(text: "PretrainedConfig") -> tuple[int | None, ...]:
    """The window of each layer. Models without `layer_types` have one window, or none, in all of them."""
    window = getattr(text, "sliding_window", None)
    if not is_int(window) or getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text, "layer_types", None) or (SLIDING,) * text.num_hidden_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _widest(text: "PretrainedConfig") -> int:
    """Inner numbers of one row where a layer holds most: the dense width, or those of the experts it is sent to."""
    counts = (getattr(text, key, None) for key in ("num_experts_per_tok", "moe_top_k", "moe_k"))
    experts = next((count for count in counts if is_int(count)), 1)
    widths = (_count(text, name, 0) for name in ("intermediate_size", "moe_intermediate_size"))
    return experts * max(widths) or 4 * _count(text, "hidden_size", 1)
