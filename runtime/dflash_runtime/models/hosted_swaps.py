"""Modules of a hosted target that our kernels compute instead of transformers' code: a swap.

A swap never follows from a name. A module is swapped if, right after loading, its swap agrees with it on random rows in
the dtype of the run (`agreement.py` has the criterion). The inputs of the comparison have the shapes and the further
arguments of a real call. Of several possible swaps the one with the smallest error is taken.

| module | swap |
|---|---|
| attention | queries, keys and values in one product; head norms, rotation and stored KV in one launch. Rope may rotate a part of each head, in halves or in adjacent pairs |
| feed-forward, gated by silu or the tanh form of gelu | both products and the gate in one launch, then the product down |
| norm | one launch, with a weight as stored, or stored as a difference from 1 |
| linear | our product of few rows |

A swapped module keeps its parameters. Stacked weights replace them as views, so they need no more memory.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, F inner width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_kernels.activation import GELU, SILU, Gate
from dflash_kernels.rope_store import Turn
from dflash_kernels.suite import Kernels
from dflash_runtime.config import TargetConfig
from dflash_runtime.models.agreement import agree, error_of, random_like, tolerance_of
from dflash_runtime.models.hosted_attention import HostedAttention, OwnValues, Scores, calling, current_attend
from dflash_runtime.models.layers import Attention, Linear

Forward = Callable[..., Any]

PASSED_ON = frozenset({"hidden_states", "position_embeddings", "position_ids", "cache_position", "use_cache"})
"""Arguments of a call of attention that a swap reads or need not read. Others must be absent, None or False."""

SCALES = (1.0, 1e-3, 30.0)
"""Rows of the comparison have these sizes in turn. Small rows show the epsilon of a norm."""

LEAST_LIKENESS = 32
"""A whole model with swaps may differ from the model without them by this many roundings of the dtype."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of a module, and its result."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def is_plain(self) -> bool:
        """Whether the module got rows and nothing else, and returned rows."""
        return len(self.args) == 1 and not self.kwargs and all(map(_is_rows, (*self.args, self.output)))


@dataclass(frozen=True, slots=True)
class Swap:
    """A function that may replace a module's forward.

    kind      the name of the swap in messages
    stacked   linears whose weights become views of a stacked weight, each with its rows
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


def _is_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


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
    rows = compute(hidden.reshape(-1, hidden.shape[-1]))
    return rows.view(*hidden.shape[:-1], rows.shape[-1])


def find_feed_forwards(module: nn.Module, call: Call, setting: Setting) -> Iterator[Swap]:
    """Yield swaps of a gated feed-forward: two or three products, with rows of the gate before rows of `up`."""
    linears = _own_linears(module)
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


def find_attention(module: nn.Module, call: Call, setting: Setting) -> Iterator[Swap]:
    """Yield swaps of attention, whose queries, keys and values have one weight or three. Heads may have norms."""
    layer, tables = getattr(module, "layer_idx", None), call.kwargs.get("position_embeddings")
    if not isinstance(layer, int) or layer not in setting.scores:
        return
    scores = setting.scores[layer]
    linears = _own_linears(module, scores.softmax.sinks)
    if linears is None or tables is None or not _is_attention_call(call, tables):
        return
    num_kv, size = setting.config.kv_shapes[layer]
    heads = (setting.config.num_heads, num_kv)
    rotated = tables[0].shape[-1]
    if rotated > size or size % 2 or rotated % 2:
        return
    for qkv, output, stacked in _projections(linears, sum(heads) + num_kv, size, setting.kernels):
        for norms, eps in _head_norms(module, heads, size, call.output[0]):
            for turn, width in _turns(size, rotated):
                attention = Attention(qkv, output, norms, eps, *heads, size, setting.kernels, scores.softmax, turn)
                yield Swap("attention", SwappedAttention(attention, layer, width, scores.factor), stacked)


def _turns(size: int, rotated: int) -> Iterator[tuple[Turn, int]]:
    """Yield the ways in which rope may rotate heads, and the number of columns of its tables that each way reads."""
    for turn in (Turn(size), Turn(size, True), Turn(size, True, True)):
        yield turn, rotated
    yield Turn(size), 0


def _is_attention_call(call: Call, tables: Any) -> bool:
    """Whether a call has rows, rotary tables [1, T, R], and nothing else that its result could depend on."""
    rows = call.kwargs.get("hidden_states", call.args[0] if len(call.args) == 1 else None)
    others = [value for name, value in call.kwargs.items() if name not in PASSED_ON]
    is_pair = isinstance(tables, tuple) and len(tables) == 2 and all(_is_rows(item) for item in tables)
    if not is_pair or not _is_rows(rows) or any(value is not None and value is not False for value in others):
        return False
    returned = call.output
    is_alone = isinstance(returned, tuple) and len(returned) == 2 and returned[1] is None and _is_rows(returned[0])
    return is_alone and tables[0].dtype == rows.dtype and tables[0].shape[:2] == rows.shape[:2]


def _projections(
    linears: Mapping[str, nn.Linear], num_heads: int, size: int, kernels: Kernels
) -> Iterator[tuple[Linear, Linear, Sequence[tuple[nn.Linear, Tensor]]]]:
    """Yield the projection to queries, keys and values, the projection back, and the linears with stacked weights."""
    for last in linears.values():
        inner = [linear for linear in linears.values() if linear is not last]
        output = Linear(last.weight.detach(), _detached(last.bias), kernels)
        if sum(len(linear.weight) for linear in inner) != num_heads * size:
            continue
        if len(inner) == 1:
            yield Linear(inner[0].weight.detach(), _detached(inner[0].bias), kernels), output, ()
        elif len(inner) == 3 and len({(linear.bias is None, linear.weight.shape[1]) for linear in inner}) == 1:
            weight = torch.cat([linear.weight.detach() for linear in inner])
            biases = [linear.bias.detach() for linear in inner if linear.bias is not None]
            rows = weight.split([len(linear.weight) for linear in inner])
            qkv = Linear(weight, torch.cat(biases) if biases else None, kernels)
            yield qkv, output, list(zip(inner, rows, strict=True))


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _head_norms(
    module: nn.Module, heads: tuple[int, int], size: int, like: Tensor
) -> Iterator[tuple[Tensor | None, float]]:
    """Yield the head norms [H + KV, D] that a module may have, and their epsilon."""
    norms = [child for child in module.children() if type(child) is not nn.Linear]
    if not norms:
        yield None, 0.0
    if len(norms) != 2:
        return
    for query, key in zip(*(norm_weights(norm, size, like) for norm in norms), strict=False):
        if query[1] == key[1]:
            weights = zip((query[0], key[0]), heads, strict=True)
            yield torch.cat([weight.expand(count, -1) for weight, count in weights]), query[1]


@dataclass(frozen=True, slots=True)
class SwappedAttention:
    """Attention over our pages. `factor` is a factor on queries beside the usual scaling.

    `width` is the number of columns of the rotary tables that it reads: R, or 0 for attention without positions.
    """

    attention: Attention
    layer: int
    width: int
    factor: float

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] and rotary tables [1, T, R] -> [1, T, hidden]."""
        attention, attend = self.attention, current_attend()
        cos, sin = (table[0, :, : self.width] for table in position_embeddings)
        query, keys, values = attention.project(hidden_states[0], cos, sin, attend.place(self.layer))
        if self.factor != 1.0:
            query = query * self.factor
        rows = attend.read(self.layer, query, keys, values, attention.softmax)
        return attention.output(rows.flatten(-2))[None], None


def _own_linears(module: nn.Module, sinks: Tensor | None = None) -> dict[str, nn.Linear] | None:
    """Return the linears of a module by name, or None if a linear lies deeper, or the module has other parameters."""
    found = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    deeper = [child for child in module.modules() if isinstance(child, nn.Linear)]
    own = [parameter for parameter in module.parameters(recurse=False) if parameter is not sinks]
    is_plain = len(deeper) == len(found) and not own and all(not item.weight.is_meta for item in found.values())
    return found if 2 <= len(found) <= 4 and is_plain else None


FINDERS: Iterable[Callable[[nn.Module, Call, Setting], Iterator[Swap]]] = (
    find_attention, find_feed_forwards, find_norms, find_linears,
)  # fmt: skip
"""Functions that yield the swaps which a module may have."""
