"""Read the rope of a config, in every published spelling."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.targets.layer_kinds import KINDS
from dflash_runtime.checkpoint.targets.required_fields import number_of
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.errors import MISSING, InvalidConfig
from dflash_runtime.json_values import is_number

ROPE_FLAGS = ("layer_rope_theta", "no_rope_layers")
"""Keys with one value per layer, zero for a layer without rope."""


def varies_by_kind(rope: Any) -> bool:
    """Whether rope parameters are nested by layer type and differ between types."""
    nested = [item for item in rope.values() if isinstance(item, dict)] if isinstance(rope, dict) else []
    return any(item != nested[0] for item in nested)


def readable_rope(text: Mapping[str, Any], path: Path) -> tuple[RopeConfig | None, tuple[str, ...]]:
    """Return the one rope of a target and (), or None and the names of the parts that are not known."""
    if any(varies_by_kind(text.get(key)) for key in ("rope_parameters", "rope_scaling")):
        return None, ()
    try:
        return read_rope(text, path), ()
    except InvalidConfig:
        return None, ("rope",)


def ropes_by_kind(
    text: Mapping[str, Any], kinds: Sequence[str], rope: RopeConfig | None, path: Path
) -> dict[str, RopeConfig]:
    """Return the rope of each kind of layer that has rope, or {} if all layers have the same rope."""
    modern, local = text.get("rope_parameters"), text.get("rope_local_base_freq", text.get("swa_rope_theta"))
    if isinstance(modern, dict) and varies_by_kind(modern):
        by_kind = {KINDS.get(kind, str(kind)): value for kind, value in modern.items() if isinstance(value, dict)}
        return {kind: read_rope({"rope_parameters": value}, path) for kind, value in by_kind.items() if value}
    if rope is not None and is_number(local):
        return {"full": rope, "sliding": RopeConfig(theta=local)}
    flags: list[Any] = next((text[key] for key in ROPE_FLAGS if isinstance(text.get(key), list) and any(text[key])), [])
    if rope is None or all(flags) or len(flags) != len(kinds):
        return {}
    return {kind: rope for kind, has_rope in zip(kinds, flags, strict=True) if has_rope}


def read_rope(config: Mapping[str, Any], path: Path) -> RopeConfig:
    """Read the rope from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (older).

    A missing theta is an error: readers default to 10,000 or to 1,000,000.

    Raises:
        InvalidConfig: theta is missing, or two spellings differ.
    """
    modern, legacy = config.get("rope_parameters"), config.get("rope_scaling")
    modern = _one_rope(modern, "rope_parameters", path) if modern else {}
    legacy = _one_rope(legacy, "rope_scaling", path) if legacy else {}
    thetas = {
        key: float(number_of(value, key, path))
        for key, value in (
            ("rope_theta", config.get("rope_theta")),
            ("rope_parameters.rope_theta", modern.get("rope_theta")),
            ("rope_scaling.rope_theta", legacy.get("rope_theta")),
        )
        if value is not None
    }
    if not thetas:
        raise InvalidConfig("rope_theta", MISSING, "a number, here or in rope_parameters", path=path)
    if len(set(thetas.values())) > 1:
        raise InvalidConfig("rope_theta", thetas, "one value in every spelling", path=path)
    kinds = {
        str(source[key]) for source in (modern, legacy) for key in ("rope_type", "type") if source.get(key) is not None
    }
    if len(kinds) > 1:
        raise InvalidConfig("rope_type", sorted(kinds), "one type in every spelling", path=path)
    params = _merge_rope(legacy, modern, path)
    return RopeConfig(theta=next(iter(thetas.values())), kind=kinds.pop() if kinds else "default", params=params)


def rope_parameters(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope parameters other than theta and type. A null counts as absent."""
    return {
        key: value
        for key, value in rope.items()
        if key not in ("rope_theta", "rope_type", "type") and value is not None
    }


def _merge_rope(legacy: Mapping[str, Any], modern: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Join the parameters of both spellings. They must agree: readers differ in which spelling they prefer."""
    old, new = rope_parameters(legacy), rope_parameters(modern)
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            found = {f"rope_scaling.{key}": old[key], f"rope_parameters.{key}": new[key]}
            raise InvalidConfig(key, found, "one value in every spelling", path=path)
    return {**old, **new}


def _one_rope(value: Any, key: str, path: Path) -> dict[str, Any]:
    """Flatten rope parameters that are nested by layer type, if all types agree."""
    if not isinstance(value, dict):
        raise InvalidConfig(key, value, "an object", path=path)
    nested = [item for item in value.values() if isinstance(item, dict)]
    if not nested or len(nested) != len(value):
        return dict(value)
    if any(item != nested[0] for item in nested):
        raise InvalidConfig(key, value, "the same rope for every layer type", path=path)
    return dict(nested[0])
