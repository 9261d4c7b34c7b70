"""Run inline assembly in Triton's interpreter, so that kernels that are partly assembly run whole on the CPU.

The values of a program have one layout, one element per thread, and the program's addresses are those of this process.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_testing.async_assembly import LANES, WORD
from dflash_testing.warp_assembly import run_warps


class ProcessMemory:
    """The memory of this process."""

    def load(self, addresses: Tensor) -> Tensor:
        return torch.tensor([ctypes.c_uint32.from_address(address).value for address in addresses.tolist()])


def interpret_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run assembly, and round to bfloat16 as a GPU does: it would cut numbers off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(tl, "inline_asm_elementwise", _run)


def _run(text: Any, constraints: Any, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Run assembly for all threads, and return its results as tensors of the interpreter."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not args:  # a fence
        return None
    has_many = isinstance(dtype, (tuple, tl.tuple))
    types = list(dtype) if has_many else [dtype]
    given = {f"${len(types) + place}": _words(value.handle.data) for place, value in enumerate(args)}
    warps = len(next(iter(given.values())))
    ended = run_warps(getattr(text, "value", text), warps, given, ProcessMemory(), is_late=True)
    results = []
    for place, kind in enumerate(types):
        found = torch.cat([registers[f"${place}"] for registers in ended])
        words = found.float().numpy() if found.is_floating_point() else found.numpy().astype(np.uint32)
        data = words.view(np.float32 if kind == tl.float32 else np.int32)
        results.append(tl.tensor(TensorHandle(data, kind), tl.block_type(kind, [warps * LANES])))
    return tuple(results) if has_many else results[0]


def _words(values: Any) -> Tensor:
    """Return the words or addresses in an array of threads, int64 [W, 32]."""
    is_wide = values.dtype.itemsize == 8
    numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.int64 if is_wide else np.int32).astype(np.int64))
    return (numbers if is_wide else numbers & WORD).view(-1, LANES)
