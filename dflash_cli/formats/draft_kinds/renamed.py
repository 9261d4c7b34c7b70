"""The config of a draft of another kind under the names of another dialect or engine. The draft stays the same."""

import copy
import re
from collections.abc import Mapping
from typing import Any

from dflash_cli.formats.dialect import Json
from dflash_cli.formats.draft_kinds.kind_reading import CONTAINER, KindReading
from dflash_cli.formats.draft_kinds.table import Renaming, evaluate
from dflash_cli.formats.fields import REMOVED, look_up, with_keys
from dflash_runtime.errors import MISSING, LossyConversion, UnsupportedError, UsageError
from dflash_runtime.json_values import as_object

OF_SPECULATORS = (
    "speculators_model_type", "speculators_version", "speculators_config", CONTAINER, "has_no_defaults_at_init",
    "embed_requires_grad",
)  # fmt: skip
OF_ORIGIN = ("auto_map", "_name_or_path")
OF_DECODER = frozenset(
    {
        "attention_bias", "attention_dropout", "attn_output_gate", "bos_token_id", "dtype", "eos_token_id", "head_dim",
        "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings",
        "max_window_layers", "mlp_bias", "model_type", "num_attention_heads", "num_experts", "num_hidden_layers",
        "num_key_value_heads", "pad_token_id", "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling",
        "rope_theta", "sliding_window", "torch_dtype", "use_cache", "use_sliding_window", "vocab_size",
    }
)  # fmt: skip
"""Keys of a decoder, which speculators keeps in an object of their own."""
VERSION = "0.9.0"
"""The release of speculators that defines the written layout."""
ALIKE = {"rope_parameters": ("rope_theta", "rope_scaling")}
"""Key -> the keys that state the same."""
SLIDING = "sliding_attention"
FLAG = "sliding_window_non_causal"


def renamed_tensor(name: str, renaming: Renaming) -> str:
    """The name of a tensor in the result."""
    for pattern, replacement in renaming.tensors.items():
        new, count = re.subn(pattern, replacement, name)
        if count:
            return new
    return name


def renamed_config(reading: KindReading, renaming: Renaming, verifier: Mapping[str, Any] | None) -> Json:
    """The config in the result.

    Raises:
        UsageError: the result names the target, and its name is not known.
        UnsupportedError: no name is known for the architecture of this model family.
        LossyConversion: the result cannot state how the rows of a block attend.
    """
    config = copy.deepcopy(dict(reading.config))
    if reading.variant != renaming.variant:
        config = _flat(config) if renaming.variant == "native" else _nested(config, reading, verifier)
    moved: dict[str, Any] = dict.fromkeys(OF_ORIGIN, REMOVED)
    for old, new in renaming.keys.items():
        value = look_up(config, old)
        if value is not MISSING:
            moved |= {old: REMOVED, new: value}
    config = with_keys(config, {**moved, "architectures": [_architecture(reading, renaming)]})
    for key, value in renaming.added.items():
        alike = (key, *ALIKE.get(key, ()))
        is_default = key == "model_type" or all(look_up(config, item) in (MISSING, None) for item in alike)
        config = with_keys(config, {key: _filled(value, reading)}) if is_default else config
    return _without_empty(config)


def _architecture(reading: KindReading, renaming: Renaming) -> str:
    """The entry of `architectures`."""
    name = reading.architecture(renaming)
    if name is not None:
        return name
    model_type = reading.values.get("model_type")
    raise UnsupportedError(
        f"model_type {model_type!r}: no name of {reading.kind.title} drafts is known for it "
        f"(known: {', '.join(renaming.families)})",
        id="family-not-named",
        field="model_type",
        found=model_type,
    )


def _filled(value: Any, reading: KindReading) -> Any:
    """A value, in which a text in braces is a formula."""
    formula = re.fullmatch(r"\{(.+)\}", value) if isinstance(value, str) else None
    return value if formula is None else evaluate(formula[1], reading.values)


def _flat(config: Json) -> Json:
    """A speculators config as a native one: decoder keys at the top level, layers counted from 0."""
    body = as_object(config.get(CONTAINER))
    flat = {**body, **{key: value for key, value in config.items() if key not in (*OF_SPECULATORS, FLAG)}}
    aux = flat.pop("aux_hidden_state_layer_ids", None)
    if aux is None:
        return flat
    own: Json = {"target_layer_ids": [layer - 1 for layer in aux]}
    if flat.get("mask_token_id") is not None:
        own["mask_token_id"] = flat.pop("mask_token_id")
    if config.get(FLAG) is not False or SLIDING not in (body.get("layer_types") or ()):
        flat["is_causal"] = False
    return {key: value for key, value in flat.items() if key != "sample_from_anchor"} | {"dflash_config": own}


def _nested(config: Json, reading: KindReading, verifier: Mapping[str, Any] | None) -> Json:
    """A native config as a speculators one: decoder keys in an object, layers counted from 1."""
    if verifier is None:
        raise UsageError(
            "the speculators dialect names the target, but the source does not",
            id="verifier-unknown",
            field="--target-name",
            hint="add --target TARGET or --target-name ORG/REPO",
        )
    body = {key: value for key, value in config.items() if key in OF_DECODER}
    rest = {key: value for key, value in config.items() if key not in OF_DECODER}
    method = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    block, own = reading.values.get("block"), as_object(rest.pop("dflash_config", None))
    kind = next(iter(reading.kind.types))
    nested: Json = {
        **rest,
        CONTAINER: body,
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "speculative_tokens": block - 1 if block else 3}],
            "verifier": dict(verifier),
        },
    }
    if own:
        nested |= _block_keys(config, own)
        nested.pop("is_causal", None)
    return nested


def _block_keys(config: Json, own: Mapping[str, Any]) -> Json:
    """The top-level keys that state the settings of a native `dflash_config`."""
    causal = config.get("is_causal", own.get("causal"))
    if causal is True:
        raise LossyConversion(
            "is_causal true: the speculators dialect cannot state causal full layers",
            id="cannot-state",
            field="is_causal",
            found=True,
        )
    left = {key: value for key, value in own.items() if key not in ("target_layer_ids", "mask_token_id", "causal")}
    return {
        **left,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
        "mask_token_id": own.get("mask_token_id", config.get("mask_token_id")),
        FLAG: causal is False,
        "sample_from_anchor": False,
    }


def _without_empty(config: Json) -> Json:
    return {key: value for key, value in config.items() if value != {}}
