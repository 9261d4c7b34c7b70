"""Readings that change the meaning of tensors: other orders, layouts, scales and owners of their values.

A family yields each reading for all layers together, and as guesses for single layers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.feature_readings import feature_readings
from dflash_cli.diagnosis.value_readings import value_readings
from dflash_cli.diagnosis.weight_looks import is_offset, is_plus_one
from dflash_cli.diagnosis.weight_orders import DOWN, GATE, KEY, OUT, QUERY, SHARDS, UP, VALUE, axes, than_in
from dflash_cli.diagnosis.weight_rewrites import (
    ENDS,
    HEAD_NORMS,
    LAYER_NORMS,
    MATRICES,
    NORMS,
    QKV,
    Spot,
)
from dflash_cli.diagnosis.weight_space import MOST_LAYERS_ALONE, WeightReading, WeightSpace, named, only, short, spots
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor


def weight_readings(space: WeightSpace) -> Iterator[WeightReading]:
    """Every reading of the tensors."""
    for family in FAMILIES:
        yield from family(space)


def probes(space: WeightSpace) -> Iterator[WeightReading]:
    """Every part left out: matrices are zero, and norms have one value."""
    left_out: dict[str, tuple[str, ...]] = {
        "attention": (OUT, VALUE), "the MLP": (DOWN, GATE, UP), "q_proj": (QUERY,), "k_proj": (KEY,),
        **{short(norm): (norm,) for norm in NORMS},
    }  # fmt: skip
    for name, parts in left_out.items():
        for layer in space.layers if parts[0] not in ENDS else (None,):
            change = rewrites.scale(0.0) if parts[0] in MATRICES else rewrites.flatten
            rewrite = rewrites.change_parts({parts[0]: change}, only(layer))
            cause = f"{named(name, layer)} is damaged"
            yield WeightReading(named(f"without {name}", layer), rewrite, cause, spots(parts, layer), is_neutral=True)
    for layer in space.layers[1:]:
        rewrite = rewrites.change_parts(dict.fromkeys((OUT, DOWN), rewrites.scale(0.0)), only(layer))
        touches = spots((OUT, VALUE, DOWN, GATE, UP), layer)
        yield WeightReading(f"without layer {layer}", rewrite, f"layer {layer} is damaged", touches, is_neutral=True)
    for index, tap in enumerate(space.config.target_layer_ids):
        rewrite = rewrites.change_parts({"fc": partial(rewrites.forget_tap, index, space.config.num_taps)})
        name, cause = f"without the features of layer {tap}", f"the columns of fc for layer {tap} are damaged"
        yield WeightReading(name, rewrite, cause, spots(("fc",), None), is_neutral=True)


def _norm_offsets(space: WeightSpace) -> Iterator[WeightReading]:
    """Norms that hold w - 1 or 1 + w, as far as their values allow it.

    Values around 0 with both signs are rare, so such norms need not be suspect: the draft may miss them.
    """
    groups = {
        "every norm": NORMS, "head norm": HEAD_NORMS, "layer norm": LAYER_NORMS,
        **{short(part): (part,) for part in NORMS},
    }  # fmt: skip
    for amount, allows, what in (
        (1.0, is_offset, ("read as 1 + w", "hold offsets from 1")),
        (-1.0, is_plus_one, ("read as w - 1", "hold weights to which 1 was added")),
    ):
        for layer in space.layers:
            for group, parts in groups.items():
                chosen = [part for part in parts if layer is None or part not in ENDS]
                if not chosen or (layer is not None and len(parts) == 1 and space.config.num_layers < 2):
                    continue
                if space.weights and not allows(space.weights, space.config, chosen, layer):
                    continue
                rewrite = rewrites.change_parts(dict.fromkeys(chosen, rewrites.shift(amount)), only(layer))
                name, cause = named(f"{group} weights {what[0]}", layer), f"{group} weights {what[1]}"
                touches = spots(chosen, layer)
                guessed = layer is not None and not (space.weights and allows is is_offset)
                yield WeightReading(name, rewrite, cause, touches, guessed, changes_values=True, shift=amount)


def _exchanges(space: WeightSpace) -> Iterator[WeightReading]:
    """Two parts of the same shape exchanged, in all layers, in one, or between two layers."""
    config = space.config
    same = [HEAD_NORMS, LAYER_NORMS, (GATE, UP), (KEY, VALUE)]
    if config.num_heads == config.num_kv_heads:
        same += [(QUERY, KEY), (QUERY, VALUE)]
    if config.num_heads * config.head_dim == config.hidden_size:
        same.append((QUERY, OUT))
    for layer in space.layers:
        for first, second in same:
            name = named(f"{short(first)} and {short(second)} exchanged", layer)
            cause = f"{short(first)} and {short(second)} are exchanged"
            yield _exchanged(name, cause, [((first, layer), (second, layer))], is_guess=layer is not None)
        name, cause = "k_proj and v_proj, and gate_proj and up_proj, exchanged", "parts of fused matrices are exchanged"
        both: list[tuple[Spot, Spot]] = [((KEY, layer), (VALUE, layer)), ((GATE, layer), (UP, layer))]
        yield _exchanged(named(name, layer), cause, both, is_guess=layer is not None)
    ends: list[tuple[str, int | None]] = [("hidden_norm", None), ("norm", None)]
    norms: list[tuple[str, int | None]] = [(part, layer) for part in LAYER_NORMS for layer in space.layers[1:]]
    for one, other in [(ends[0], ends[1]), *((end, norm) for end in ends for norm in norms)]:
        names = [named(part, layer) for part, layer in (one, other)]
        name, cause = f"{names[0]} and {names[1]} exchanged", "two norms are exchanged"
        yield _exchanged(name, cause, [(one, other)], is_guess=other[1] is not None)


def _exchanged(name: str, cause: str, pairs: list[tuple[Spot, Spot]], *, is_guess: bool) -> WeightReading:
    both = rewrites.together(*(rewrites.exchange(one, other) for one, other in pairs))
    halves = (
        rewrites.together(*(rewrites.exchange(one, other, is_half=True) for one, other in pairs)),
        rewrites.together(*(rewrites.exchange(other, one, is_half=True) for one, other in pairs)),
    )
    touches = frozenset(spot for pair in pairs for spot in pair)
    return WeightReading(name, both, cause, touches, is_guess, halves=halves)


def _layer_parts(space: WeightSpace) -> Iterator[WeightReading]:
    """Parts of two layers exchanged, and layers in another order."""
    count = space.config.num_layers
    order = tuple(range(count))
    orders = {order[::-1], *(order[at:] + order[:at] for at in order)}
    orders |= {(*order[:at], at + 1, at, *order[at + 2 :]) for at in order[:-1]}
    for other in sorted(orders - {order}):
        cause = "the draft's layers are in another order"
        yield WeightReading(f"layers in the order {list(other)}", rewrites.order_layers(other), cause, frozenset())
    attention = (*QKV, OUT, *HEAD_NORMS)
    groups = {
        "attention": attention, "projections of attention": (*QKV, OUT), "layer norms": LAYER_NORMS,
        "the MLP": (GATE, UP, DOWN), "norms": (*LAYER_NORMS, *HEAD_NORMS),
        "the MLP and its norm": (GATE, UP, DOWN, LAYER_NORMS[1]),
        "attention and its norm": (*attention, LAYER_NORMS[0]), "queries, keys and values": QKV,
        "keys and values": (KEY, VALUE), "gate and up": (GATE, UP),
        **{short(part): (part,) for part in (*attention, GATE, UP, DOWN, *LAYER_NORMS)},
    }  # fmt: skip
    for shift, way in ((1, "earlier"), (-1, "later")) if count > 2 else ():
        for name, parts in groups.items():
            rewrite = rewrites.roll_layers(parts, shift)
            title, cause = f"{name} of each layer moved one layer {way}", f"{name} of all layers belong to other layers"
            yield WeightReading(title, rewrite, cause, spots(parts, order), len(parts) == 1)
    pairs = combinations(order, 2) if count <= MOST_LAYERS_ALONE else pairwise(order)
    for first, second in pairs:
        for name, parts in groups.items():
            pairs_of_spots: list[tuple[Spot, Spot]] = [((part, first), (part, second)) for part in parts]
            title, cause = f"{name} of layers {first} and {second} exchanged", f"two layers hold each other's {name}"
            yield _exchanged(title, cause, pairs_of_spots, is_guess=len(parts) == 1)


def _rope_layouts(space: WeightSpace) -> Iterator[WeightReading]:
    size = space.config.head_dim
    if size % 2:
        return
    cause = "the rows of q_proj and k_proj are in another layout of rope"
    counts = [size, *(count for count in (size // 2, size // 4) if count >= 4 and count % 2 == 0)]
    for where, num_rotated in product(space.groups, counts):
        rows = "" if num_rotated == size else f" of the first {num_rotated} dimensions"
        for to_halves, layout in ((True, "interleaved pairs"), (False, "halves of halves")):
            for with_norms, suffix in ((True, ""), (False, ", norms as they are")):
                rewrite = rewrites.pair_dimensions(
                    to_halves=to_halves, with_norms=with_norms, layers=only(where), num_rotated=num_rotated
                )
                title = named(f"rope over {layout}{rows}{suffix}", where)
                yield WeightReading(title, rewrite, cause, spots((QUERY, KEY), where), where is not None)


def _fused(space: WeightSpace) -> Iterator[WeightReading]:
    """Stacked projections that were split at the wrong rows: by head, or by shards of tensor parallelism."""
    config = space.config
    stacked = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
    found: list[tuple[str, str, Callable[[DraftConfig], Tensor]]] = []
    found.append(
        ("gate and up fused row by row", "gate_up", _sharded(rewrites.gate_up_by_shard, config.intermediate_size))
    )
    if config.num_kv_heads > 1:
        found.append(("keys and values fused by head", "qkv", rewrites.kv_by_head))
    for count in sorted({*SHARDS, config.num_kv_heads} - {1}):
        if config.num_kv_heads % count == 0:
            rows = _sharded(rewrites.qkv_by_shard, count)
            found.append((f"queries, keys and values in {count} shards", "qkv", rows))
        if config.intermediate_size % count == 0:
            rows = _sharded(rewrites.gate_up_by_shard, count)
            found.append((f"gate and up in {count} shards", "gate_up", rows))
    for (name, part, rows), layer in product(found, space.layers):
        rewrite = rewrites.unfuse(rows, stacked[part], only(layer))
        touches = spots(rewrites.STACKED[stacked[part]], layer) if layer is not None else frozenset()
        cause = "a fused projection was split at the wrong rows"
        yield WeightReading(named(name, layer), rewrite, cause, touches, layer is not None)


def _sharded(rows: "Callable[..., Tensor]", count: int) -> "Callable[[DraftConfig], Tensor]":
    return partial(rows, num_shards=count)


def _reordered(space: WeightSpace) -> Iterator[WeightReading]:
    """Rows or columns in another regular order."""
    for axis, parts, orders in axes(space.config):
        where = " and ".join(short(part) for part in parts)
        for layer in space.groups if not set(parts) & set(ENDS) else (None,):
            for name, order in orders.items():
                changes = {part: rewrites.along(dim, order) for part, dim in parts.items()}
                rewrite = rewrites.change_parts(changes, only(layer))
                title = named(f"{axis} of {where} {name}", layer)
                cause = f"the {axis} of {where} are in another order{than_in(axis, parts)}"
                yield WeightReading(title, rewrite, cause, spots(parts, layer), True)


def _dealt(space: WeightSpace) -> Iterator[WeightReading]:
    """Every matrix put together from shards in the wrong way: by rows, or as tensor parallelism cuts it."""
    by_rows = dict.fromkeys(MATRICES, 0)
    in_layers = {part: dim for part, dim in by_rows.items() if part not in ENDS}
    parallel = {part: int(part in {OUT, DOWN}) for part in in_layers}
    sizes = {OUT: space.config.num_heads * space.config.head_dim, DOWN: space.config.intermediate_size}
    ways = (("dealt to", rewrites.transposed), ("from", rewrites.untransposed))
    for (name, parts), count, (way, deal) in product(_sets(in_layers, parallel, by_rows), SHARDS, ways):
        lengths = [sizes[part] if dim else _num_rows(space.config, part) for part, dim in parts.items()]
        if any(length % count for length in lengths):
            continue
        for layer in space.layers if not set(parts) & set(ENDS) else (None,):
            changes = {part: rewrites.along(dim, deal(count)) for part, dim in parts.items()}
            title = named(f"rows of {name} {way} {count} shards in turn", layer)
            cause = "the rows of several matrices are in another order, as if shards took them in turn"
            rewrite = rewrites.change_parts(changes, only(layer))
            yield WeightReading(title, rewrite, cause, spots(parts, layer), layer is not None)


def _sets(
    in_layers: dict[str, int], parallel: dict[str, int], by_rows: dict[str, int]
) -> Iterator[tuple[str, dict[str, int]]]:
    """Sets of matrices with the dimension of their rows."""
    yield "all matrices", by_rows
    yield "matrices of layers", in_layers
    yield "parallel matrices", parallel
    for name, chosen in (("attention", (*QKV, OUT)), ("the MLP", (GATE, UP, DOWN))):
        yield f"matrices of {name}", {part: in_layers[part] for part in chosen}
        yield f"parallel matrices of {name}", {part: parallel[part] for part in chosen}


def _num_rows(config: DraftConfig, part: str) -> int:
    own = {QUERY: config.num_heads * config.head_dim, GATE: config.intermediate_size, UP: config.intermediate_size}
    return own.get(part, config.num_kv_heads * config.head_dim if part in {KEY, VALUE} else config.hidden_size)


def _by_column(space: WeightSpace) -> Iterator[WeightReading]:
    """Matrices that were stored by columns: transposes, if they are square."""
    for part in MATRICES:
        for layer in space.layers if part != "fc" else (None,):
            rewrite = rewrites.change_parts({part: rewrites.by_column}, only(layer))
            cause = f"the values of {short(part)} are stored by columns, as in its transpose"
            title = named(f"{short(part)} read by columns", layer)
            yield WeightReading(title, rewrite, cause, spots((part,), layer), layer is not None)
    groups = {
        "all matrices": MATRICES, "matrices of layers": MATRICES[:-1], "matrices of attention": (*QKV, OUT),
        "matrices of the MLP": (GATE, UP, DOWN), "o_proj and matrices of the MLP": (OUT, GATE, UP, DOWN),
        "o_proj and down_proj": (OUT, DOWN),
    }  # fmt: skip
    for name, parts in groups.items():
        for layer in space.layers if "fc" not in parts else (None,):
            rewrite = rewrites.change_parts(dict.fromkeys(parts, rewrites.by_column), only(layer))
            title, cause = (
                named(f"{name} read by columns", layer),
                "the values of several matrices are stored by columns",
            )
            yield WeightReading(title, rewrite, cause, spots(parts, layer), layer is not None)


def _biases(space: WeightSpace) -> Iterator[WeightReading]:
    if space.config.attention_bias:
        yield WeightReading("no biases", rewrites.zero_biases, "the biases do not belong to the draft", frozenset())


FAMILIES = (
    _norm_offsets, _exchanges, _layer_parts, _rope_layouts, _fused, _reordered, _dealt, _by_column, value_readings,
    feature_readings, _biases,
)  # fmt: skip
