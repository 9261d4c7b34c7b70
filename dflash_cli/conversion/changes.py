"""Record what a conversion does with every config key: the body of `conversion.json`."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dflash_cli.formats.dialect import Format

ChangeKind = Literal["kept", "moved", "renamed", "split", "derived", "dropped"]

WHY_DERIVED = {
    "target_layer_ids": "the dialects number layers differently, from 0 or from 1",
    "causal": "the dialects state causality in different keys",
    "windows": "layer_types, sliding_window and use_sliding_window state windows together",
    "rope": "rope is stated under every key that readers use",
    "block_size": "also stated as the number of draft tokens, the block size minus one",
    "num_target_layers": "taken from the target",
    "verifier": "the published name of the target",
    "draft_vocab_size": "the draft now proposes over the target's whole vocabulary",
}
WHY_DROPPED = {
    "auto_map": "names code in the source repository, which is not copied",
    "_name_or_path": "names only the folder from which the source was loaded",
    "tie_word_embeddings": "a draft does not own an embedding, so it cannot tie its head to one",
    "torch_dtype": "dtype says the same",
    "rope_is_neox_style": "is_neox_style says the same, and every engine with rope styles reads it",
    "verifier": "the command that runs the draft names its target",
    "max_window_layers": "layer_types says which layers slide",
    "transformers_version": "names only the release that wrote the file",
    **dict.fromkeys(("max_anchors", "attention_dropout", "initializer_range"), "a setting of the training only"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"), "the target decides it"),
    "attention_mode": "the numbers of attention heads say the same",
    "attention_modes": "the numbers of attention heads say the same",
    "partial_rotary_factor": "the draft rotates every dimension, and engines that read the key would not",
    "mrope_section": "the draft's positions have one dimension",
    "mrope_interleaved": "the draft's positions have one dimension",
}
FOLLOWS_FROM = {"num_draft_tokens": "block_size"}
"""A field that only some dialects state -> the canonical field that determines it."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one key, tensor or file."""

    from_: Annotated[str | None, "null if only the result has it"]
    to: Annotated[str | None, "null if only the source has it"]
    change: ChangeKind
    why: str = ""


def flatten(config: Mapping[str, Any], containers: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a config. Only the dialect's containers are flattened."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in containers and isinstance(value, dict):
            flat |= flatten(value, containers, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def key_changes(
    source: Mapping[str, Any], source_format: Format, result: Mapping[str, Any], result_format: Format
) -> list[Change]:
    """The change of every key of the source, and the origin of every new key of the result."""
    before, after = flatten(source, source_format.containers), flatten(result, result_format.containers)
    fields = _fields(source_format)
    changes = [_change(key, value, fields.get(key), after, result_format) for key, value in before.items()]
    reached = {change.to for change in changes}
    return [*changes, *_new_keys(after, reached, result_format)]


def lost_keys(changes: Iterable[Change], carried: Mapping[str, Any], source_format: Format) -> list[str]:
    """The dropped keys of unknown meaning. Each may be a part of the draft."""
    places = {source_format.stored_key(key) for key, value in carried.items() if value is not None}
    dropped = [item.from_ for item in changes if item.change == "dropped" and item.from_ is not None]
    return [key for key in dropped if _leaf(key) not in WHY_DROPPED and _is_inside(key, places)]


def _is_inside(key: str, places: Collection[str]) -> bool:
    """Whether one of the dotted keys in `places` is the key or contains it."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _change(key: str, value: Any, field: str | None, after: Mapping[str, Any], result_format: Format) -> Change:
    leaf = _leaf(key)
    stating = [other for other in result_format.keys.get(field or "", ()) if other in after]
    candidates = [key, *stating, *(other for other in after if _leaf(other) == leaf)]
    for candidate in candidates:
        if candidate in after and _is_same(after[candidate], value):
            if candidate == key:
                return Change(key, key, "kept")
            return Change(key, candidate, "moved" if _leaf(candidate) == leaf else "renamed")
    if stating:
        return Change(
            key, stating[0], "derived", WHY_DERIVED.get(field or "", "written in the form of the new dialect")
        )
    if key in after:
        return Change(key, key, "derived", "written anew for the new dialect")
    return Change(key, None, "dropped", WHY_DROPPED.get(leaf, f"{result_format.title} has no key for it"))


def _new_keys(after: Mapping[str, Any], reached: set[str | None], result_format: Format) -> Iterator[Change]:
    fields = _fields(result_format)
    for key in after:
        if key not in reached:
            yield Change(
                None, key, "derived", WHY_DERIVED.get(fields.get(key, ""), "added for readers that use this key")
            )


def _fields(dialect: Format) -> dict[str, str]:
    """Dotted key -> the field that it states."""
    return {key: FOLLOWS_FROM.get(field, field) for field, keys in dialect.keys.items() for key in keys}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, where true and 1 differ."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
