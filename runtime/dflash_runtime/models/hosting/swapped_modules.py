"""Modules that our kernels compute instead of transformers' code: norms, linears and gated feed-forwards.

`hosted_swaps.py` compares each of them with the module. Axis letters: T flat rows, K inputs, N outputs, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_kernels.products.activation import GELU, SILU, Gate
from dflash_kernels.suite import Kernels
from dflash_runtime.models.agreement import agree
from dflash_runtime.models.hosting.hosted_attention import Scores
from dflash_runtime.models.layers import Linear
from dflash_runtime.target_config import TargetConfig

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of a module, and its result."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def is_plain(self) -> bool:
        """Whether the module got rows and nothing else, and returned rows."""
        return len(self.args) == 1 and not self.kwargs and all(map(is_rows, (*self.args, self.output)))


@dataclass(frozen=True, slots=True)
class Swap:
    """A function that may replace a module's forward.

    kind      the name of the swap in messages
    stacked   linears and the rows of a stacked weight that replace their weights
    """

    kind: str
    forward: Forward
    stacked: Sequence[tuple[nn.Linear, Tensor]] = ()

    def put_into(self, module: nn.Module) -> None:
        """Let a module call the swap."""
        for linear, rows in self.stacked:
            linear.weight = nn.Parameter(rows, requires_grad=False)
        module.forward = self.forward


@dataclass(frozen=True, slots=True)
class Setting:
    """Config and kernels of a target, and the scores of its attention layers."""

    config: TargetConfig
    kernels: Kernels
    scores: Mapping[int, Scores]


def is_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def own_linears(module: nn.Module, sinks: Tensor | None = None) -> dict[str, nn.Linear] | None:
    """Return the linears of a module by name, or None if a linear lies deeper, or the module has other parameters."""
    found = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    deeper = [child for child in module.modules() if isinstance(child, nn.Linear)]
    own = [parameter for parameter in module.parameters(recurse=False) if parameter is not sinks]
    is_plain = len(deeper) == len(found) and not own and all(not item.weight.is_meta for item in found.values())
    return found if 2 <= len(found) <= 4 and is_plain else None


def find_norms(module: nn.Module, call: Call, setting: Setting) -> Iterator[Swap]:
    """Yield swaps of a norm: with its weight in its dtype, in float32, or in float32 as a difference from 1."""
    if not call.is_plain or call.args[0].shape != call.output.shape:
        return
    for weight, eps in norm_weights(module, call.output.shape[-1], call.output):
        yield Swap("norm", SwappedNorm(weight, eps, setting.kernels))


def norm_weights(module: nn.Module, width: int, like: Tensor) -> Iterator[tuple[Tensor, float]]:
    """Yield the weights and the epsilon with which a module without children may be a norm of this width."""
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    parameters = list(module.parameters())
    if not isinstance(eps, float) or next(module.children(), None) is not None or len(parameters) > 1:
        return
    if not parameters:
        yield torch.ones(width, dtype=like.dtype, device=like.device), eps
        return
    weight = parameters[0].detach()
    if weight.shape != (width,):
        return
    yield weight, eps
    yield weight.float(), eps
    yield 1.0 + weight.float(), eps


@dataclass(frozen=True, slots=True)
class SwappedNorm:
    """A norm of the last axis."""

    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.kernels.rms_norm(hidden, self.weight, self.eps)


def find_linears(module: nn.Module, call: Call, setting: Setting) -> Iterator[Swap]:
    """Yield the swap of a product without bias."""
    if type(module) is nn.Linear and module.bias is None and call.is_plain:
        yield Swap("linear", SwappedLinear(Linear(module.weight.detach(), None, setting.kernels)))


@dataclass(frozen=True, slots=True)
class SwappedLinear:
    """A product with one weight."""

    linear: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return _by_rows(self.linear, hidden)


def _by_rows(compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Compute flat rows [T, K] -> [T, N] of a tensor with further axes before them."""
    rows = compute(hidden.reshape(-1, hidden.shape[-1]).contiguous())
    return rows.view(*hidden.shape[:-1], rows.shape[-1])


def find_feed_forwards(module: nn.Module, call: Call, setting: Setting) -> Iterator[Swap]:
    """Yield swaps of a gated feed-forward: two or three products, with rows of the gate before rows of `up`."""
    linears = own_linears(module)
    if linears is None or not call.is_plain or any(linear.bias is not None for linear in linears.values()):
        return
    gate = GELU if _has_tanh_gelu(module) else SILU
    for *inner, down in permutations(linears.values()):
        (width, inner_width), sizes = down.weight.shape, {tuple(linear.weight.shape) for linear in inner}
        if len(inner) == 2 and sizes == {(inner_width, width)}:
            joined = torch.cat([linear.weight.detach() for linear in inner])
            yield _feed_forward(joined, down, gate, setting.kernels, inner)
        elif len(inner) == 1 and sizes == {(2 * inner_width, width)}:
            yield _feed_forward(inner[0].weight.detach(), down, gate, setting.kernels)


def _has_tanh_gelu(module: nn.Module) -> bool:
    """Whether a module has an activation that equals the tanh form of gelu in float32.

    The other form of gelu differs from it by less than a rounding of 16 bits, so rows in 16 bits do not tell.
    """
    numbers = torch.linspace(-4, 4, 81)
    expected = functional.gelu(numbers, approximate="tanh")
    for child in module.children():
        if type(child) is nn.Linear or next(child.parameters(), None) is not None:
            continue
        try:
            found = child(numbers)
        except (RuntimeError, TypeError, ValueError):  # another kind of child
            continue
        if isinstance(found, Tensor) and agree(found, expected):
            return True
    return False


def _feed_forward(
    gate_up: Tensor, down: nn.Linear, gate: Gate, kernels: Kernels, parts: Sequence[nn.Linear] = ()
) -> Swap:
    stacked = list(zip(parts, gate_up.chunk(2), strict=True)) if parts else []
    first, last = Linear(gate_up, None, kernels), Linear(down.weight.detach(), None, kernels)
    return Swap("feed-forward", SwappedFeedForward(first, last, gate), stacked)


@dataclass(frozen=True, slots=True)
class SwappedFeedForward:
    """down(act(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    gate: Gate

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return _by_rows(lambda rows: self.down(self.gate_up.gated(rows, self.gate)), hidden)
