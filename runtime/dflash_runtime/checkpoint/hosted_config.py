"""Read a target's config with transformers' own config classes, for targets that transformers' code runs.

Unlike `checkpoint.hf_config`, this reading includes the class's defaults: the code that runs the model reads the same
object. It refuses every model that our attention or pages cannot serve, as far as the config tells. After loading,
`models.hosted` checks the model itself.
"""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dflash_runtime.checkpoint.hf_config import FULL, SLIDING, not_run, read_token_ids
from dflash_runtime.checkpoint.layer_kinds import LISTS
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.target_facts import decoder_config
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.errors import CheckpointError, naming_file
from dflash_runtime.json_values import as_object, is_int, is_number
from dflash_runtime.target_config import OwnCache, TargetConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    DecoderConfig: TypeAlias = "PretrainedConfig | RecordedConfig"

REFUSED_KEYS = {
    "attention to tokens that an index chooses": ("index_topk",),
    "chunked attention": ("attention_chunk_size",),
    "linear attention, with a state that would keep rejected tokens": (
        "linear_num_value_heads", "linear_conv_kernel_dim",
    ),
    "convolutions, with a state that would keep rejected tokens": ("conv_L_cache", "full_attn_idxs"),
    "state-space layers, with a state that would keep rejected tokens": (
        "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "hybrid_override_pattern",
    ),
    "attention to later tokens": ("use_bidirectional_attention",),
    "layers of different sizes": ("global_head_dim", "swa_head_dim"),
    "ALiBi": ("alibi",),
}  # fmt: skip
"""Features that our attention or pages do not support -> the config attributes that state them."""

MAY_DIFFER = frozenset({"head_dim", "num_key_value_heads"})
"""Attributes that may differ between layers."""

ONLY_IMAGES = "vision"
"""Value of `use_bidirectional_attention` with which only tokens of images attend to later tokens."""

NOT_A_CACHE = {"an encoder": "is_encoder_decoder", "attention to later tokens": "use_bidirectional_attention"}
"""Features that rule out a cache of earlier tokens -> the config attributes that state them."""

MEAN_OF_STREAMS = "hc_mult"
"""Key for a number of residual streams. A draft reads their mean. Source: the taps of DeepSeek-V4 and GLM-5.3-Flash in
vLLM and SGLang."""

NUM_STREAMS = ("hc_count", "altup_num_inputs")
"""Keys for the number of residual streams of families in which no engine taps layers for a draft."""

NOT_COMPUTED = {
    "attention over the outputs of earlier blocks of layers": "attn_res_block_size",
    "experts of another width than the residual stream": "routed_expert_hidden_size",
    "a gate on the output of latent attention": "mla_use_output_gate",
}
"""Features that no class of the recorded release of transformers computes -> their keys. Source: Kimi-K3."""

POSITIONS_UNSTATED = 2**17
"""Positions of a target if its config states no limit."""

A_FAMILY = "a native family (a file in dflash_runtime/models, see docs/explanation/architecture.md)"
"""The addition that would run an unsupported target."""

STATEFUL = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
"""Kinds of layers with a recurrent state."""

WITHOUT_ONE_FREQUENCY = ("dynamic", "longrope")
"""Rope types with frequencies that depend on the longest text in a call."""

COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""Numbers that a decoder over our pages must state once for all layers."""

DECIDING_KEYS = (
    *dict.fromkeys(key for keys in REFUSED_KEYS.values() for key in keys), *NUM_STREAMS, *NOT_COMPUTED.values(),
    MEAN_OF_STREAMS, "is_encoder_decoder", "v_head_dim", "head_dim", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "num_layers",
)  # fmt: skip
"""Attributes by which a decoder is refused, beside its kinds of layers and its ropes."""

NORM_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def read_hosted_config(source: TargetSource) -> TargetConfig:
    """Return the config of a target that transformers' code runs over our pages, from its config alone.

    Raises:
        UnsupportedError: transformers does not know the model type, or our attention and pages cannot serve it.
        CheckpointError: transformers does not accept the config.
    """
    path = source.checkpoint.config_path
    whole = _open_config(source)
    text = whole.get_text_config(decoder=True)
    refuse_pages(text, path)
    with naming_file(path):
        return _to_target_config(source, whole, text)


def read_own_cache_config(source: TargetSource) -> TargetConfig:
    """Return the config of a target that keeps its own cache. Its attention may be of any kind, or absent.

    Raises:
        UnsupportedError: transformers does not know the model type, or it has an encoder, or rows attend to later ones.
        CheckpointError: transformers does not accept the config.
    """
    path = source.checkpoint.config_path
    whole = _open_config(source)
    text = whole.get_text_config(decoder=True)
    refuse_cache(text, path)
    with naming_file(path):
        config = _to_target_config(source, whole, text)
    facts = source.facts  # transformers may count two attentions of one layer as two layers
    windows = (None,) * facts.num_layers
    return replace(
        config,
        own_cache=OwnCache(),
        num_layers=facts.num_layers,
        windows=windows,
        layer_kinds=facts.layer_kinds,
        other_kv_shapes={},
    )


def open_decoder(source: TargetSource) -> "PretrainedConfig":
    """Read a target's decoder config with transformers; raises the errors of `read_own_cache_config`."""
    return _open_config(source).get_text_config(decoder=True)


def refuse_pages(text: "DecoderConfig", path: Path) -> None:
    """Refuse a decoder that our attention or pages cannot serve, as far as its config tells.

    Raises:
        UnsupportedError: names each feature.
    """
    if reasons := _differing(text) or tuple(_refusals(text)) or tuple(_odd_values(text)):
        raise not_run(text.model_type, *reasons, path=path)


def refuse_cache(text: "DecoderConfig", path: Path) -> None:
    """Refuse a decoder for which no cache can replace the earlier tokens.

    Raises:
        UnsupportedError: names each feature.
    """
    reasons = [f"{words} ({key})" for words, key in NOT_A_CACHE.items() if getattr(text, key, None) in (True, "all")]
    reasons += (*_streams(text), *_not_computed(text))
    if reasons:
        raise not_run(text.model_type, *reasons, path=path)


def refuse_type(source: TargetSource, known: Container[str], runnable: Container[str], release: str) -> None:
    """Refuse a model type that a release of transformers does not run. `known` and `runnable` are its model types.

    Raises:
        UnsupportedError: the release does not know the type, or lacks a causal language model of the type.
    """
    stated, path = source.checkpoint.config, source.checkpoint.config_path
    kind = str(stated.get("model_type", ""))
    if kind not in known:
        why = _why_unknown(source, release)
        raise not_run(kind or source.facts.model_type, why, id="target-unknown-to-transformers", path=path)
    if kind not in runnable:
        why = "transformers does not have a causal language model of this type"
        raise not_run(kind, why, id="target-without-causal-model", path=path)


class RecordedConfig:
    """A decoder's config as transformers would read it: stated keys, else the recorded defaults of its class.

    It has the attributes that decide how a target runs.
    """

    def __init__(self, model_type: str, stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self._stated = stated
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        for key in (name, self._defaults.get("names", {}).get(name)):
            if key in self._stated:
                return self._stated[key]
        is_count = name in COUNTS and name not in self._defaults.get("lacks", ())
        return 1 if is_count else self._defaults.get(name)

    @property
    def layer_types(self) -> list[str]:
        """The kinds of layers, stated or of the class."""
        stated = next((self._stated[key] for key in LISTS if isinstance(self._stated.get(key), list)), None)
        return list(self._defaults.get("layer_types", ()) if stated is None else stated)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The rope in the spelling of transformers 5, which prefers the older key if both are stated."""
        stated = as_object(self._stated.get("rope_scaling")) or as_object(self._stated.get("rope_parameters"))
        if not stated:
            return {"rope_type": next(iter(self._defaults.get("rope_kinds", ())), "default")}
        return {"rope_type": stated.get("type"), **stated}

    @property
    def per_layer_attributes(self) -> set[str]:
        """Attributes that differ between layers."""
        layers = as_object(self._stated.get("per_layer_config")).values()
        return {key for layer in layers for key in as_object(layer)} | {*self._defaults.get("per_layer_attributes", ())}


@cache
def recorded_types() -> Mapping[str, Any]:
    """Return the table of `scripts/transformers_types.py`."""
    found: dict[str, Any] = json.loads((Path(__file__).with_name("transformers_types.json")).read_text("utf-8"))
    return found


def read_recorded(source: TargetSource) -> RecordedConfig:
    """Return a target's decoder config from the recorded defaults of transformers. Imports neither it nor torch.

    Raises:
        UnsupportedError: the recorded release does not run the model type.
        InvalidConfig: the key of the decoder's config does not hold an object.
    """
    types, checkpoint = recorded_types(), source.checkpoint
    decoders: Mapping[str, str] = types["decoders"]
    refuse_type(source, types["known"], decoders, types["transformers"])
    text, _ = decoder_config(checkpoint.config, checkpoint.config_path)
    usual = decoders[str(checkpoint.config["model_type"])]
    kind = str(text.get("model_type") or usual) if text is not checkpoint.config else usual
    texts: Mapping[str, Any] = types["texts"]
    return RecordedConfig(kind, text, texts.get(kind) or texts.get(usual) or {})


def rope_kinds(text: "DecoderConfig") -> set[str]:
    """Return the rope types of a decoder, if their frequencies depend on the longest text in a call."""
    return {rope["rope_type"] for rope in _ropes(text) if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY}


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
        rms_norm_eps=next((value for value in epsilons if is_number(value)), 1e-6),  # transformers' norms use their own
        windows=windows,
        layer_kinds=tuple("full" if window is None else "sliding" for window in windows),
    )


def _kv_shapes(text: "PretrainedConfig", heads: int) -> list[tuple[int, int]]:
    """Return the number of KV heads and the head size of each layer."""
    is_mixed, count = getattr(text, "is_heterogeneous", False), _count(text, "num_hidden_layers", 1)
    layers: Any = text.per_layer_config if is_mixed else (text,) * count
    usual = max(1, _count(text, "hidden_size", 1) // heads)
    latent = _latent_size(text)
    if latent is not None:
        return [(heads, latent)] * count
    shapes = [(_count(layer, "num_key_value_heads", heads), _count(layer, "head_dim", usual)) for layer in layers]
    return [(kv_heads if heads % kv_heads == 0 else heads, size) for kv_heads, size in shapes]


def _latent_size(text: "DecoderConfig") -> int | None:
    """Return the size of a head's keys after latent attention has made keys and values for every head.

    Rope rotates only the second part of a key. None for other attention.
    """
    if not _count(text, "kv_lora_rank", 0):
        return None
    return _count(text, "qk_nope_head_dim", 0) + _count(text, "qk_rope_head_dim", 0)


def _open_config(source: TargetSource) -> "PretrainedConfig":
    """Read a target's config with transformers, without running code of the checkpoint."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    runnable = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    refuse_type(source, CONFIG_MAPPING, runnable, __version__)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source.checkpoint.path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # each config class raises its own types
        raise CheckpointError(
            f"transformers does not accept this config: {in_one_line(error)}",
            id="config-refused-by-transformers",
            path=source.checkpoint.config_path,
            found=in_one_line(error),
            hint="correct config.json, or download the checkpoint again",
        ) from error
    return config


def in_one_line(error: Exception) -> str:
    """Return the first line of an error of other code, and its second line if the first ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no reason given"]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _why_unknown(source: TargetSource, release: str) -> str:
    stated = source.checkpoint.config
    known = f"transformers {release} does not know this type"
    text, _ = decoder_config(stated, source.checkpoint.config_path)
    features = tuple(_not_computed(RecordedConfig(str(text.get("model_type", "")), text, {})))
    if features:
        known += f", and none of its classes has {', '.join(features)}"
    if stated.get("auto_map"):
        known += (
            ", and dflash never runs code from a checkpoint (auto_map): trust_remote_code would let it do anything "
            "to this machine"
        )
    return f"{known}; it needs a newer release of transformers, or {A_FAMILY}"


def _differing(text: "DecoderConfig") -> tuple[str, ...]:
    """Name the attributes that differ between layers and that our pages need alike."""
    found = set(getattr(text, "per_layer_attributes", None) or ()) - MAY_DIFFER
    return (f"layers that differ in {', '.join(sorted(found))}",) if found else ()


def _refusals(text: "DecoderConfig") -> Iterator[str]:
    """Name each feature that the config states and that our attention or pages do not support."""
    missing = [name for name in COUNTS if not is_int(_value(text, name))]
    if missing:
        yield f"its config does not state one value for {' and '.join(missing)}"
    if getattr(text, "is_encoder_decoder", False):
        yield "an encoder"
    yield from _streams(text)
    yield from _not_computed(text)
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ())
    for kind in kinds:
        if kind in STATEFUL:
            yield f"layer_types {kind}, with a state that would keep rejected tokens"
        elif kind not in (FULL, SLIDING):
            yield f"layer_types {kind}"
    for words, keys in REFUSED_KEYS.items():
        stated = next((key for key in keys if _is_stated(_value(text, key))), None)
        if stated is not None:
            yield f"{words} ({stated})"
    for rope in _ropes(text):
        if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY:
            yield f"rope type {rope['rope_type']}, with frequencies that change with the length of the text"


def _odd_values(text: "DecoderConfig") -> Iterator[str]:
    """Name values of another size than keys, and odd sizes, in a model with equal layers.

    Latent attention may have smaller values.
    """
    latent = _latent_size(text)
    usual = _count(text, "hidden_size", 1) // _count(text, "num_attention_heads", 1)
    size = latent or _count(text, "head_dim", usual)
    if size % 2:
        yield f"an odd head size ({size})"
    width = _value(text, "v_head_dim")
    if latent is not None and _count(text, "v_head_dim", 0) > latent:
        yield "values larger than keys (v_head_dim)"
    elif latent is not None and _count(text, "num_layers", 0):
        yield "several attentions in one layer (num_layers)"
    elif latent is None and width is not None and width != _value(text, "head_dim"):
        yield "values of another size than keys (v_head_dim)"


def _count(text: "DecoderConfig", name: str, otherwise: int) -> int:
    """Return a positive number that is the same for all layers, or else `otherwise`."""
    value = _value(text, name)
    return value if is_int(value) and value > 0 else otherwise


def _value(text: "DecoderConfig", name: str) -> Any:
    """Return an attribute; None if it is absent, or if layers differ in it."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers raises this if layers differ
        return None


def _num_positions(text: "PretrainedConfig") -> int:
    """Return how many positions a text may have. A rope's frequencies must not change within them."""
    stated = _count(text, "max_position_embeddings", POSITIONS_UNSTATED)
    for rope in _ropes(text):
        if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY:
            first = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", 0)
            stated = min(stated, first or stated)
    return stated


def _is_stated(value: Any) -> bool:
    return value is not None and value is not False and value not in (0, ONLY_IMAGES)


def _ropes(text: "DecoderConfig") -> tuple[Mapping[str, Any], ...]:
    """Return the rope of each kind of layer, with full attention first."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = sorted((kind != FULL, kind) for kind, item in rope.items() if isinstance(item, dict))
    return tuple(rope[kind] for _, kind in nested) if nested else (rope,)


def _rope(text: "PretrainedConfig") -> RopeConfig:
    """Return the rope for comparisons. transformers' code computes with its own."""
    stated = dict(_ropes(text)[0])
    theta = stated.pop("rope_theta", None)
    kind = stated.pop("rope_type", None) or "default"
    return RopeConfig(theta=float(theta) if is_number(theta) else 10_000.0, kind=kind, params=stated)


def num_streams(text: "DecoderConfig") -> int:
    """Return the number of residual streams. A draft reads their mean."""
    return _count(text, MEAN_OF_STREAMS, 1)


def _streams(text: "DecoderConfig") -> Iterator[str]:
    """Name several residual streams if the config states them, and nobody says how a draft reads them."""
    for key in NUM_STREAMS:
        if _count(text, key, 1) > 1:
            yield (
                f"{_count(text, key, 1)} residual streams, while a draft reads one, and no engine's code for this "
                f"family says which ({key})"
            )


def _not_computed(text: "DecoderConfig") -> Iterator[str]:
    """Name features that no class of transformers computes."""
    for words, key in NOT_COMPUTED.items():
        if _is_stated(_value(text, key)):
            yield f"{words} ({key} {_value(text, key)})"


def _windows(text: "PretrainedConfig") -> tuple[int | None, ...]:
    """Return the window of each layer. Without `layer_types`, a stated window applies to every layer."""
    window = getattr(text, "sliding_window", None)
    if not is_int(window) or getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text, "layer_types", None) or (SLIDING,) * text.num_hidden_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _widest(text: "PretrainedConfig") -> int:
    """Return the most inner numbers of one row in a layer: the dense width, or the width of all its chosen experts."""
    counts = (getattr(text, key, None) for key in ("num_experts_per_tok", "moe_top_k", "moe_k"))
    experts = next((count for count in counts if is_int(count)), 1)
    widths = (_count(text, name, 0) for name in ("intermediate_size", "moe_intermediate_size"))
    return experts * max(widths) or 4 * _count(text, "hidden_size", 1)
