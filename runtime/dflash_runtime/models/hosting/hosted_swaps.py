"""Modules of a hosted target that our kernels compute instead of transformers' code: a swap.

A swap never follows from a name. A module is swapped if, right after loading, its swap agrees with it on random rows in
the dtype of the run (`agreement.py` has the criterion). The inputs of the comparison have the shapes and the further
arguments of a real call. Of several possible swaps the one with the smallest error is taken.

| module | swap |
|---|---|
| attention | queries, keys and values in one product; head norms, rotation and stored KV in one launch |
| gated feed-forward | both products and the gate in one launch, then the product down |
| norm | one launch, with a weight as stored, or stored as a difference from 1 |
| linear | our product of few rows |

A swapped module keeps its parameters. Stacked weights replace them as views, so they need no more memory.

`swapped_attention.py` and `swapped_modules.py` have the swaps. Axis letters: T flat rows.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash_runtime.models.agreement import error_of, random_like, tolerance_of
from dflash_runtime.models.hosting.hosted_attention import HostedAttention, OwnValues, calling
from dflash_runtime.models.hosting.swapped_attention import find_attention
from dflash_runtime.models.hosting.swapped_modules import (
    Call,
    Setting,
    Swap,
    find_feed_forwards,
    find_linears,
    find_norms,
)

SCALES = (1.0, 1e-3, 30.0)
"""Rows of the comparison have these sizes in turn. Small rows show the epsilon of a norm."""

LEAST_LIKENESS = 32
"""A whole model with swaps may differ from the model without them by this many roundings of the dtype."""


@dataclass(slots=True)
class Swaps:
    """The swapped modules of a model, by name, and how many modules of each kind there were."""

    modules: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Number of swapped modules of each kind."""
        kinds = [kind for _, kind in self.modules.values()]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def undo(self) -> None:
        """Give every module its own forward back."""
        for module, _ in self.modules.values():
            del module.forward
        self.modules.clear()


def swap_modules(decoder: nn.Module, setting: Setting, run: Callable[[], Tensor]) -> Swaps:
    """Swap modules of a decoder where the swap agrees with the module. `run` gives its hidden states [T, hidden].

    If the decoder with all swaps differs from the decoder without them, no module stays swapped.
    """
    swaps = Swaps()
    with recording(decoder) as calls:
        before = run()
    for name, module in decoder.named_modules():
        if name not in calls or any(name.startswith(f"{outer}.") for outer in swaps.modules):
            continue
        with calling(HostedAttention(setting.config, OwnValues())):
            best = find_swap(module, calls[name], setting)
        if best is not None:
            best.put_into(module)
            swaps.modules[name] = (module, best.kind)
    if swaps.modules and not _is_alike(run(), before):
        swaps.undo()
    return swaps


def _is_alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether hidden states are equal except for roundings of many layers."""
    least = max(LEAST_LIKENESS * torch.finfo(theirs.dtype).eps, 1e-3)
    return bool((ours.double() - theirs.double()).norm() <= least * theirs.double().norm())


@contextmanager
def recording(decoder: nn.Module) -> Iterator[dict[str, Call]]:
    """Record the first call of every module inside the block, by the module's name."""
    calls: dict[str, Call] = {}

    def record(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.setdefault(name, Call(args, kwargs, output))

        return keep

    hooks = [
        module.register_forward_hook(record(name), with_kwargs=True)
        for name, module in decoder.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def find_swap(module: nn.Module, call: Call, setting: Setting) -> Swap | None:
    """Return the swap with the smallest error, or None if no swap agrees with the module."""
    best, least = None, float("inf")
    for find in FINDERS:
        for swap in find(module, call, setting):
            error = _compare(module, swap, call)
            if error < least:
                best, least = swap, error
    return best


def _compare(module: nn.Module, swap: Swap, call: Call) -> float:
    """Return the error of a swap on random rows, or infinity if it does not agree with the module."""
    args, kwargs = _randomised(call)
    try:
        ours, theirs = (_rows_of(forward(*args, **kwargs)) for forward in (swap.forward, module.forward))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):  # sizes that a kernel does not take
        return float("inf")
    error = error_of(ours, theirs)
    return error if error <= tolerance_of(theirs.dtype) else float("inf")


def _randomised(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with random rows of different sizes."""
    args, kwargs = list(call.args), dict(call.kwargs)
    rows = _random_rows(args[0] if args else kwargs["hidden_states"])
    if args:
        return (rows, *args[1:]), kwargs
    return (), {**kwargs, "hidden_states": rows}


def _random_rows(like: Tensor) -> Tensor:
    sizes = torch.tensor(SCALES, dtype=like.dtype, device=like.device)
    rows = random_like(like, tuple(like.shape))
    axis = max(range(like.dim() - 1), key=lambda item: like.shape[item])  # the axis of rows
    factors = sizes[torch.arange(like.shape[axis], device=like.device) % len(SCALES)]
    return rows * factors.view([-1 if item == axis else 1 for item in range(like.dim())])


def _rows_of(output: Any) -> Tensor:
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    return rows


FINDERS: Iterable[Callable[[nn.Module, Call, Setting], Iterator[Swap]]] = (
    find_attention, find_feed_forwards, find_norms, find_linears,
)  # fmt: skip
"""Functions that yield the swaps which a module may have."""
