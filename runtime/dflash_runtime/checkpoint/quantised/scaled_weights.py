"""Weights of eight bits and their scales, as headers show them. Needs no torch."""

import re
from collections.abc import Iterator

from dflash_runtime.checkpoint.layout import PACKED_DTYPES
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import CheckpointError

E4M3 = "F8_E4M3"

SCALE_ENDS = ("_scale_inv", "_scale")
INPUT_ENDS = ("input_scale", "activation_scale")
"""Ends of the names of scales: of a weight `X.weight` the scales `X.weight_scale`, and of its input `X.input_scale`."""

OTHER_SCALES = (".scale", ".qscale_weight")
"""Ends that replace `.weight` in the names of scales. Only transformers reads them."""

ENDS = (*(f"{mark}{end}" for end in INPUT_ENDS for mark in "._"), *SCALE_ENDS, *OTHER_SCALES)

SCALE_TYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0")

KV_SCALES = re.compile(r".*\.((kv|prob|[kvq])_scale|[kvq]_proj\.output_scale)")
"""Scales of a KV cache in FP8. `models.kv_scales` reads them if the run stores KV in FP8."""

MATRIX = re.compile(r".*(\.weight|\.experts\.\w+_proj)")
"""A weight, or the weights of all experts."""


def is_scale(name: str) -> bool:
    """Whether a name is the name of scales of a weight or of its input."""
    return name.endswith((*SCALE_ENDS, *INPUT_ENDS))


def is_of_activations(name: str) -> bool:
    """Whether a name is the name of a scale of activations or of a KV cache, which dequantised weights do without."""
    return name.endswith(INPUT_ENDS) or KV_SCALES.fullmatch(name) is not None


def scales_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield each weight with each of its scales, and with the scale of its input."""
    stored = checkpoint.tensors
    for name in stored:
        if not name.endswith(ENDS):
            continue
        end = next(end for end in ENDS if name.endswith(end))
        owner = name.removesuffix(end) + (".weight" if end.startswith(".") else "")
        is_named_so = end in OTHER_SCALES and owner in stored and stored[owner].dtype not in PACKED_DTYPES
        if owner in stored and not is_named_so:  # parts of plain models are called `scale` too
            yield owner, name


def check_scaled(checkpoint: Checkpoint, expected: str) -> None:
    """Require that weights with scales have the element type `expected`, and that weights of this type have scales.

    Raises:
        CheckpointError: names the first weight or scale of another element type, or the first weight without scales.
    """
    stored, scaled = checkpoint.tensors, set()
    for name, scale in scales_of(checkpoint):
        found = stored[name].dtype
        if found != expected:
            text = f"{name} is {found} and has scales ({scale}), expected {expected}"
            raise malformed(checkpoint, "scale-of-other-type", name, text, expected, found)
        found = stored[scale].dtype
        if found not in SCALE_TYPES:
            text = f"{scale} is {found}, expected {', '.join(SCALE_TYPES[:-1])} or {SCALE_TYPES[-1]}"
            raise malformed(checkpoint, "scale-type", scale, text, ", ".join(SCALE_TYPES), found)
        if not scale.endswith(INPUT_ENDS):
            scaled.add(name)
    for name, info in stored.items():
        if info.dtype not in PACKED_DTYPES or len(info.shape) < 2 or not MATRIX.fullmatch(name):
            continue
        if info.dtype != expected:
            text = f"{name} is {info.dtype}, expected {expected} or plain numbers, as the config says"
            raise malformed(checkpoint, "weight-type", name, text, expected, info.dtype)
        if name not in scaled:
            text = f"the scale of {name} is missing"
            raise malformed(checkpoint, "scale-missing", name, text, " or ".join(SCALE_ENDS))


def malformed(
    checkpoint: Checkpoint, id: str, field: str, text: str, expected: str, found: object = None
) -> CheckpointError:
    """Return the error about a weight or its scales."""
    hint = "export the checkpoint again with its scales"
    return CheckpointError(text, id=id, path=checkpoint.path, field=field, found=found, expected=expected, hint=hint)
