"""The fingerprint of a loaded pair: all facts that determine the content of its KV and the layout of its pages."""

from typing import Any

from dflash_runtime.config import DraftConfig, RopeConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.kv_transfer.fingerprint import NO_DRAFT, Fingerprint

LAYOUT = "pages, layers, keys and values, rows, heads"
"""The order of dimensions in payload tensors. Another order needs another name."""


def fingerprint(pair: LoadedPair) -> Fingerprint:
    """The fingerprint of a pair. Pairs with equal fingerprints can continue from each other's KV.

    Weights are compared by digest, not by name. The digests of a pair built in Python are None.
    """
    target, config = pair.target.config, pair.config
    fields: dict[str, Any] = {
        "target weights": pair.weight_digests.get("target"),
        "target model_type": target.model_type,
        "target KV heads": [list(shape) for shape in target.kv_shapes],
        "target windows": list(target.windows),
        "target rope": _rope(target.rope),
        "target runtime": "own cache" if target.own_cache is not None else "pages",
        "dtype": pair.placement.dtype_name,
        "page_size": config.page_size,
        "layout": LAYOUT,
    }
    if pair.rounding is not None:
        fields["rounding"] = pair.rounding
    draft = pair.draft.config if pair.draft is not None else None
    return Fingerprint({**fields, **_draft_fields(pair, draft)})


def _draft_fields(pair: LoadedPair, draft: DraftConfig | None) -> dict[str, Any]:
    if draft is None:
        return {"draft": NO_DRAFT}
    return {
        "draft": draft.family,
        "draft weights": pair.weight_digests.get("draft"),
        "draft KV heads": [list(shape) for shape in draft.kv_shapes],
        "target_layer_ids": list(draft.target_layer_ids),
        "num_speculative_tokens": pair.limits.num_draft_tokens,
        "block_size": draft.block_size,
        "draft windows": list(draft.windows),
        "draft causal": list(draft.causal),
        "draft rope": _rope(draft.rope),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    return {"theta": rope.theta, "kind": rope.kind, **dict(rope.params)}
