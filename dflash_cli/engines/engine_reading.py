"""The values that an engine reads from a native config, and the checks that engines share."""

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dflash_cli.engines.config_class import CLASSES, ConfigClass, EngineStops
from dflash_cli.formats.dialect import named_architectures
from dflash_cli.formats.unserved import asks_for_latent_attention
from dflash_cli.rules.subject import BODY_SIZES, WEIGHTS, Subject, stand_in
from dflash_cli.rules.themes.tensors import common_prefix, fused_names
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD, SINKS, body_shapes, compare_tensors
from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.json_values import is_int, is_number

TORCH_TYPES = frozenset(
    {"bfloat16", "float16", "float32", "float64", "half", "float", "double", "int8", "uint8", "float8_e4m3fn"}
)
ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("beta_fast", "beta_slow"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
    "default": (),
    "proportional": (),
}
"""Rope type that engines know -> its parameters that they compute with."""
ROPE_BY_KIND = frozenset({"gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "olmo3"})
"""Model types with a separate rope for each kind of layer, made by their config class. No DFlash model reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """The values that an engine serves a draft with.

    rope        the rope parameters; empty if unknown
    taps        the captured layers, counted from 0; -1 is the embedding's output
    block_size  None if the engine ignores the key
    cut         tensors that the engine loads in part: the config states fewer rows or columns than the file has
    padded      tensors that the engine extends by zeros: the config states more rows or columns than the file has
    packed      parts of packed weights that the engine leaves at random values, or takes for plain numbers
    own         key -> value of the settings that only this family has
    """

    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    taps: tuple[int, ...]
    mask_token_id: int | float | None
    rope: Mapping[str, Any]
    eps: float
    block_size: int | None = None
    neox: bool = True
    gemma_norms: bool = False
    sinks: bool = False
    value_scale: float | None = None
    logit_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    cut: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)

    def differences(self, config: DraftConfig) -> dict[str, tuple[Any, Any]]:
        """Field -> the value that the engine reads and the meant one, where they differ. Causality is left out."""
        meant = {"rope_type": "default", **config.rope.to_parameters()}
        theta, rope = meant.pop("rope_theta"), {key: self.rope.get(key) for key in meant if key != "rope_theta"}
        pairs: dict[str, tuple[Any, Any]] = {
            "windows": (self.windows, config.windows),
            "target_layer_ids": (self.taps, config.target_layer_ids),
            "mask_token_id": (self.mask_token_id, config.mask_token_id),
            "block_size": (config.block_size if self.block_size is None else self.block_size, config.block_size),
            "rms_norm_eps": (self.eps, config.rms_norm_eps),
        }
        own = own_settings(config)
        if config.selector is not None:
            logits = ("output_multiplier", "final_logit_softcapping")
            pairs |= {key: (getattr(self, key), getattr(config, key)) for key in logits}
        pairs |= {key: (value, own[key]) for key, value in self.own.items() if key in own}
        if self.sinks:
            pairs["has_sinks"] = (True, config.has_sinks)
        if self.rope:
            pairs |= {"rope_theta": (self.rope["rope_theta"], theta), "rope": (rope, meant)}
        return {key: (found, wanted) for key, (found, wanted) in pairs.items() if found != wanted}


def own_settings(config: DraftConfig) -> dict[str, Any]:
    """The settings that only drafts of the config's family have, by their keys."""
    found: dict[str, Any] = {"input_embedding_scale": config.input_embedding_scale}
    if config.convolution is not None:
        found |= {"conv_kernel_size": config.convolution.kernel_size, "conv_group_size": config.convolution.group_size}
    if config.selector is not None:
        found |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
    if config.markov is not None:
        found |= {"markov_rank": config.markov.rank, "markov_head_type": config.markov.head_type}
        found["dspark_draft_topk"] = config.markov.top_k
    return found


def resolve_auto(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config as transformers' AutoConfig fills it in, None for a class that is not modelled.

    Raises:
        EngineStops: transformers does not know the model type, or the class refuses the config.
    """
    model_type = config.get("model_type")
    if "auto_map" in config and config["auto_map"] is None:
        raise EngineStops("auto_map", "null, expected an object or no such key")
    if not isinstance(model_type, str) or not is_known(model_type):
        raise EngineStops("model_type", f"found {model_type!r}, expected a type that transformers knows")
    if model_type in ROPE_BY_KIND:
        raise EngineStops("model_type", f"found {model_type}, whose config class has one rope for each kind of layer")
    return resolve(config, model_type) if model_type in CLASSES else None


def resolve(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The config as one of transformers' classes fills it in.

    Raises:
        EngineStops: the class refuses the config.
    """
    return resolve_with(CLASSES[model_type], config)


def resolve_with(config_class: ConfigClass, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as a class fills it in.

    Raises:
        EngineStops: the class refuses the config.
    """
    if asks_for_latent_attention(config):
        raise EngineStops("attention_mode", "latent attention, and the engine lacks a draft model with it")
    found = config_class.resolve(config)
    dtype = found.get("dtype") or found.get("torch_dtype")
    if dtype is not None and str(dtype) not in TORCH_TYPES:
        raise EngineStops("dtype", f"found {dtype!r}, expected a type of torch")
    return found


@cache
def is_known(model_type: str) -> bool:
    """Whether the installed transformers has a folder for a model type. transformers is not imported."""
    spec = importlib.util.find_spec("transformers")
    folders = {path.name for place in (spec and spec.submodule_search_locations) or () for path in _models(place)}
    parts = model_type.split("_")
    return any("_".join(parts[:count]) in folders for count in range(1, len(parts) + 1))


def _models(place: str) -> Sequence[Path]:
    return [path for path in (Path(place) / "models").iterdir() if path.is_dir()]


def check_architecture(config: Mapping[str, Any], expected: str | None) -> None:
    """Require the name by which an engine finds its model.

    Raises:
        EngineStops: `architectures` does not list it.
    """
    if expected not in named_architectures(config) or not isinstance(config["architectures"], list):
        raise EngineStops("architectures", f"found {config.get('architectures')!r}, expected [{expected!r}]")


def check_packing(config: Mapping[str, Any]) -> None:
    """Require a quantization method if the config states a quantization.

    Raises:
        EngineStops: it names none.
    """
    packing = config.get("quantization_config")
    if isinstance(packing, dict) and "quant_method" not in packing and "quant_algo" not in packing:
        raise EngineStops("quantization_config.quant_method", "missing")


def whole(key: str, value: Any, least: int | None = None) -> int:
    """`int(value)` as engines call it.

    Raises:
        EngineStops: it fails, or the result is below the least value.
    """
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineStops(key, f"found {value!r}, expected an integer") from error
    if least is not None and number < least:
        raise EngineStops(key, f"found {value!r}, expected at least {least}")
    return number


def real(key: str, value: Any) -> float:
    """`float(value)` as engines call it.

    Raises:
        EngineStops: it fails.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise EngineStops(key, f"found {value!r}, expected a number") from error


def check_rope(params: Mapping[str, Any], *needed: str) -> None:
    """Require a rope type that engines know, and numbers where they compute.

    Raises:
        EngineStops: the key that is wrong.
    """
    kind = params["rope_type"]
    if not isinstance(kind, str) or kind not in ROPE_NUMBERS:
        raise EngineStops(
            "rope_scaling.rope_type", f"found {kind!r}, expected one of {', '.join(sorted(ROPE_NUMBERS))}"
        )
    if kind == "yarn" and params["rope_theta"] in (0, 1):
        raise EngineStops("rope_theta", f"found {params['rope_theta']}, but YaRN divides by its logarithm")
    for key in ("rope_theta", *ROPE_NUMBERS[kind], *needed):
        is_stated = key in params and not (params[key] is None and kind == "yarn" and key not in needed)
        if is_stated and not is_number(params[key]):
            place = key if key == "rope_theta" else f"rope_scaling.{key}"
            raise EngineStops(place, f"found {params[key]!r}, expected a number")


def windows_of(found: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer of a resolved config.

    Raises:
        EngineStops: a sliding layer lacks a window, or a layer is neither full nor sliding.
    """
    kinds, window = found["layer_types"], found["sliding_window"]
    strange = next((kind for kind in kinds if kind not in (FULL, SLIDING)), None)
    if strange is not None:
        raise EngineStops("layer_types", f"found {strange}, which no DFlash model has")
    if SLIDING in kinds and window is None:
        raise EngineStops("sliding_window", "missing or switched off, although a layer is sliding")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def causal_of(stated: Any, found: Mapping[str, Any]) -> tuple[bool, ...]:
    """A stated causality, whatever its type, for every layer; otherwise sliding layers are causal."""
    kinds = found["layer_types"]
    return tuple(kind == SLIDING for kind in kinds) if stated is None else (bool(stated),) * len(kinds)


def check_captured(taps: Sequence[int], width: int, subject: Subject) -> None:
    """Require layers of the target, and its width.

    Raises:
        EngineStops: the given target has no such layer, or another width than the draft reads.
    """
    target = subject.target
    if target is not None and max(taps) >= target.num_layers:
        raise EngineStops("target_layer_ids", f"lists layer {max(taps)}, the target has {target.num_layers} layers")
    if target is not None and width != target.hidden_size:
        raise EngineStops("hidden_size", f"reads features of width {width}, the target's are {target.hidden_size} wide")


def check_mask(mask: Any, subject: Subject) -> None:
    """Require a row of the target's embedding.

    Raises:
        EngineStops: the embedding has no such row.
    """
    rows = subject.target.vocab_size if subject.target is not None else None
    if rows is not None and is_number(mask) and not 0 <= mask < rows:
        raise EngineStops("mask_token_id", f"found {mask}, the target's embedding has {rows} rows")


OPTIONAL = (EMBEDDING, HEAD, "rotary_emb.")
"""Tensors that a strict reader also knows."""


def check_all_tensors(found: Mapping[str, Any], num_taps: int, subject: Subject) -> None:
    """Require exactly the tensors of a draft without biases; attention sinks are optional.

    Raises:
        EngineStops: a tensor is missing, misshapen or unknown, or a size is absent.
    """
    absent = next((key for key in BODY_SIZES if key != "vocab_size" and not is_int(found.get(key))), None)
    if absent is not None:
        raise EngineStops(absent, f"found {found.get(absent)!r}, expected an integer")
    if subject.tensors is None or common_prefix(subject) is not None or fused_names(subject):
        return
    check_shapes({**found, "attention_bias": False}, num_taps, subject)
    sizes = {**{name: found[key] for key, name in BODY_SIZES.items() if key != "vocab_size"}, "vocab_size": 1}
    config = stand_in(sizes, num_taps)
    wanted = body_shapes(config) if config is not None else {}
    missing = sorted(wanted.keys() - subject.tensors.keys())
    extra = [name for name in subject.tensors if name not in wanted and not name.startswith(OPTIONAL)]
    for name in (*missing, *(name for name in extra if not name.endswith(SINKS))):
        raise EngineStops(f"{WEIGHTS}:{name}", "missing" if name in missing else "the engine does not know the tensor")


def check_shapes(
    found: Mapping[str, Any], num_taps: int, subject: Subject, *, resized: Collection[str] = (), **more: Any
) -> None:
    """Require tensors of the shapes that the resolved sizes give, except tensors that the engine cuts or extends.

    Missing tensors stop no engine here.

    Raises:
        EngineStops: a tensor has another shape.
    """
    if subject.tensors is None or common_prefix(subject) is not None or fused_names(subject):
        return
    sizes = {**{name: found[key] for key, name in BODY_SIZES.items() if key != "vocab_size"}, "vocab_size": 1}
    assumed = next((key for key in BODY_SIZES if key not in subject.stated.body), None)
    place = assumed or f"{WEIGHTS}:fc.weight"
    config = stand_in(sizes, num_taps, attention_bias=found["attention_bias"], **more)
    if config is None:
        raise EngineStops(place, "the sizes are not those of a draft")
    shapes = {name: tuple(info.shape) for name, info in subject.tensors.items() if name not in resized}
    expected_shapes = {name: shape for name, shape in body_shapes(config).items() if name not in (EMBEDDING, HEAD)}
    _, _, wrong = compare_tensors(expected_shapes, shapes)
    if wrong:
        name, (is_shape, expected) = next(iter(wrong.items()))
        place = assumed or f"{WEIGHTS}:{name}"
        raise EngineStops(place, f"{name} has the shape {is_shape}, the config gives it {expected}")
