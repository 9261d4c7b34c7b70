"""Launches in the interpreter, and the kernel that Triton would compile for each launch."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Key = tuple[str, tuple[Any, ...]]

OUTPUTS = ("out", "normed", "total")
"""Names of outputs of kernels that only compute. If a test ignores the numbers, zeros replace them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the key of its compiled kernel, and its grid."""

    key: Key
    grid: tuple[int, ...]


@contextmanager
def seen_launches(*, compute: Literal["all", "choices", "nothing"] = "all") -> Iterator[list[Launch]]:
    """Record every launch of the block. With `choices`, kernels with OUTPUTS write zeros, which takes no time."""
    from triton.runtime.interpreter import InterpretedFunction

    run, launches = InterpretedFunction.run, []

    def seen(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append(Launch(kernel_key(self, args, kwargs), tuple(grid)))
        given = dict(zip(self.arg_names, args, strict=False))
        outputs = [given[name] for name in OUTPUTS if name in given]
        if compute == "nothing":
            return None
        if compute == "all" or not outputs:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        for output in outputs:
            (output if isinstance(output, Tensor) else output.base).zero_()  # a descriptor has its tensor in `base`
        return None

    InterpretedFunction.run = seen
    try:
        yield launches
    finally:
        InterpretedFunction.run = run


def kernel_key(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """Return everything that decides whether Triton compiles again.

    That is types, alignment, values of 1, multiples of 16, constants and options.
    """
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    signature = inspect.signature(function.fn)
    given = signature.bind(*args, **{name: value for name, value in kwargs.items() if name in signature.parameters})
    excepted = function.kwargs["do_not_specialize"] or ()
    parts: list[Any] = [(name, value) for name, value in kwargs.items() if name not in signature.parameters]
    for name, value in given.arguments.items():
        if "constexpr" in str(signature.parameters[name].annotation):
            parts.append((name, value))
        else:
            parts.append((name, *native_specialize_impl(BaseBackend, value, False, name not in excepted, True)))
    return function.fn.__name__, tuple(parts)
