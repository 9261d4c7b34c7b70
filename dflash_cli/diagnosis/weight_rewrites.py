"""Other ways to read a draft's tensors. Each rewrite turns the runtime's weights into other weights.

The runtime stacks projections: `qkv_proj` has rows for queries, keys and values, `gate_up_proj` has rows for gate and
up. `PARTS` names the tensors as checkpoints do. A change gets a part of one layer, or its bias. Functions that compute
import torch when they run.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

Rewrite = Callable[["Mapping[str, Tensor]", DraftConfig], "Mapping[str, Tensor]"]
Change = Callable[["Tensor"], "Tensor"]
Order = Callable[[int], "Tensor"]
"""A number of items -> the index of the item that each place takes."""

HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
ENDS = ("fc", "hidden_norm", "norm")
"""Tensors outside layers."""

STACKED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
QKV = STACKED["self_attn.qkv_proj"]
MATRICES = (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "fc")
NORMS = (*HEAD_NORMS, *LAYER_NORMS, "hidden_norm", "norm")
PARTS = (*MATRICES, *NORMS)


def change_parts(changes: Mapping[str, Change], layers: Collection[int] | None = None) -> Rewrite:
    """Change some parts, in some layers or in all."""

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        changed = dict(weights)
        for part, change in changes.items():
            for name in _tensors(changed, part, layers):
                begin, end = _rows(part, config)
                if end is None:
                    changed[name] = change(changed[name]).contiguous()
                else:
                    changed[name] = changed[name].clone()
                    changed[name][begin:end] = change(weights[name][begin:end])
        return changed

    return rewrite


def change_tensors(changes: Mapping[str, Change]) -> Rewrite:
    """Change some tensors, by the names of the runtime."""

    def rewrite(weights: "Mapping[str, Tensor]", _: DraftConfig) -> "Mapping[str, Tensor]":
        return {**weights, **{name: change(weights[name]).contiguous() for name, change in changes.items()}}

    return rewrite


def exchange_tensors(pairs: Collection[tuple[str, str]], *, is_half: bool = False) -> Rewrite:
    """Exchange tensors of the same shape. One half of an exchange copies the second over the first only."""

    def rewrite(weights: "Mapping[str, Tensor]", _: DraftConfig) -> "Mapping[str, Tensor]":
        firsts = {one: weights[other] for one, other in pairs}
        return {**weights, **firsts, **({} if is_half else {other: weights[one] for one, other in pairs})}

    return rewrite


Spot = tuple[str, int | None]
"""A part of a draft, in one layer, or in all layers or outside of layers (None)."""


def exchange(first: Spot, second: Spot, *, is_half: bool = False) -> Rewrite:
    """Exchange two parts of the same shape. One half of an exchange copies the second over the first only."""

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        changed = dict(weights)
        sides = [
            [(name, *_rows(part, config)) for name in _tensors(weights, part, None if layer is None else (layer,))]
            for part, layer in (first, second)
        ]
        for one, other in zip(*sides, strict=False):
            both = ((one, other), (other, one))
            for (name, begin, end), (source, source_begin, source_end) in both[:1] if is_half else both:
                if end is None:
                    changed[name] = weights[source][source_begin:source_end]
                else:
                    changed[name] = changed[name].clone()
                    changed[name][begin:end] = weights[source][source_begin:source_end]
        return changed

    return rewrite


def roll_layers(parts: Collection[str], shift: int) -> Rewrite:
    """Layer i takes these parts of layer i + shift, the last layers of the first ones and so on."""

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        order = range(config.num_layers - 1) if shift > 0 else range(config.num_layers - 2, -1, -1)
        exchanges = [exchange((part, at), (part, at + 1)) for at in order for part in parts]
        return together(*exchanges)(weights, config)

    return rewrite


def together(*rewrites: Rewrite) -> Rewrite:
    """One rewrite after another."""

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        for item in rewrites:
            weights = item(weights, config)
        return weights

    return rewrite


def order_layers(order: tuple[int, ...]) -> Rewrite:
    """Layer i takes the tensors of layer `order[i]`."""
    renamed = {f"layers.{source}.": f"layers.{index}." for index, source in enumerate(order)}

    def rewrite(weights: "Mapping[str, Tensor]", _: DraftConfig) -> "Mapping[str, Tensor]":
        return {
            next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), name): tensor
            for name, tensor in weights.items()
        }

    return rewrite


def unfuse(rows_of: Callable[[DraftConfig], "Tensor"], stacked: str, layers: Collection[int] | None = None) -> Rewrite:
    """Take the rows of a stacked projection in another order, as if it had been split at the wrong rows."""

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        changed = dict(weights)
        for name in _of_layers(_named(weights, stacked), layers):
            changed[name] = weights[name][rows_of(config).to(weights[name].device)]
        return changed

    return rewrite


def kv_by_head(config: DraftConfig) -> "Tensor":
    """Rows of queries, keys and values if each head's keys and values were stored side by side."""
    import torch

    queries, size = config.num_heads * config.head_dim, config.head_dim
    pairs = torch.arange(2 * config.num_kv_heads * size).view(config.num_kv_heads, 2, size).transpose(0, 1).flatten()
    return torch.cat((torch.arange(queries), queries + pairs))


def qkv_by_shard(config: DraftConfig, num_shards: int) -> "Tensor":
    """Rows of queries, keys and values if each shard's queries, keys and values were stored one after another."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return _by_shard((queries, keys, keys), num_shards)


def gate_up_by_shard(config: DraftConfig, num_shards: int) -> "Tensor":
    """Rows of gate and up if each shard's gate and up were stored one after another."""
    return _by_shard((config.intermediate_size, config.intermediate_size), num_shards)


def _by_shard(sizes: tuple[int, ...], num_shards: int) -> "Tensor":
    import torch

    shards = torch.arange(sum(sizes)).view(num_shards, -1)
    return torch.cat([part.flatten() for part in shards.split([size // num_shards for size in sizes], dim=1)])


def shift(amount: float) -> Change:
    return lambda tensor: tensor + amount


def scale(factor: float) -> Change:
    return lambda tensor: tensor * factor


def flatten(tensor: "Tensor") -> "Tensor":
    """Every value is the median."""
    return tensor.median().expand_as(tensor)


def forget_tap(index: int, num_taps: int, weight: "Tensor") -> "Tensor":
    """Zero the columns of one tapped layer."""
    weight = weight.clone()
    weight.chunk(num_taps, dim=1)[index].zero_()
    return weight


def along(dim: int, order: Order) -> Change:
    """Take rows (`dim` 0) or columns (`dim` 1) in another order. A change of columns leaves biases alone."""

    def change(tensor: "Tensor") -> "Tensor":
        return tensor if tensor.dim() <= dim else tensor.index_select(dim, order(tensor.shape[dim]).to(tensor.device))

    return change


def by_column(tensor: "Tensor") -> "Tensor":
    """The matrix, if its values were stored column by column; the transpose of a square matrix."""
    return tensor if tensor.dim() < 2 else tensor.flatten().view(tensor.shape[1], tensor.shape[0]).t()


def transposed(first: int) -> Order:
    """Items in a grid of `first` rows, read by columns."""
    return lambda count: _arange(count).view(first, -1).t().flatten()


def untransposed(first: int) -> Order:
    """Items in a grid of `first` columns, read by columns: the inverse of `transposed`."""
    return lambda count: _arange(count).view(-1, first).t().flatten()


def reverse(count: int) -> "Tensor":
    return _arange(count).flip(0)


def roll(steps: int, count: int) -> "Tensor":
    return _arange(count).roll(steps)


def exchange_halves(count: int) -> "Tensor":
    return _arange(count).roll(count // 2)


def of_heads(order: Order, head_dim: int) -> Order:
    """Whole heads in another order."""
    return lambda count: _arange(count).view(-1, head_dim)[order(count // head_dim)].flatten()


def of_parts(order: Order, num_parts: int) -> Order:
    """Equal parts in another order, each as it is."""
    return lambda count: of_heads(order, count // num_parts)(count)


def in_heads(order: Order, head_dim: int) -> Order:
    """The dimensions of every head in another order."""
    return lambda count: _arange(count).view(-1, head_dim)[:, order(head_dim)].flatten()


def first_items(order: Order, num_items: int) -> Order:
    """The first items in another order, the rest as they are."""
    import torch

    return lambda count: torch.cat((order(num_items), _arange(count)[num_items:]))


def in_turn(first: Order, second: Order) -> Order:
    """Items in one order, then in another."""
    return lambda count: first(count)[second(count)]


def in_parts(order: Order, num_parts: int) -> Order:
    """Equal parts, each in another order."""
    return lambda count: in_heads(order, count // num_parts)(count)


def pair_dimensions(
    *, to_halves: bool, with_norms: bool, layers: Collection[int] | None = None, num_rotated: int | None = None
) -> Rewrite:
    """Reorder the dimensions of each head between the two layouts of rope, pairs side by side and halves.

    With `to_halves`, rows in pairs become rows in halves, which the runtime rotates. Some exporters reorder the
    projections but not the norms of queries and keys. With `num_rotated`, only the first dimensions are reordered.
    """

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        order = untransposed(2) if to_halves else transposed(2)
        order = first_items(order, num_rotated or config.head_dim)
        heads = along(0, in_heads(order, config.head_dim))
        changes: dict[str, Change] = {"self_attn.q_proj": heads, "self_attn.k_proj": heads}
        if with_norms:
            changes |= dict.fromkeys(HEAD_NORMS, along(0, order))
        return change_parts(changes, layers)(weights, config)

    return rewrite


def zero_biases(weights: "Mapping[str, Tensor]", _: DraftConfig) -> "Mapping[str, Tensor]":
    return {name: tensor * 0 if name.endswith(".bias") else tensor for name, tensor in weights.items()}


def part_of(weights: "Mapping[str, Tensor]", config: DraftConfig, part: str, layer: int | None = None) -> "Tensor":
    """The weight of a part in a layer, or outside the layers."""
    name = next(name for name in _tensors(weights, part, None if layer is None else (layer,)) if "weight" in name)
    begin, end = _rows(part, config)
    return weights[name][begin:end]


def _arange(count: int) -> "Tensor":
    import torch

    return torch.arange(count)


def _tensors(weights: "Mapping[str, Tensor]", part: str, layers: Collection[int] | None) -> list[str]:
    """Names of the runtime's tensors that hold a part, weight first, in the order of the layers."""
    if part in ENDS:
        return [f"{part}.weight"]
    stacked = next((name for name, parts in STACKED.items() if part in parts), part)
    return _of_layers(_named(weights, stacked), layers)


def _of_layers(names: list[str], layers: Collection[int] | None) -> list[str]:
    return [name for name in names if layers is None or int(name.split(".")[1]) in layers]


def _named(weights: "Mapping[str, Tensor]", stacked: str) -> list[str]:
    return [name for name in weights if name.endswith((f".{stacked}.weight", f".{stacked}.bias"))]


def _rows(part: str, config: DraftConfig) -> tuple[int, int | None]:
    """The rows of a part in its stacked projection; (0, None) if it is a tensor of its own."""
    queries, keys, inner = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    return {
        "self_attn.q_proj": (0, queries),
        "self_attn.k_proj": (queries, queries + keys),
        "self_attn.v_proj": (queries + keys, queries + 2 * keys),
        "mlp.gate_proj": (0, inner),
        "mlp.up_proj": (inner, 2 * inner),
    }.get(part, (0, None))
