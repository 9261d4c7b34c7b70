"""Scales of keys and values in FP8 that a target's checkpoint stores.

Stored numbers times the scale are the keys or the values. vLLM, llm-compressor and Model-Optimizer checkpoints hold one
scale per layer for keys and one for values. Sources: vLLM 0.33.0 model_executor/model_loader/weight_utils.py
(`maybe_remap_kv_scale_name`) and layers/quantization/kv_cache.py, compressed-tensors 0.12
quantization/lifecycle/initialize.py.
"""

import math
import re

from dflash_kernels.kv.kv_format import KVScales
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import MISSING, CheckpointError, UnsupportedError

NAMES = re.compile(
    r"(?:model\.|language_model\.)*layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?(kv|[kv])_scale|([kv])_proj\.output_scale)"
)
"""Names of scales, with the number of the layer and `k`, `v`, or `kv` for both."""


def read_kv_scales(checkpoint: Checkpoint) -> dict[int, KVScales]:
    """Return the scales of each layer that has some. Values without a scale of their own have the scale of the keys.

    Raises:
        UnsupportedError: a scale for each head.
        CheckpointError: a scale is not a positive number, a layer has two scales for one side, or none for its keys.
    """
    names = {name: match for name in checkpoint.tensors if (match := NAMES.fullmatch(name))}
    found: dict[int, dict[str, float]] = {}
    for name, tensor in checkpoint.load_many(list(names)):
        if tensor.numel() != 1:
            raise UnsupportedError(
                id="kv-scale-of-heads", path=checkpoint.path, field=name, found=list(tensor.shape),
                expected="one scale for all heads", hint="--kv-dtype auto keeps KV in the dtype of the run",
            )  # fmt: skip
        scale, sides = float(tensor), found.setdefault(int(names[name][1]), {})
        if not (math.isfinite(scale) and scale > 0):
            raise _invalid(checkpoint, name, scale, "a positive number")
        for side in names[name][2] or names[name][3]:
            if side in sides:
                raise _invalid(checkpoint, name, scale, "one scale per layer")
            sides[side] = scale
    for layer, sides in found.items():
        if "k" not in sides:
            raise _invalid(checkpoint, f"layers.{layer}.self_attn.k_scale", MISSING, "a scale of keys beside v_scale")
    return {layer: KVScales(sides["k"], sides.get("v", sides["k"])) for layer, sides in found.items()}


def _invalid(checkpoint: Checkpoint, name: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(
        id="kv-scale-invalid", path=checkpoint.path, field=name, found=found, expected=expected,
        hint="--kv-dtype auto needs no scales of KV",
    )  # fmt: skip
