"""Find the operations of a model that a CUDA graph cannot contain, by running the model once.

A CUDA graph replays launches. So the host must not read a tensor's value, and no shape may depend on a value. Numbers
of the host must not become a tensor on the device. torch shows every operation to a mode, on every device. So the
CPU finds the operations too.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "grouped_mm_fallback"})
"""Operations that give the host a tensor's value."""

SHAPED_BY_VALUES = frozenset(
    {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
)
"""Operations with results of a shape that depends on values."""

COPIES = frozenset({"tolist", "numpy", "cpu", "__array__"})
"""Methods of a tensor that copy its values to the host, and that an operation does not show on the CPU."""

MADE_FROM_NUMBERS = frozenset({"tensor", "as_tensor", "new_tensor"})
"""Functions that make a tensor from numbers of the host."""

INDEXED = frozenset({"index", "index_put", "index_put_", "_unsafe_index"})
"""Operations with indices. The result of a mask has as many rows as the mask has true values."""


class HostRead(Exception):
    """A model ran an operation that a CUDA graph cannot contain.

    operation   its name in torch, such as `nonzero`
    place       the file and function of the code that ran it
    """

    def __init__(self, operation: str, place: str) -> None:
        super().__init__(f"{operation} in {place}")
        self.operation, self.place = operation, place


class _Operations(TorchDispatchMode):
    """Raises `HostRead` at the first operation that a CUDA graph cannot contain."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = func.overloadpacket.__name__
        is_cut = name == "repeat_interleave" and given.get("output_size") is None and func._overloadname == "Tensor"
        if name in READS or name in SHAPED_BY_VALUES or is_cut or (name in INDEXED and _has_mask(args[1])):
            raise HostRead(name, _place())
        return func(*args, **given)


class _Functions(TorchFunctionMode):
    """Raises `HostRead` at copies between host and device that no operation shows on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        is_made = name == "new_tensor" or (name in MADE_FROM_NUMBERS and given.get("device") is not None)
        if name in COPIES or (is_made and not any(isinstance(item, Tensor) for item in args[-1:])):
            raise HostRead(name, _place())
        return func(*args, **given)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) for item in indices)


def _place() -> str:
    """Return the file and function of the innermost code that is neither torch's nor ours."""
    torch_folder, here = Path(torch.__file__).parent, Path(__file__)
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path != here and torch_folder not in path.parents:
            return f"{path.name}:{frame.name}"
    return "torch"


def find_host_read(run: Callable[[], object]) -> HostRead | None:
    """Run a function -> the first operation that a CUDA graph cannot contain, or None.

    The function runs outside inference mode, in which torch does not show that a value is read.
    """
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), _Functions(), _Operations():  # type: ignore[no-untyped-call]
            run()
    except HostRead as found:
        return found
    return None
