"""Readings that change the meaning of tensors: other orders, layouts, scales and owners of their values.

A family yields each reading for all layers together, and as guesses for single layers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.weight_looks import is_offset, is_plus_one, scale_beside_siblings
from dflash_cli.diagnosis.weight_orders import DOWN, GATE, KEY, OUT, QUERY, SHARDS, UP, VALUE, axes
from dflash_cli.diagnosis.weight_rewrites import (
    ENDS,
    HEAD_NORMS,
    LAYER_NORMS,
    MATRICES,
    NORMS,
    QKV,
    Rewrite,
    Spot,
)
from dflash_runtime.config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

Where = int | tuple[int, ...] | None
"""One layer, several layers, or all layers (None)."""

MOST_LAYERS_ALONE = 8
"""In drafts with more layers, single layers are not tried."""

FACTORS = (-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)

IN_LAYERS = (*rewrites.STACKED, "self_attn.o_proj", "mlp.down_proj", *HEAD_NORMS, *LAYER_NORMS)

EQUAL_SCALES = ((VALUE, OUT), (UP, DOWN), HEAD_NORMS)


@dataclass(frozen=True, slots=True)
class WeightReading:
    """One rewrite with its name and the fault that it would undo.

    touches      the parts that it changes, each in one layer, or in all layers (None)
    is_guess     it is one of many, to be tried only if a probe makes one of its parts suspect
    is_neutral   it leaves a part out: a damaged part harms more than a missing one, but nothing is restored
    is_scale     it multiplies a part by a factor
    halves       the halves of an exchange. Each of them accepts less than the exchange, if the parts are exchanged.
    """

    name: str
    rewrite: Rewrite
    cause: str
    touches: frozenset[Spot]
    is_guess: bool = False
    is_neutral: bool = False
    is_scale: bool = False
    halves: tuple[Rewrite, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightSpace:
    """A draft's config and its weights as the runtime holds them. Without weights, nothing is looked at."""

    config: DraftConfig
    weights: "Mapping[str, Tensor]" = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the tensors belong to a DFlash draft; a draft of another family has other tensors."""
        layers = (f"layers.{number}.{name}.weight" for number in range(self.config.num_layers) for name in IN_LAYERS)
        return not self.weights or {*(f"{name}.weight" for name in ENDS), *layers} <= self.weights.keys()

    @property
    def layers(self) -> tuple[int | None, ...]:
        """None for all layers together, then every single layer."""
        count = self.config.num_layers
        return (None, *(range(count) if 1 < count <= MOST_LAYERS_ALONE else ()))

    @property
    def groups(self) -> "tuple[Where, ...]":
        """The same, and all layers with a window, and all layers without one."""
        windows = self.config.windows
        kinds = [tuple(at for at, width in enumerate(windows) if (width is None) == is_full) for is_full in (0, 1)]
        return (*self.layers, *(kind for kind in kinds if 1 < len(kind) < len(windows)))


def weight_readings(space: WeightSpace) -> Iterator[WeightReading]:
    """Every reading of the tensors."""
    for family in FAMILIES:
        yield from family(space)


def probes(space: WeightSpace) -> Iterator[WeightReading]:
    """Every part left out: matrices are zero, and norms have one value."""
    left_out: dict[str, tuple[str, ...]] = {
        "attention": (OUT, VALUE), "the MLP": (DOWN, GATE, UP), "q_proj": (QUERY,), "k_proj": (KEY,),
        **{_short(norm): (norm,) for norm in NORMS},
    }  # fmt: skip
    for name, parts in left_out.items():
        for layer in space.layers if parts[0] not in ENDS else (None,):
            change = rewrites.scale(0.0) if parts[0] in MATRICES else rewrites.flatten
            rewrite = rewrites.change_parts({parts[0]: change}, _only(layer))
            cause = f"{_named(name, layer)} is damaged"
            yield WeightReading(_named(f"without {name}", layer), rewrite, cause, _spots(parts, layer), is_neutral=True)
    for index, tap in enumerate(space.config.target_layer_ids):
        rewrite = rewrites.change_parts({"fc": partial(rewrites.forget_tap, index, space.config.num_taps)})
        name, cause = f"without the features of layer {tap}", f"the columns of fc for layer {tap} are damaged"
        yield WeightReading(name, rewrite, cause, _spots(("fc",), None), is_neutral=True)


def _spots(parts: Iterable[str], where: Where) -> frozenset[Spot]:
    layers = where if isinstance(where, tuple) else (where,)
    return frozenset((part, None if part in ENDS else layer) for part in parts for layer in layers)


def _named(name: str, where: Where) -> str:
    if where is None:
        return name
    return f"{name} in layer {where}" if isinstance(where, int) else f"{name} in layers {', '.join(map(str, where))}"


def _only(where: Where) -> tuple[int, ...] | None:
    return (where,) if isinstance(where, int) else where


def _short(part: str) -> str:
    return part.rpartition(".")[2]


def _norm_offsets(space: WeightSpace) -> Iterator[WeightReading]:
    """Norms that hold w - 1 or 1 + w, as far as their values allow it."""
    groups = {
        "norm": NORMS, "head norm": HEAD_NORMS, "layer norm": LAYER_NORMS,
        **{_short(part): (part,) for part in NORMS},
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
                rewrite = rewrites.change_parts(dict.fromkeys(chosen, rewrites.shift(amount)), _only(layer))
                name, cause = _named(f"{group} weights {what[0]}", layer), f"{group} weights {what[1]}"
                yield WeightReading(name, rewrite, cause, _spots(chosen, layer), layer is not None)


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
            name = _named(f"{_short(first)} and {_short(second)} exchanged", layer)
            cause = f"{_short(first)} and {_short(second)} are exchanged"
            yield _exchanged(name, cause, [((first, layer), (second, layer))], is_guess=layer is not None)
    ends: list[tuple[str, int | None]] = [("hidden_norm", None), ("norm", None)]
    norms: list[tuple[str, int | None]] = [(part, layer) for part in LAYER_NORMS for layer in space.layers[1:]]
    for one, other in [(ends[0], ends[1]), *((end, norm) for end in ends for norm in norms)]:
        names = [_named(part, layer) for part, layer in (one, other)]
        name, cause = f"{names[0]} and {names[1]} exchanged", "two norms are exchanged"
        yield _exchanged(name, cause, [(one, other)], is_guess=other[1] is not None)


def _exchanged(name: str, cause: str, pairs: list[tuple[Spot, Spot]], *, is_guess: bool) -> WeightReading:
    both = rewrites.together(*(rewrites.exchange(one, other) for one, other in pairs))
    halves = (
        rewrites.together(*(rewrites.exchange(one, other, is_half=True) for one, other in pairs)),
        rewrites.together(*(rewrites.exchange(other, one, is_half=True) for one, other in pairs)),
    )
    spots = frozenset(spot for pair in pairs for spot in pair)
    return WeightReading(name, both, cause, spots, is_guess, halves=halves)


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
        **{_short(part): (part,) for part in (*attention, GATE, UP, DOWN, *LAYER_NORMS)},
    }  # fmt: skip
    for shift, way in ((1, "earlier"), (-1, "later")) if count > 2 else ():
        for name, parts in groups.items():
            rewrite = rewrites.roll_layers(parts, shift)
            title, cause = f"{name} of each layer moved one layer {way}", f"{name} of all layers belong to other layers"
            yield WeightReading(title, rewrite, cause, _spots(parts, order), len(parts) == 1)
    pairs = combinations(order, 2) if count <= MOST_LAYERS_ALONE else pairwise(order)
    for first, second in pairs:
        for name, parts in groups.items():
            pairs_of_spots: list[tuple[Spot, Spot]] = [((part, first), (part, second)) for part in parts]
            title, cause = f"{name} of layers {first} and {second} exchanged", f"{name} of two layers is exchanged"
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
                    to_halves=to_halves, with_norms=with_norms, layers=_only(where), num_rotated=num_rotated
                )
                title = _named(f"rope over {layout}{rows}{suffix}", where)
                yield WeightReading(title, rewrite, cause, _spots((QUERY, KEY), where), where is not None)


def _fused(space: WeightSpace) -> Iterator[WeightReading]:
    """Stacked projections that were split at the wrong rows: by head, or by shards of tensor parallelism."""
    config = space.config
    stacked = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
    found: list[tuple[str, Rewrite]] = []
    rows = partial(rewrites.gate_up_by_shard, num_shards=config.intermediate_size)
    found.append(("gate and up fused row by row", rewrites.unfuse(rows, stacked["gate_up"])))
    if config.num_kv_heads > 1:
        found.append(("keys and values fused by head", rewrites.unfuse(rewrites.kv_by_head, stacked["qkv"])))
    for count in sorted({*SHARDS, config.num_kv_heads} - {1}):
        if config.num_kv_heads % count == 0:
            rows = partial(rewrites.qkv_by_shard, num_shards=count)
            found.append((f"queries, keys and values in {count} shards", rewrites.unfuse(rows, stacked["qkv"])))
        if config.intermediate_size % count == 0:
            rows = partial(rewrites.gate_up_by_shard, num_shards=count)
            found.append((f"gate and up in {count} shards", rewrites.unfuse(rows, stacked["gate_up"])))
    for name, rewrite in found:
        yield WeightReading(name, rewrite, "a fused projection was split at the wrong rows", frozenset())


def _reordered(space: WeightSpace) -> Iterator[WeightReading]:
    """Rows or columns in another regular order."""
    for axis, parts, orders in axes(space.config):
        where = " and ".join(_short(part) for part in parts)
        for layer in space.groups if not set(parts) & set(ENDS) else (None,):
            for name, order in orders.items():
                changes = {part: rewrites.along(dim, order) for part, dim in parts.items()}
                rewrite = rewrites.change_parts(changes, _only(layer))
                title = _named(f"{axis} of {where} {name}", layer)
                cause = f"the {axis} of {where} are in another order"
                yield WeightReading(title, rewrite, cause, _spots(parts, layer), True)


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
            title = _named(f"rows of {name} {way} {count} shards in turn", layer)
            cause = "the rows of several matrices are in another order, as if shards took them in turn"
            rewrite = rewrites.change_parts(changes, _only(layer))
            yield WeightReading(title, rewrite, cause, _spots(parts, layer), layer is not None)


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
            rewrite = rewrites.change_parts({part: rewrites.by_column}, _only(layer))
            cause = f"the values of {_short(part)} are stored by columns, as those of its transpose"
            title = _named(f"{_short(part)} read by columns", layer)
            yield WeightReading(title, rewrite, cause, _spots((part,), layer), layer is not None)
    groups = {
        "all matrices": MATRICES, "matrices of layers": MATRICES[:-1], "matrices of attention": (*QKV, OUT),
        "matrices of the MLP": (GATE, UP, DOWN),
    }  # fmt: skip
    for name, parts in groups.items():
        for layer in space.layers if "fc" not in parts else (None,):
            rewrite = rewrites.change_parts(dict.fromkeys(parts, rewrites.by_column), _only(layer))
            title, cause = (
                _named(f"{name} read by columns", layer),
                "the values of several matrices are stored by columns",
            )
            yield WeightReading(title, rewrite, cause, _spots(parts, layer), layer is not None)


def _scales(space: WeightSpace) -> Iterator[WeightReading]:
    """Tensors times a factor: usual factors for norms, and the factor that brings a tensor to its siblings' size."""
    for part in rewrites.PARTS:
        if part == "norm":
            continue
        for layer in space.layers if part not in ENDS else (None,):
            factors: set[float] = {*FACTORS, space.config.head_dim**-0.5, space.config.head_dim**0.5}
            factors = factors if part in NORMS else {-1.0}
            if space.weights and layer is not None:
                beside = scale_beside_siblings(space.weights, space.config, part, layer)
                factors |= set(beside)
                yield from (_scaled_elsewhere(space, part, layer, 1 / factor) for factor in beside)
            if part in MATRICES and (layer is None or part in {VALUE, OUT, DOWN, UP}):
                factors |= {0.125, 0.25, 0.5, 2.0, 4.0, 8.0} if part not in {QUERY, KEY, "fc"} else set()
            for factor in sorted(factors):
                rewrite = rewrites.change_parts({part: rewrites.scale(factor)}, _only(layer))
                cause = f"the values of {_names_of_equals(part)} are {'negated' if factor == -1 else 'scaled'}"
                title = _named(f"{_short(part)} times {factor:.3g}", layer)
                yield WeightReading(title, rewrite, cause, _spots((part,), layer), True, is_scale=True)


def _names_of_equals(part: str) -> str:
    """A part and the part whose scale has the same effect: no run can tell them apart."""
    return next((" or ".join(map(_short, pair)) for pair in EQUAL_SCALES if part in pair), _short(part))


def _scaled_elsewhere(space: WeightSpace, part: str, layer: int, factor: float) -> WeightReading:
    """A part times a factor in every other layer. Few layers do not tell which of them were scaled."""
    others = tuple(at for at in range(space.config.num_layers) if at != layer)
    rewrite = rewrites.change_parts({part: rewrites.scale(factor)}, others)
    title, cause = (
        _named(f"{_short(part)} times {factor:.3g}", others),
        f"the values of {_names_of_equals(part)} are scaled",
    )
    return WeightReading(title, rewrite, cause, _spots((part,), others))


def _biases(space: WeightSpace) -> Iterator[WeightReading]:
    if space.config.attention_bias:
        yield WeightReading("no biases", rewrites.zero_biases, "the biases do not belong to the draft", frozenset())


FAMILIES = (
    _norm_offsets, _exchanges, _layer_parts, _rope_layouts, _fused, _reordered, _dealt, _by_column, _scales, _biases,
)  # fmt: skip
