"""Read a target's config with transformers' own config classes, for targets that transformers' code runs.

Unlike `checkpoint.hf_config`, this reading includes the class's defaults: the code that runs the model reads the same
object. It refuses every model that our attention or pages cannot serve, as far as the config tells. After loading,
`models.hosted` checks the model itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.decoder_values import (
    WITHOUT_ONE_FREQUENCY,
    RecordedConfig,
    count_of,
    latent_size,
    ropes_of,
)
from dflash_runtime.checkpoint.targets.hf_config import SLIDING, read_token_ids
from dflash_runtime.checkpoint.targets.hosted_refusals import refuse_cache, refuse_pages, refuse_type
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.errors import CheckpointError, naming_file
from dflash_runtime.json_values import is_int, is_number
from dflash_runtime.target_config import OwnCache, TargetConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

POSITIONS_UNSTATED = 2**17
"""Positions of a target if its config states no limit."""

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


def _to_target_config(source: TargetSource, whole: "PretrainedConfig", text: "PretrainedConfig") -> TargetConfig:
    heads = count_of(text, "num_attention_heads", 1)
    (num_kv_heads, head_dim), *others = _kv_shapes(text, heads)
    epsilons = (getattr(text, name, None) for name in NORM_KEYS)
    windows = _windows(text)
    stops = (getattr(config, "eos_token_id", None) for config in (whole, text))
    return TargetConfig(
        model_type=text.model_type,
        hidden_size=count_of(text, "hidden_size", source.facts.hidden_size),
        num_layers=count_of(text, "num_hidden_layers", source.facts.num_layers),
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
    is_mixed, count = getattr(text, "is_heterogeneous", False), count_of(text, "num_hidden_layers", 1)
    layers: Any = text.per_layer_config if is_mixed else (text,) * count
    usual = max(1, count_of(text, "hidden_size", 1) // heads)
    latent = latent_size(text)
    if latent is not None:
        return [(heads, latent)] * count
    shapes = [(count_of(layer, "num_key_value_heads", heads), count_of(layer, "head_dim", usual)) for layer in layers]
    return [(kv_heads if heads % kv_heads == 0 else heads, size) for kv_heads, size in shapes]


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


def _num_positions(text: "PretrainedConfig") -> int:
    """Return how many positions a text may have. A rope's frequencies must not change within them."""
    stated = count_of(text, "max_position_embeddings", POSITIONS_UNSTATED)
    for rope in ropes_of(text):
        if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY:
            first = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", 0)
            stated = min(stated, first or stated)
    return stated


def _rope(text: "PretrainedConfig") -> RopeConfig:
    """Return the rope for comparisons. transformers' code computes with its own."""
    stated = dict(ropes_of(text)[0])
    theta = stated.pop("rope_theta", None)
    kind = stated.pop("rope_type", None) or "default"
    return RopeConfig(theta=float(theta) if is_number(theta) else 10_000.0, kind=kind, params=stated)


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
    widths = (count_of(text, name, 0) for name in ("intermediate_size", "moe_intermediate_size"))
    return experts * max(widths) or 4 * count_of(text, "hidden_size", 1)
