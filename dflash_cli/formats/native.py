"""The native dialect: a Qwen3-like config with a `dflash_config` object, as z-lab, SpecForge and others publish it.

Sources: z-lab/dflash model.py (April 2026 and 0.1.0), sgl-project/SpecForge export/checkpoint_io.py,
NVIDIA/Model-Optimizer hf_spec_export.py, NVIDIA-NeMo/Automodel train_dflash.py.

Layers are numbered from 0 and a tap is the layer's output, which is the canonical convention. A key may stand at the
top level, inside `dflash_config`, or in both places with one value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.base import FORMATS, Homes, Json, Reading, named_architectures
from dflash_cli.formats.body import (
    BODY_HOMES,
    BODY_KEYS,
    NESTED,
    carried_keys,
    layer_list,
    plain_keys,
    prefixed_keys,
    refuse_unserved,
    require_object,
    write_body,
)
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion, UnsupportedError, UsageError
from dflash_runtime.hf_config import SLIDING, read_body, read_layer_types, read_windows, require_int

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
TWO_HOMES = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers", *SCALES)
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
WINDOW_KEYS = ("use_swa", "swa_window_size")


@FORMATS.register("native")
class Native:
    """Native checkpoints: flat tensor names, no embedding, no head."""

    name: ClassVar[str] = "native"
    title: ClassVar[str] = "DFlash, native dialect"
    priority: ClassVar[int] = 100
    writable: ClassVar[bool] = True
    homes: ClassVar[Homes] = {
        **BODY_HOMES,
        **{key: (f"{NESTED}{key}", key) for key in TWO_HOMES},
        "draft_vocab_size": ("draft_vocab_size",),
        "causal": ("is_causal", f"{NESTED}causal"),
        "windows": (*BODY_HOMES["windows"], *(NESTED + key for key in WINDOW_KEYS)),
        "sample_from_anchor": (f"{NESTED}sample_from_anchor",),
        "target_hidden_size": ("target_hidden_size",),
    }
    unstated: ClassVar[frozenset[str]] = frozenset({"verifier", "target_hidden_size"})

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        named = [item for item in named_architectures(config) if item in ARCHITECTURES]
        if named:
            return f"architectures names {named[0]}"
        return "config.json has dflash_config" if isinstance(config.get("dflash_config"), dict) else None

    def read_config(self, config: Mapping[str, Any], path: Path) -> Reading:
        """Read either spelling of every key.

        Raises:
            InvalidConfig: a key that is missing, wrong, or contradicts its other home.
            UnsupportedError: anchor sampling, packed weights, attention sinks.
        """
        source = _Source(config, require_object(config.get("dflash_config", {}), "dflash_config", path), path)
        _refuse(source)
        body = read_body(config, path)
        vocab_size = require_int(config, "vocab_size", path)
        draft_vocab_size = config.get("draft_vocab_size")
        windows = _read_windows(source, body["num_layers"])
        causal, notes = read_causality(config, source.nested, windows)
        if config.get("model_type") == "gpt_oss" and config.get("layer_types") is None:
            notes.append("no layer_types in a gpt_oss config: read as full attention, though its class alternates")
        depth = source.stated("num_target_layers")
        canonical = DraftConfig(
            **body,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size if draft_vocab_size is None else draft_vocab_size,
            windows=windows,
            causal=causal,
            block_size=source.integer("block_size"),
            target_layer_ids=_read_taps(source, body["num_layers"]),
            mask_token_id=source.integer("mask_token_id"),
            num_target_layers=None if depth in (MISSING, None) else source.integer("num_target_layers"),
            target_hidden_size=config.get("target_hidden_size"),
            model_type=str(config.get("model_type", "qwen3")),
            **_read_scales(source),
        )
        return Reading(config=canonical, carried=_carried(source), notes=tuple(notes))

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """Write every key in each home that some reader looks in.

        Raises:
            LossyConversion: causality, width or vocabulary that this dialect cannot state.
            UsageError: `num_target_layers` is not known.
        """
        _refuse_to_write(config)
        causal = _write_causality(config)
        nested = {
            **prefixed_keys(carried, NESTED),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **({} if causal is None else {"causal": causal}),
            **_write_scales(config),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            **{"max_window_layers": config.num_layers, **plain_keys(carried)},
            **write_body(config),
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            **({} if causal is None else {"is_causal": causal}),
            "dflash_config": nested,
        }


@dataclass(frozen=True, slots=True)
class _Source:
    """A native config being read: its two levels and where it lies."""

    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    path: Path

    def stated(self, key: str) -> Any:
        """The one value of a key in its two homes, or MISSING. A null counts only where it stands alone."""
        homes = {NESTED + key: self.nested.get(key, MISSING), key: self.top.get(key, MISSING)}
        found = {home: value for home, value in homes.items() if value is not MISSING}
        values = [value for value in found.values() if value is not None]
        if any(value != values[0] for value in values):
            raise InvalidConfig(key, found, "one value in both places", path=self.path)
        if values:
            return values[0]
        return None if found else MISSING

    def integer(self, key: str) -> int:
        return require_int({key: self.stated(key)}, key, self.path)


def guess_taps(num_target_layers: int, num_layers: int) -> list[int]:
    """The layers that readers assume where a config names none. Source: z-lab/dflash build_target_layer_ids."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers)]


def read_causality(
    config: Mapping[str, Any], nested: Mapping[str, Any], windows: Sequence[int | None]
) -> tuple[tuple[bool, ...], list[str]]:
    """Causality of each layer: from the first of two keys that is stated, otherwise from the layer's kind.

    Source: z-lab/dflash 0.1.0 Qwen3DFlashAttention; vLLM 0.33.0 qwen3_dflash.py, which adds the nested key.
    """
    notes = []
    stated = {key: value for key, value in (("is_causal", config.get("is_causal")),
              ("dflash_config.causal", nested.get("causal"))) if value is not None}  # fmt: skip
    if stated:
        key, value = next(iter(stated.items()))
        if not isinstance(value, bool):
            raise InvalidConfig(key, value, "true or false")
        if len(set(stated.values())) > 1:
            notes.append("is_causal and dflash_config.causal contradict each other; is_causal is taken, as engines do")
        return (value,) * len(windows), notes
    if any(window is not None for window in windows):
        notes.append("causality is not stated: sliding layers are read as causal, full layers as non-causal")
    return tuple(window is not None for window in windows), notes


def _refuse(source: _Source) -> None:
    refuse_unserved(source.top)
    if source.nested.get("sample_from_anchor") or source.top.get("sample_from_anchor"):
        raise UnsupportedError(
            "sample_from_anchor: true: the draft also predicts at the anchor, found in DSpark; DFlash "
            "proposes from the masked positions only"
        )
    if source.nested.get("attention_sink_bias") or source.top.get("add_swa_attention_sink_bias"):
        raise UnsupportedError("attention_sink_bias: attention sinks are not served by this version")
    if source.nested.get("attention_value_scale") not in (None, 1, 1.0):
        raise UnsupportedError("attention_value_scale: scaled values are not served by this version")


def _read_taps(source: _Source, num_layers: int) -> tuple[int, ...]:
    value = source.stated("target_layer_ids")
    if value is MISSING or value is None:
        depth = source.stated("num_target_layers")
        guess = guess_taps(depth, num_layers) if isinstance(depth, int) and num_layers > 0 else "layers"
        raise InvalidConfig(
            "target_layer_ids",
            value,
            f"the tapped layers; engines would guess {guess}, which is wrong for most published drafts",
            path=source.path,
            hint="write the layers the draft was trained on into dflash_config.target_layer_ids",
        )
    taps = layer_list(value, "target_layer_ids", source.path)
    aux = source.top.get(AUX_KEY)
    if aux is not None and aux != [tap + 1 for tap in taps]:
        raise InvalidConfig(AUX_KEY, aux, f"one more than each of target_layer_ids {list(taps)}", path=source.path)
    return taps


def _read_windows(source: _Source, num_layers: int) -> tuple[int | None, ...]:
    """Windows from `layer_types`, or from `use_swa`, which puts one on every layer of an all-full config.

    Source: vLLM 0.33.0 qwen3_dflash.py; NVIDIA/Model-Optimizer hf_spec_export.py.
    """
    if source.nested.get("use_swa") and SLIDING not in read_layer_types(source.top, num_layers, source.path):
        window = source.nested.get("swa_window_size") or source.top.get("sliding_window")
        return (require_int({"swa_window_size": window}, "swa_window_size", source.path),) * num_layers
    return read_windows(source.top, num_layers, source.path)


def _read_scales(source: _Source) -> Json:
    scales: Json = {}
    for key in SCALES:
        value = source.stated(key)
        if value in (MISSING, None):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidConfig(key, value, "a number", path=source.path)
        is_off = key == "final_logit_softcapping" and value <= 0
        scales[key] = None if is_off else float(value)
    return scales


def _carried(source: _Source) -> Json:
    top = carried_keys(source.top, {*BODY_KEYS, *TWO_HOMES, "dflash_config", "draft_vocab_size", "target_hidden_size"})
    nested = carried_keys(source.nested, {*TWO_HOMES, *WINDOW_KEYS, "causal", "sample_from_anchor"}, NESTED)
    return {**top, **nested}


def _refuse_to_write(config: DraftConfig) -> None:
    if config.has_reduced_vocab:
        raise LossyConversion(
            f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size}: a native draft proposes over the "
            f"target's whole vocabulary"
        )
    if config.feature_size != config.hidden_size:
        raise LossyConversion(
            f"target_hidden_size {config.target_hidden_size}: a native draft is as wide as its target, this one is "
            f"{config.hidden_size}"
        )
    if config.sample_from_anchor:
        raise LossyConversion("sample_from_anchor: true: the native dialect has no key for it")
    if config.num_target_layers is None:
        raise UsageError(
            "num_target_layers: the native dialect states it and this source does not", hint="pass --target REF"
        )


def _write_causality(config: DraftConfig) -> bool | None:
    """One flag where all layers agree, no flag for the default of sliding causal and full not."""
    if config.is_causal is not None:
        return config.is_causal
    if all(causal == (window is not None) for causal, window in zip(config.causal, config.windows, strict=True)):
        return None
    raise LossyConversion(
        f"causality {list(config.causal)} by layer: the native dialect states one value for all layers, or leaves "
        f"sliding layers causal and full layers not"
    )


def _write_scales(config: DraftConfig) -> Json:
    scales: Json = {}
    if config.input_embedding_scale != 1.0:
        scales["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        scales["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        scales["final_logit_softcapping"] = config.final_logit_softcapping
    return scales
