"""The import of Triton, the checks before a launch, and the arithmetic of its tiles.

Kernel modules can be imported without Triton, for their references; only launches fail.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the floating point kernels. Only the references compute in float64."""

NOT_INSTALLED = "Triton is not installed: install Triton, or choose the reference kernels"
CANNOT_RUN = (
    "Triton kernels cannot run on {device}: choose the reference kernels, "
    "or set TRITON_INTERPRET=1 before Triton is imported"
)


class _Absent:
    """Stand-in for Triton, its language and its kernels. Every name exists, but launching a kernel fails."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *_: object, **__: object) -> "_Absent":
        return self

    def __getitem__(self, grid: object) -> "_Absent":
        raise RuntimeError(NOT_INSTALLED)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _Absent()


triton, tl = _import("triton"), _import("triton.language")
TensorDescriptor = _import("triton.tools.tensor_descriptor").TensorDescriptor
HAS_TRITON = not isinstance(triton, _Absent)
IS_INTERPRETED: bool = HAS_TRITON and triton.knobs.runtime.interpret
"""Whether kernels run on the CPU in Triton's interpreter. TRITON_INTERPRET decides this when Triton is imported."""

jit = triton.jit
constexpr_function = triton.constexpr_function
constexpr = tl.constexpr


def check_tensors(*tensors: Tensor) -> None:
    """Raise if Triton cannot read these tensors. A launcher never falls back to its reference.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: tensors on different devices, or on a device that Triton cannot use.
    """
    if not HAS_TRITON:
        raise RuntimeError(NOT_INSTALLED)
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"tensors of one launch: expected one device, found {device} and {tensor.device}")
    if device.type == "cuda":
        if device.index != torch.cuda.current_device():
            current = f"cuda:{torch.cuda.current_device()}"
            raise ValueError(f"tensors of one launch: expected the current device, {current}, found {device}")
    elif not (device.type == "cpu" and IS_INTERPRETED):
        raise ValueError(CANNOT_RUN.format(device=device))


def check_dtypes(*tensors: Tensor) -> None:
    """Raise TypeError unless all tensors have the same dtype, one of FLOATS. A reference would promote mixed dtypes."""
    dtype = tensors[0].dtype
    if dtype not in FLOATS:
        raise TypeError(f"Triton kernels: expected float32, float16 or bfloat16, found {dtype}")
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"tensors of one launch: expected one dtype, found {dtype} and {tensor.dtype}")


def require(is_met: bool, argument: str, expected: str) -> None:
    """Raise ValueError unless an argument of a launcher is as expected. Checks read shapes, never device values."""
    if not is_met:
        raise ValueError(f"{argument}: expected {expected}")


def power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def warps_for(num_elements: int) -> int:
    """Return the number of warps for this many elements: eight elements per thread, from 1 to 16 warps."""
    return min(max(power_of_2(num_elements) // 256, 1), 16)
