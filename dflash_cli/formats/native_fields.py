"""Single fields of the native dialect, read and written: taps, windows, causality, scales.

Sources: z-lab/dflash model.py (April 2026 and 0.1.0); vLLM 0.33.0 model_executor/models/qwen3_dflash.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.formats.decoder_body import NESTED, layer_list
from dflash_cli.formats.dialect import Json
from dflash_cli.formats.fields import AUX_KEY, ZLAB_SCALES, Keys, guess_taps, look_up
from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING, read_layer_types, read_windows
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion
from dflash_runtime.json_values import is_number
from dflash_runtime.notices import Notice


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """A native config: its top level, its `dflash_config`, its path, and the keys of the fields of its dialect."""

    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    path: Path
    keys: Keys

    def stated(self, key: str) -> Any:
        """The value of a field under any key that states it; None if all are null, MISSING if all are absent.

        Raises:
            InvalidConfig: two different values.
        """
        stated = {name: look_up(self.top, name) for name in self.keys.get(key, (NESTED + key, key))}
        found = {name: value for name, value in stated.items() if value is not MISSING}
        values = [value for value in found.values() if value is not None]
        if any(value != values[0] for value in values):
            raise InvalidConfig(key, found, "the same value in every place", path=self.path)
        if values:
            return values[0]
        return None if found else MISSING

    def integer(self, key: str) -> int:
        return require_int({key: self.stated(key)}, key, self.path)


def read_taps(source: NativeConfig, num_layers: int) -> tuple[int, ...]:
    """The tapped layers.

    Raises:
        InvalidConfig: the config lists none, so that readers would guess, or another list contradicts them.
    """
    value = source.stated("target_layer_ids")
    if value is MISSING or value is None:
        depth = source.stated("num_target_layers")
        guess = guess_taps(depth, num_layers) if isinstance(depth, int) and num_layers > 0 else "layers"
        raise InvalidConfig(
            "target_layer_ids",
            value,
            f"the layers that the draft taps; engines guess {guess}, which is wrong for most published drafts",
            id="no-tapped-layers",
            path=source.path,
            hint="write the layers the draft was trained on into dflash_config.target_layer_ids",
        )
    taps = layer_list(value, "target_layer_ids", source.path)
    aux = source.top.get(AUX_KEY)
    if aux is not None and aux != [tap + 1 for tap in taps]:
        raise InvalidConfig(AUX_KEY, aux, f"one more than each of target_layer_ids {list(taps)}", path=source.path)
    return taps


def read_swa_windows(source: NativeConfig, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, or from `use_swa`, which gives every full layer a window.

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
) -> tuple[tuple[bool, ...], list[Notice]]:
    """Causality of each layer, with notes: from the first stated key, otherwise from the layer's stated kind.

    A window from `use_swa` does not make a layer causal. `sliding_default` is False for exporters that never train
    causal layers. Source: z-lab/dflash 0.1.0 Qwen3DFlashAttention; vLLM 0.33.0 qwen3_dflash.py adds the nested key.
    """
    stated = stated_causality(config, nested)
    if stated:
        key, value = next(iter(stated.items()))
        if not isinstance(value, bool):
            raise InvalidConfig(key, value, "true or false")
        notes: list[Notice] = []
        if is_contradictory(stated):
            notes.append(
                Notice(
                    "is_causal and dflash_config.causal contradict each other; like engines, dflash uses is_causal "
                    "unless you pass --causality",
                    id="causality-contradicts",
                )
            )
        elif value and FULL in layer_types:
            notes.append(
                Notice(
                    "full-attention layers are causal inside the block, as in JetSpec and unlike DFlash",
                    id="causality-of-full-layers",
                )
            )
        return (value,) * len(layer_types), notes
    if SLIDING not in layer_types:
        return (False,) * len(layer_types), []
    if not sliding_default:
        note = "causality is not stated: every layer is read as non-causal, as this exporter trains it"
        return (False,) * len(layer_types), [Notice(note, id="causality-not-stated")]
    note = (
        "causality is not stated: sliding layers are read as causal, full layers as non-causal; for a draft trained "
        "by SpecForge, pass --causality non-causal"
    )
    return tuple(kind == SLIDING for kind in layer_types), [Notice(note, id="causality-not-stated")]


def stated_causality(config: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> value of each key that states causality. Engines prefer the first key."""
    pairs = (("is_causal", config.get("is_causal")), ("dflash_config.causal", nested.get("causal")))
    return {key: value for key, value in pairs if value is not None}


def is_contradictory(stated: Mapping[str, Any]) -> bool:
    """Whether the keys state different values, of whatever type."""
    values = list(stated.values())
    return any(value != values[0] for value in values)


def read_scales(source: NativeConfig) -> Json:
    """The stated scales."""
    scales: Json = {}
    for key in ZLAB_SCALES:
        value = source.stated(key)
        if value in (MISSING, None):
            continue
        if not is_number(value):
            raise InvalidConfig(key, value, "a number", path=source.path)
        is_off = key == "final_logit_softcapping" and value <= 0
        scales[key] = None if is_off else float(value)
    return scales


def read_flag(nested: Mapping[str, Any], key: str) -> bool:
    """A flag of `dflash_config`, False if it is absent."""
    value = nested.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidConfig(f"dflash_config.{key}", value, "true or false")
    return value is True


def write_causality(config: DraftConfig) -> bool | None:
    """The flag that states causality: None for the default, in which sliding layers are causal and full layers are not.

    Raises:
        LossyConversion: the layers differ in another way.
    """
    if config.is_causal is not None:
        return config.is_causal
    if all(causal == (window is not None) for causal, window in zip(config.causal, config.windows, strict=True)):
        return None
    raise LossyConversion(
        f"causality {list(config.causal)} by layer: the native dialect states one value for all layers, or no value, "
        f"which makes sliding layers causal and full layers non-causal",
        id="several-causalities",
        field="is_causal",
        found=list(config.causal),
    )
