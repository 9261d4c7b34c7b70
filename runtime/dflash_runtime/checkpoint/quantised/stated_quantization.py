"""Where a checkpoint states how its weights are quantised, and whether its statements agree. Needs no torch."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.targets.target_facts import MLX, PACKING, decoder_config, mlx_bits
from dflash_runtime.errors import MAX_FOUND_CHARS, CheckpointError, InvalidConfig
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.phrases import shorten

CONFIG_KEY = "quantization_config"
"""The only key that transformers reads. With another key it would load quantised weights as if they were plain."""

MODELOPT = "modelopt"
"""The method that Model-Optimizer's own file states."""

COMPARED = ("quant_method", "quant_algo", "fmt", "weight_block_size", "activation_scheme", "format", "config_groups")
"""Settings that two statements of one checkpoint must not state differently."""

COUNT = re.compile(r"[0-9]{1,9}")

SCHEMES, FLOATS = ("dynamic", "static"), ("e4m3", "e5m2")
"""Values of `activation_scheme` and `fmt` of the method `fp8`."""


def stated_quantization(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the object in which a checkpoint states its quantization, {} without one.

    The config comes before Model-Optimizer's file. Settings in an inner object `quantization` become outer ones.
    """
    found = next((stated for place, stated in _statements(checkpoint) if place.endswith(CONFIG_KEY)), None)
    return found or _of_file(checkpoint)


def check_statements(checkpoint: Checkpoint) -> None:
    """Check the settings that a checkpoint states for quantised weights.

    Raises:
        InvalidConfig: a setting has a value that no reader knows.
        CheckpointError: two statements contradict each other.
    """
    for owner, config in _configs(checkpoint):
        stated = config.get(CONFIG_KEY)
        if stated is not None and not isinstance(stated, dict):
            raise InvalidConfig(f"{owner}{CONFIG_KEY}", stated, "an object", path=checkpoint.config_path)
    _check_fp8(checkpoint, stated_quantization(checkpoint))
    (place, first), *others = [*_statements(checkpoint), (QUANTIZATION_FILE, _of_file(checkpoint))]
    for other, stated in others:
        for key in COMPARED:
            if key in first and key in stated and first[key] != stated[key]:
                found, wanted = (shorten(str(item[key]), MAX_FOUND_CHARS) for item in (first, stated))
                text = f"{place} states {key} {found}, and {other} states {wanted}"
                raise CheckpointError(
                    text, id="quantizations-differ", path=checkpoint.path, field=f"{place}.{key}", found=found,
                    expected=wanted, hint="remove the statement that does not describe the weights",
                )  # fmt: skip


def _check_fp8(checkpoint: Checkpoint, stated: Mapping[str, Any]) -> None:
    if stated.get("quant_method") != "fp8":
        return
    block = stated.get("weight_block_size")
    for key, is_right, expected in (
        ("weight_block_size", block is None or is_block(block), "two numbers above 0"),
        ("activation_scheme", stated.get("activation_scheme", "dynamic") in SCHEMES, " or ".join(SCHEMES)),
        ("fmt", stated.get("fmt") in (None, *FLOATS), " or ".join(FLOATS)),
    ):
        if not is_right:
            field = f"{CONFIG_KEY}.{key}"
            raise InvalidConfig(field, stated[key], expected, id="quantization-setting", path=checkpoint.config_path)


def is_block(block: object) -> bool:
    """Whether a setting gives the rows and columns of blocks."""
    return isinstance(block, list) and len(block) == 2 and all(is_int(length) and length > 0 for length in block)


def block_structure(weights: Mapping[str, Any]) -> Any:
    """Return the block of a scheme of compressed-tensors, which some releases write as `128x128` instead of a list."""
    stated = weights.get("block_structure")
    parts = stated.split("x") if isinstance(stated, str) else []
    return [int(part) for part in parts] if parts and all(map(COUNT.fullmatch, parts)) else stated


def _configs(checkpoint: Checkpoint) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config with the prefix "", and the decoder's config with the prefix of its keys."""
    yield "", checkpoint.config
    text, key = decoder_config(checkpoint.config, checkpoint.config_path)
    if key is not None:
        yield f"{key}.", text


def _statements(checkpoint: Checkpoint) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the statements of the configs, by their keys."""
    for owner, config in _configs(checkpoint):
        for key in (CONFIG_KEY, *PACKING[1:]):
            if stated := as_object(config.get(key)):
                inner = as_object(stated.get("quantization")) if stated.get("quant_method") == MODELOPT else {}
                yield f"{owner}{key}", {**stated, **inner}
        if (bits := mlx_bits({**config, CONFIG_KEY: None})) is not None:
            yield f"{owner}quantization", {"quant_method": f"{MLX}, {bits} bits"}


def _of_file(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the settings of Model-Optimizer's file, {} if there is none or if it quantises only a KV cache."""
    found = checkpoint.read_optional_json(QUANTIZATION_FILE)
    inner = as_object(as_object(found).get("quantization"))
    is_modelopt = as_object(as_object(found).get("producer")).get("name") == MODELOPT
    return {**inner, "quant_method": MODELOPT} if is_modelopt and inner.get("quant_algo") else {}
