"""The refusals of targets for transformers' code: by our attention and pages, by any cache, and by transformers."""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.decoder_values import (
    COUNTS,
    MEAN_OF_STREAMS,
    WITHOUT_ONE_FREQUENCY,
    RecordedConfig,
    count_of,
    head_sizes,
    latent_size,
    ropes_of,
    value_of,
)
from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING, not_run, without_causal_model
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.json_values import is_int

if TYPE_CHECKING:
    from dflash_runtime.checkpoint.targets.decoder_values import DecoderConfig

SIZES_OF_LAYERS = ("global_head_dim", "swa_head_dim")
"""Keys for the head size of some layers. Some config classes drop them, and state `head_dim` of each layer instead."""

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
    "layers of different sizes": SIZES_OF_LAYERS,
    "ALiBi": ("alibi",),
}  # fmt: skip
"""Features that our attention or pages do not support -> the config attributes that state them."""

MAY_DIFFER = frozenset({"head_dim", "num_key_value_heads"})
"""Attributes that may differ between layers over our pages."""

ONLY_IMAGES = "vision"
"""Value of `use_bidirectional_attention` with which only tokens of images attend to later tokens."""

NOT_A_CACHE = {"an encoder": "is_encoder_decoder", "attention to later tokens": "use_bidirectional_attention"}
"""Features that rule out a cache of earlier tokens -> the config attributes that state them."""

NUM_STREAMS = ("hc_count", "altup_num_inputs")
"""Keys for the number of residual streams of families in which no engine taps layers for a draft."""

NOT_COMPUTED = {
    "attention over the outputs of earlier blocks of layers": "attn_res_block_size",
    "experts of another width than the residual stream": "routed_expert_hidden_size",
    "a gate on the output of latent attention": "mla_use_output_gate",
}
"""Features that no class of the recorded release of transformers computes -> their keys. Source: Kimi-K3."""

A_FAMILY = "a native family (a file in dflash_runtime/models/families, see docs/explanation/architecture.md)"
"""The addition that would run an unsupported target."""

STATEFUL = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
"""Kinds of layers with a recurrent state."""

DECIDING_KEYS = (
    *dict.fromkeys(key for keys in REFUSED_KEYS.values() for key in keys), *NUM_STREAMS, *NOT_COMPUTED.values(),
    MEAN_OF_STREAMS, "is_encoder_decoder", "v_head_dim", "head_dim", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "num_layers",
)  # fmt: skip
"""Attributes by which a decoder is refused, beside its kinds of layers and its ropes."""


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
        raise without_causal_model(kind, path)


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
    missing = [name for name in COUNTS if not is_int(value_of(text, name))]
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
        stated = next((key for key in keys if _is_stated(value_of(text, key))), None)
        if stated is not None:
            yield f"{words} ({stated})"
    for rope in ropes_of(text):
        if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY:
            yield f"rope type {rope['rope_type']}, with frequencies that change with the length of the text"


def _odd_values(text: "DecoderConfig") -> Iterator[str]:
    """Name odd sizes of heads, and values of another size than keys.

    Latent attention may have smaller values.
    """
    latent = latent_size(text)
    odd = sorted(size for size in head_sizes(text) if size % 2)
    if odd:
        yield f"an odd head size ({', '.join(map(str, odd))})"
    width = value_of(text, "v_head_dim")
    if latent is not None and count_of(text, "v_head_dim", 0) > latent:
        yield "values larger than keys (v_head_dim)"
    elif latent is not None and count_of(text, "num_layers", 0):
        yield "several attentions in one layer (num_layers)"
    elif latent is None and width is not None and width != value_of(text, "head_dim"):
        yield "values of another size than keys (v_head_dim)"


def _streams(text: "DecoderConfig") -> Iterator[str]:
    """Name several residual streams if the config states them, and nobody says how a draft reads them."""
    for key in NUM_STREAMS:
        if count_of(text, key, 1) > 1:
            yield (
                f"{count_of(text, key, 1)} residual streams, while a draft reads one, and no engine's code for this "
                f"family says which ({key})"
            )


def _not_computed(text: "DecoderConfig") -> Iterator[str]:
    """Name features that no class of transformers computes."""
    for words, key in NOT_COMPUTED.items():
        if _is_stated(value_of(text, key)):
            yield f"{words} ({key} {value_of(text, key)})"


def _is_stated(value: Any) -> bool:
    return value is not None and value is not False and value not in (0, ONLY_IMAGES)
