"""Single fields of the native dialect, read and written: taps, windows, causality, scales.

Sources: z-lab/dflash model.py (April 2026 and 0.1.0); vLLM 0.33.0 model_executor/models/qwen3_dflash.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.formats.decoder_body import NESTED, layer_list
from dflash_cli.formats.dialect import Json
from dflash_cli.formats.fields import AUX_KEY, SCALES, guess_taps
from dflash_runtime.checkpoint.hf_config import FULL, SLIDING, read_layer_types, read_windows, require_int
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion
from dflash_runtime.json_values import is_number


@dataclass(frozen=True, slots=True)
class NativeConfig:
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
            raise InvalidConfig(key, found, "the same value in both places", path=self.path)
        if values:
            return values[0]
        return None if found else MISSING

    def integer(self, key: str) -> int:
        return require_int({key: self.stated(key)}, key, self.path)


def read_taps(source: NativeConfig, num_layers: int) -> tuple[int, ...]:
    """The tapped layers; a config without them is refused, since readers would guess differently."""
    value = source.stated("target_layer_ids")
    if value is MISSING or value is None:
        depth = source.stated("num_target_layers")
        guess = guess_taps(depth, num_layers) if isinstance(depth, int) and num_layers > 0 else "layers"
        raise InvalidConfig(
            "target_layer_ids",
            value,
            f"the layers that the draft taps; engines guess {guess}, which is wrong for most published drafts",
            path=source.path,
            hint="write the layers the draft was trained on into dflash_config.target_layer_ids",
        )
    taps = layer_list(value, "target_layer_ids", source.path)
    aux = source.top.get(AUX_KEY)
    if aux is not None and aux != [tap + 1 for tap in taps]:
        raise InvalidConfig(AUX_KEY, aux, f"one more than each of target_layer_ids {list(taps)}", path=source.path)
    return taps


def read_swa_windows(source: NativeConfig, num_layers: int) -> tuple[int | None, ...]:
    """Windows from `layer_types`, or from `use_swa`, which puts one on every layer of an all-full config.

    Source: vLLM 0.33.0 qwen3_dflash.py::_resolve_layer_attention; NVIDIA/Model-Optimizer hf_spec_export.py.
    """
    stated = source.nested.get("swa_window_size")
    if SLIDING in read_layer_types(source.top, num_layers, source.path):
        windows = read_windows(source.top, num_layers, source.path)
        if stated is not None and stated not in windows:
            expected = f"sliding_window's value, {source.top.get('sliding_window')!r}"
            raise InvalidConfig("dflash_config.swa_window_size", stated, expected, path=source.path)
        return windows
    if source.nested.get("use_swa"):
        window = source.top.get("sliding_window") if stated is None else stated
        return (require_int({"swa_window_size": window}, "swa_window_size", source.path),) * num_layers
    return (None,) * num_layers


def read_causality(
    config: Mapping[str, Any], nested: Mapping[str, Any], layer_types: Sequence[str], *, sliding_default: bool = True
) -> tuple[tuple[bool, ...], list[str]]:
    """Causality of each layer: from the first of two keys that is stated, otherwise from the layer's stated kind.

    A window that comes from `use_swa` makes no layer causal. Source: z-lab/dflash 0.1.0 Qwen3DFlashAttention; vLLM
    0.33.0 qwen3_dflash.py, which adds the nested key. `sliding_default` is False for exporters that never train
    causal layers.
    """
    stated = stated_causality(config, nested)
    if stated:
        key, value = next(iter(stated.items()))
        if not isinstance(value, bool):
            raise InvalidConfig(key, value, "true or false")
        notes = []
        if is_contradictory(stated):
            notes.append(
                "is_causal and dflash_config.causal contradict each other; is_causal is used, as engines do, unless "
                "--causality says otherwise"
            )
        elif value and FULL in layer_types:
            notes.append(
                "causality: full-attention layers are causal inside the block, as in JetSpec and unlike in DFlash"
            )
        return (value,) * len(layer_types), notes
    if SLIDING not in layer_types:
        return (False,) * len(layer_types), []
    if not sliding_default:
        note = "causality is not stated: every layer is taken as non-causal, as this exporter trains them"
        return (False,) * len(layer_types), [note]
    note = (
        "causality is not stated: sliding layers are taken as causal, full layers as non-causal; for a draft trained "
        "by SpecForge, pass --causality non-causal"
    )
    return tuple(kind == SLIDING for kind in layer_types), [note]


def stated_causality(config: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that state causality, the one that engines take first."""
    pairs = (("is_causal", config.get("is_causal")), ("dflash_config.causal", nested.get("causal")))
    return {key: value for key, value in pairs if value is not None}


def is_contradictory(stated: Mapping[str, Any]) -> bool:
    """Whether keys that mean the same state different values, of whatever type."""
    values = list(stated.values())
    return any(value != values[0] for value in values)


def read_scales(source: NativeConfig) -> Json:
    """The scales that are stated."""
    scales: Json = {}
    for key in SCALES:
        value = source.stated(key)
        if value in (MISSING, None):
            continue
        if not is_number(value):
            raise InvalidConfig(key, value, "a number", path=source.path)
        is_off = key == "final_logit_softcapping" and value <= 0
        scales[key] = None if is_off else float(value)
    return scales


def read_flag(nested: Mapping[str, Any], key: str) -> bool:
    """A flag of `dflash_config` that is off where it is not stated."""
    value = nested.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidConfig(f"dflash_config.{key}", value, "true or false")
    return value is True


def write_causality(config: DraftConfig) -> bool | None:
    """One flag where all layers agree, no flag for the default of sliding causal and full not.

    Raises:
        LossyConversion: layers that differ otherwise.
    """
    if config.is_causal is not None:
        return config.is_causal
    if all(causal == (window is not None) for causal, window in zip(config.causal, config.windows, strict=True)):
        return None
    raise LossyConversion(
        f"causality {list(config.causal)} by layer: the native dialect can state one value for all layers, or "
        f"none, which makes sliding layers causal and full layers not"
    )
