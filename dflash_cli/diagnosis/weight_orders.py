"""Regular orders of the rows and columns of a draft's matrices, and of the values of its norms."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.weight_rewrites import HEAD_NORMS, LAYER_NORMS, QKV, Order
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

MOST_SHUFFLED_HEADS = 4
SHARDS = (2, 4, 8)

QUERY, KEY, VALUE = QKV
OUT, GATE, UP, DOWN = "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"


HEADS, INNER = (QUERY, KEY, VALUE, OUT), (GATE, UP, DOWN)
SHARED_AXES = {"query heads": HEADS, "KV heads": HEADS, "MLP channels": INNER}
"""Axis -> the matrices that have it. An order of some of them equals the inverse order of the others.

Channels of several matrices are heads and MLP channels together.
"""


CHANNELS = ("input channels", "output channels")


def orders(count: int) -> dict[str, Order]:
    """Regular orders of `count` items that are not the order itself."""
    found: dict[str, Order] = {
        "in reverse": rewrites.reverse,
        "shifted by one": partial(rewrites.roll, 1),
        "shifted back by one": partial(rewrites.roll, -1),
    }
    if count % 2 == 0:
        found["with halves exchanged"] = rewrites.exchange_halves
    for first in SHARDS:
        if count % first == 0 and first < count:
            found[f"interleaved by {first}"] = rewrites.transposed(first)
            found[f"from {first} interleaved parts"] = rewrites.untransposed(first)
            if count // first > 1 and first > 2:
                found[f"with {first} parts in reverse"] = rewrites.of_parts(rewrites.reverse, first)
                for steps, way in ((1, "by one"), (-1, "back by one")):
                    rolled = rewrites.of_parts(partial(rewrites.roll, steps), first)
                    found[f"with {first} parts shifted {way}"] = rolled
            if (count // first) % 2 == 0:
                found[f"with halves of {first} parts exchanged"] = rewrites.in_parts(rewrites.exchange_halves, first)
    return found


def _head_orders(count: int, groups: int) -> dict[str, Order]:
    """Orders of heads: every order of a few, else regular ones; and heads tiled over groups instead of repeated."""
    found = orders(count) if count > 1 else {}
    if 1 < count <= MOST_SHUFFLED_HEADS:
        for order in sorted(permutations(range(count)))[1:]:
            found[f"in the order {list(order)}"] = partial(_given, order)
    if 1 < groups < count:
        found["tiled over KV heads"] = rewrites.transposed(groups)
        found["repeated for KV heads"] = rewrites.untransposed(groups)
    return found


def _given(order: tuple[int, ...], _: int) -> "Tensor":
    import torch

    return torch.tensor(order)


def _paired_in(num_heads: int, own_heads: int, num_rows: int) -> dict[str, Order]:
    """The two layouts of rope, for the wrong number of heads, and from one layout to the other with both numbers."""
    if num_rows % (2 * num_heads):
        return {}
    to_pairs, from_pairs = (
        {count: rewrites.in_parts(layout(2), count) for count in (num_heads, own_heads)}
        for layout in (rewrites.transposed, rewrites.untransposed)
    )
    found = {
        f"in pairs of {num_heads} heads": to_pairs[num_heads],
        f"from pairs of {num_heads} heads": from_pairs[num_heads],
    }
    if num_heads != own_heads:
        for one, other in ((num_heads, own_heads), (own_heads, num_heads)):
            name = f"in pairs of {one} heads, then from pairs of {other} heads"
            found[name] = rewrites.in_turn(to_pairs[one], from_pairs[other])
    return found


def _by_channel(num_heads: int, size: int = 0) -> dict[str, Order]:
    """A grid of heads and dimensions in the other order. Without a number of heads, it follows from their `size`."""

    def grid(order: Callable[[int], Order], count: int) -> "Tensor":
        return order(num_heads or count // size)(count)

    return {
        "from rows of one dimension of all heads": partial(grid, rewrites.untransposed),
        "to rows of one dimension of all heads": partial(grid, rewrites.transposed),
    }


def than_in(axis: str, parts: Collection[str]) -> str:
    """The matrices that share an axis with parts: those in the inverse order have the same effect."""
    sharing = SHARED_AXES.get(axis, (*HEADS, *INNER) if axis in CHANNELS and len(parts) > 1 else ())
    others = [part for part in sharing if part not in parts]
    return f" than in {' and '.join(part.rpartition('.')[2] for part in others)}" if others else ""


def orders_of_parts(count: int) -> dict[str, Order]:
    """Every order of four equal parts, and exchanges of two of eight neighbouring parts."""
    orders = {order: 4 for order in sorted(permutations(range(4)))[1:]} if count % 4 == 0 else {}
    if count % 8 == 0:
        orders |= {tuple(item ^ (item // 2 == pair) for item in range(8)): 8 for pair in range(4)}
        orders[tuple(item ^ 1 for item in range(8))] = 8
    return {
        f"with {parts} parts in the order {list(order)}": rewrites.of_heads(partial(_given, order), count // parts)
        for order, parts in orders.items()
    }


def axes(config: DraftConfig) -> Iterator[tuple[str, dict[str, int], dict[str, Order]]]:
    """Each axis of matrices with the parts that it may have been reordered in, and its orders."""
    size, heads, keys = config.head_dim, config.num_heads, config.num_kv_heads

    def whole(count: int, groups: int) -> dict[str, Order]:
        return {name: rewrites.of_heads(order, size) for name, order in _head_orders(count, groups).items()}

    inside = {name: rewrites.in_heads(order, size) for name, order in orders(size).items()}
    yield "query heads", {QUERY: 0, OUT: 1}, whole(heads, keys)
    yield "query heads", {QUERY: 0}, whole(heads, keys)
    yield "query heads", {OUT: 1}, whole(heads, keys)
    yield "KV heads", {KEY: 0, VALUE: 0}, whole(keys, 1)
    yield "KV heads", {KEY: 0}, whole(keys, 1)
    yield "KV heads", {VALUE: 0}, whole(keys, 1)
    yield "dimensions of heads", {QUERY: 0, KEY: 0}, inside
    yield "dimensions of heads", {QUERY: 0}, inside
    yield "dimensions of heads", {KEY: 0}, inside
    yield "dimensions of heads", {KEY: 0}, _paired_in(heads, keys, keys * size)
    yield "dimensions of heads", {QUERY: 0}, _paired_in(keys, heads, heads * size)
    yield "dimensions of heads", {VALUE: 0}, inside
    yield "dimensions of heads", {OUT: 1}, inside
    for part, dim in ((QUERY, 0), (KEY, 0), (VALUE, 0), (OUT, 1)):
        yield "dimensions of heads", {part: dim}, _by_channel(keys if part in {KEY, VALUE} else heads)
    yield "dimensions of heads", {VALUE: 0, OUT: 1}, _by_channel(0, size)
    yield "dimensions of heads", {KEY: 0, VALUE: 0}, _by_channel(keys)
    yield "dimensions of heads", {QUERY: 0, KEY: 0}, _by_channel(0, size)
    inner, hidden = orders(config.intermediate_size), orders(config.hidden_size)
    ranks = {name: order for name, order in orders(heads * size).items() if name in inner}
    yield "input channels", {OUT: 1, DOWN: 1}, ranks
    smallest = orders(keys * size)
    ranks = {name: order for name, order in ranks.items() if name in smallest}
    yield "output channels", {QUERY: 0, KEY: 0, VALUE: 0, GATE: 0, UP: 0}, ranks
    for parts in ({DOWN: 1}, {GATE: 0}, {UP: 0}, {GATE: 0, UP: 0}):
        yield "MLP channels", parts, inner
    for part in (QUERY, KEY, VALUE, GATE, UP):
        yield "input channels", {part: 1}, hidden
    for part in (OUT, DOWN, "fc"):
        yield "output channels", {part: 0}, hidden
    yield "output channels", {"fc": 0}, orders_of_parts(config.hidden_size)
    for norm in (*HEAD_NORMS, *LAYER_NORMS, "hidden_norm", "norm"):
        yield "values", {norm: 0}, {"in reverse": rewrites.reverse, "with halves exchanged": rewrites.exchange_halves}
