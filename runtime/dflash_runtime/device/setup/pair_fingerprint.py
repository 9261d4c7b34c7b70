"""The fingerprint of a loaded pair: all facts that determine the content of its KV and the layout of its pages."""

from collections.abc import Mapping
from typing import Any

from dflash_runtime.checkpoint.stored.weight_digests import WeightDigest
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.documents import to_json
from dflash_runtime.kv_transfer.fingerprint import NO_DRAFT, Fingerprint

LAYOUT = "pages, layers, keys and values, rows, heads"
"""The order of dimensions in payload tensors. Another order needs another name."""

NOT_IN_TARGET = {
    "dtype": "the format on disk; the format of the run is the field `dtype`",
    "eos_token_ids": "they end a text and change no row of it",
    "nested_in": "the key of the config file that held the config",
    "own_cache": "sizes of the target's own cache; the field `target runtime` states that it has one",
    "other_kv_shapes": "the field `target KV heads` has the shapes of all layers",
}
"""Fields of a target's config that no KV depends on -> the reason."""

NOT_IN_DRAFT = {
    "dtype": "the format on disk; the format of the run is the field `dtype`",
    "verifier": "the name of the target",
    "num_target_layers": "only compared with the target",
    "target_hidden_size": "only compared with the target; the weights have this width",
    "has_target_scale": "the origin of `input_embedding_scale`",
}
"""Fields of a draft's config that no KV depends on -> the reason."""

NOT_IN_CODE = {
    "_name_or_path": "where the checkpoint was found",
    "transformers_version": "the release that wrote the file",
    "dtype": "the format on disk; the format of the run is the field `dtype`",
    "bos_token_id": "texts are token ids already",
    "eos_token_id": "it ends a text and changes no row of it",
    "pad_token_id": "rows are not padded",
    "use_cache": "stated in each call",
    "output_attentions": "more outputs of the same rows",
    "output_hidden_states": "more outputs of the same rows",
    "return_dict": "the form of outputs",
}
"""Keys of a config of transformers that no KV depends on -> the reason."""


def fingerprint(pair: LoadedPair) -> Fingerprint:
    """The fingerprint of a pair. Pairs with equal fingerprints can continue from each other's KV.

    It has every field of both configs, except fields that are known not to matter. A target that transformers runs also
    has every key of the config that transformers reads. Weights are compared by digest, not by name: the fingerprint
    waits for the digests, and the digests of a pair built in Python are None.
    """
    target, config = pair.target.config, pair.config
    fields: dict[str, Any] = {
        "target weights": _digest(pair, "target"),
        "target KV heads": [list(shape) for shape in target.kv_shapes],
        "target runtime": "own cache" if target.own_cache is not None else "pages",
        **_config_fields("target ", to_json(target), NOT_IN_TARGET),
        **_config_fields("target config.", getattr(pair.target, "code_config", {}), NOT_IN_CODE),
        "dtype": pair.placement.dtype_name,
        "KV dtype": pair.placement.page_dtype_name,
        "page_size": config.page_size,
        "layout": LAYOUT,
    }
    if pair.kv_scales:
        fields["target KV scales"] = {str(layer): list(scales) for layer, scales in sorted(pair.kv_scales.items())}
    if pair.rounding is not None:
        fields["rounding"] = pair.rounding
    return Fingerprint({**fields, **_draft_fields(pair)})


def _draft_fields(pair: LoadedPair) -> dict[str, Any]:
    if pair.draft is None:
        return {"draft": NO_DRAFT}
    draft = pair.draft.config
    return {
        "draft": draft.family,
        "draft weights": _digest(pair, "draft"),
        "draft KV heads": [list(shape) for shape in draft.kv_shapes],
        "num_speculative_tokens": pair.limits.num_draft_tokens,
        **_config_fields("draft ", to_json(draft), NOT_IN_DRAFT),
    }


def _digest(pair: LoadedPair, model: str) -> str | None:
    digest: WeightDigest | None = pair.weight_digests.get(model)
    return None if digest is None else digest.value


def _config_fields(prefix: str, config: Mapping[str, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in config.items() if name not in left_out}
