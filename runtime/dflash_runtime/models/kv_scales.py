"""Scales of keys and values in FP8 that a target's checkpoint stores.

Stored numbers times the scale are the keys or the values. vLLM, llm-compressor and Model-Optimizer checkpoints hold one
scale per layer for keys and one for values. Sources: vLLM 0.33.0 model_executor/model_loader/weight_utils.py
(`maybe_remap_kv_scale_name`), compressed-tensors 0.12 quantization/lifecycle/initialize.py.
"""

import math
import re

from dflash_kernels.kv_format import UNSCALED, KVScales
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.errors import CheckpointError, UnsupportedError

NAMES = re.compile(
    r"(?:model\.|language_model\.)*layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
"""Names of scales, with the number of the layer and `k` or `v`."""


def read_kv_scales(checkpoint: Checkpoint) -> dict[int, KVScales]:
    """Return the scales of each layer that has some. A side without a scale has the scale 1.

    Raises:
        UnsupportedError: a scale for each head.
        CheckpointError: a scale is not a positive number, or a layer has two scales for one side.
    """
    names = {name: match for name in checkpoint.tensors if (match := NAMES.fullmatch(name))}
    found: dict[int, KVScales] = {}
    seen: set[tuple[int, str]] = set()
    for name, tensor in checkpoint.load_many(list(names)):
        layer, side = int(names[name][1]), names[name][2] or names[name][3]
        if tensor.numel() != 1:
            raise UnsupportedError(
                id="kv-scale-of-heads", path=checkpoint.path, field=name, found=list(tensor.shape),
                expected="one scale for all heads", hint="--kv-dtype auto keeps KV in the dtype of the run",
            )  # fmt: skip
        scale = float(tensor)
        if not (math.isfinite(scale) and scale > 0) or (layer, side) in seen:
            expected = "one scale per layer" if (layer, side) in seen else "a positive number"
            raise CheckpointError(
                id="kv-scale-invalid", path=checkpoint.path, field=name, found=scale, expected=expected
            )
        seen.add((layer, side))
        both = found.get(layer, UNSCALED)
        found[layer] = both._replace(key=scale) if side == "k" else both._replace(value=scale)
    return found
