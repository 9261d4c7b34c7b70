"""Read the scales of quantised weights, and refuse values that no scale has."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dflash_runtime.checkpoint.quantised.scaled_weights import malformed, scales_of
from dflash_runtime.checkpoint.stored.files import Checkpoint

NO_NUMBER = 255
"""The exponent that stands for NaN in scales that are powers of two (e8m0)."""


def read_scales(checkpoint: Checkpoint, names: Iterable[str], device: str = "cpu") -> dict[str, Tensor]:
    """Read scales onto a device in float32.

    Raises:
        CheckpointError: a scale is not a positive number.
    """
    found = {name: tensor.float() for name, tensor in checkpoint.load_many(list(names), device)}
    if found and not bool(torch.stack([_are_positive(tensor).all() for tensor in found.values()]).all()):
        name, tensor = next(item for item in found.items() if not bool(_are_positive(item[1]).all()))
        raise _wrong_value(checkpoint, name, float(tensor[~_are_positive(tensor)][0]))
    return found


def check_exponents(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and check the scales of MXFP4 among them. They are exponents.

    Raises:
        CheckpointError: an exponent stands for NaN.
    """
    for name, tensor in tensors:
        if name.endswith("_scales") and tensor.dtype == torch.uint8 and bool((tensor == NO_NUMBER).any()):
            raise _wrong_value(checkpoint, name, float("nan"))
        yield name, tensor


def check_all_scales(checkpoint: Checkpoint) -> None:
    """Check the values of all scales of a checkpoint. Raises the errors of `read_scales` and `check_exponents`."""
    read_scales(checkpoint, (scale for _, scale in scales_of(checkpoint)))
    exponents = [name for name in checkpoint.tensors if name.endswith("_scales")]
    for _ in check_exponents(checkpoint, checkpoint.load_many(exponents)):
        pass


def _are_positive(scales: Tensor) -> Tensor:
    return (scales > 0) & scales.isfinite()


def _wrong_value(checkpoint: Checkpoint, name: str, value: float) -> Exception:
    text = f"{name} has a scale of {value:g}, expected positive numbers"
    return malformed(checkpoint, "scale-invalid", name, text, "positive numbers", value)
