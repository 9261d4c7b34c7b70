"""Attention of hosted targets that our kernels compute instead of transformers' code.

`hosted_swaps.py` compares it with the module. Axis letters: T flat rows, H heads, KV heads of keys and values, D head
dim, R numbers of a head that rope rotates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_kernels.kv.rope_store import Turn
from dflash_kernels.suite import Kernels
from dflash_runtime.models.hosting.hosted_attention import current_attend
from dflash_runtime.models.hosting.swapped_modules import Call, Setting, Swap, is_rows, norm_weights, own_linears
from dflash_runtime.models.layers import Attention, Linear

PASSED_ON = frozenset({"hidden_states", "position_embeddings", "position_ids", "cache_position", "use_cache"})
"""Arguments of a call of attention that a swap reads or need not read. Others must be absent, None or False."""


def find_attention(module: nn.Module, call: Call, setting: Setting) -> Iterator[Swap]:
    """Yield swaps of attention with one weight or three for queries, keys and values. Heads may have norms."""
    layer, tables = getattr(module, "layer_idx", None), call.kwargs.get("position_embeddings")
    if not isinstance(layer, int) or layer not in setting.scores:
        return
    scores = setting.scores[layer]
    linears = own_linears(module, scores.softmax.sinks)
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
    is_pair = isinstance(tables, tuple) and len(tables) == 2 and all(is_rows(item) for item in tables)
    if not is_pair or not is_rows(rows) or any(value is not None and value is not False for value in others):
        return False
    returned = call.output
    is_alone = isinstance(returned, tuple) and len(returned) == 2 and returned[1] is None and is_rows(returned[0])
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
