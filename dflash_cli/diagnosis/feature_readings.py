"""Readings of `fc.weight`. Its columns are the features of the tapped layers, one block of columns per layer."""

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.weight_orders import orders
from dflash_cli.diagnosis.weight_rewrites import Change, Order
from dflash_cli.diagnosis.weight_space import WeightReading, WeightSpace, spots

if TYPE_CHECKING:
    from torch import Tensor

SCALES = (-1.0, 0.0625, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
RAMPS = (0.25, 0.5, 2.0, 4.0)
"""Factors from the block of one tap to the next."""

REORDERED = "the features of fc are in another order"
TRANSPOSED = "blocks of fc.weight are transposed"
SCALED = "the columns of fc.weight for single tapped layers are scaled"


def feature_readings(space: WeightSpace) -> Iterator[WeightReading]:
    """Every reading of the columns of fc."""
    for title, cause, change in (*_ordered(space), *_transposed(space)):
        yield _reading(title, cause, change)
    if space.config.num_taps > 1:
        for title, change in _scaled(space):
            yield _reading(title, SCALED, change, is_scale=True)


def _reading(title: str, cause: str, change: Change, *, is_scale: bool = False) -> WeightReading:
    rewrite = rewrites.change_parts({"fc": change})
    return WeightReading(title, rewrite, cause, spots(("fc",), None), True, is_scale=is_scale)


def _ordered(space: WeightSpace) -> Iterator[tuple[str, str, Change]]:
    for title, order in _orders(space).items():
        yield f"features of fc {title}", REORDERED, rewrites.along(1, order)


def _orders(space: WeightSpace) -> dict[str, Order]:
    config = space.config
    taps, size = config.num_taps, config.hidden_size
    inside = orders(size)
    if taps == 1:
        return inside
    found = {
        **{f"{name} within each tap": rewrites.in_parts(order, taps) for name, order in inside.items()},
        "interleaved over taps": rewrites.transposed(taps),
        "from interleaved taps": rewrites.untransposed(taps),
        **_blocks_of_taps(size, taps),
        "with halves exchanged": rewrites.exchange_halves,
        "in reverse": rewrites.reverse,
    }
    for first, last in combinations(range(taps), 2):
        if last - first + 1 < taps:
            count, where = last - first + 1, f"the taps {first + 1} to {last + 1}"
            found[f"interleaved over {where}"] = _of_taps(rewrites.transposed(count), first, last, taps)
            found[f"from {where}, interleaved"] = _of_taps(rewrites.untransposed(count), first, last, taps)
    for tap in range(taps):
        found |= {f"{name} within tap {tap + 1}": _of_taps(order, tap, tap, taps) for name, order in inside.items()}
    return found


def _of_taps(order: Order, first: int, last: int, taps: int) -> Order:
    """The features of some neighbouring taps in another order, the others as they are."""

    def of(count: int) -> "Tensor":
        import torch

        found = torch.arange(count)
        begin, end = first * count // taps, (last + 1) * count // taps
        found[begin:end] = begin + order(end - begin)
        return found

    return of


def _blocks_of_taps(hidden_size: int, taps: int) -> dict[str, Order]:
    """The features of the taps by blocks of columns: a block of each tap, then the next block of each tap."""
    found: dict[str, Order] = {}
    for size in sorted({2, 4, 8, 16, 32, 64, 128, *(hidden_size // parts for parts in (2, 4, 8, 16))}):
        if 1 < size < hidden_size and hidden_size % size == 0:
            found[f"interleaved over taps by {size}"] = rewrites.of_heads(rewrites.transposed(taps), size)
            found[f"from taps interleaved by {size}"] = rewrites.of_heads(rewrites.untransposed(taps), size)
    return found


def _transposed(space: WeightSpace) -> Iterator[tuple[str, str, Change]]:
    """Blocks that are stored by columns: transposes, if they are square."""
    taps = range(space.config.num_taps)
    for chosen in (tuple(taps), *((tap,) for tap in taps)) if len(taps) > 1 else ():
        where = "every tap" if len(chosen) > 1 else f"tap {chosen[0] + 1}"
        yield (
            f"columns of fc for {where} read by columns",
            TRANSPOSED,
            _on_blocks(len(taps), chosen, rewrites.by_column),
        )


def _scaled(space: WeightSpace) -> Iterator[tuple[str, Change]]:
    count = space.config.num_taps
    for tap in range(count):
        for factor in SCALES:
            yield f"columns of fc for tap {tap + 1} times {factor:g}", _on_blocks(count, (tap,), rewrites.scale(factor))
    for factor in RAMPS:
        title = f"columns of fc for each tap times {factor:g} of the tap before"
        yield title, partial(_on_all, count, factor)
    yield "columns of fc for all taps with the same size", partial(_on_all, count, None)


def _on_blocks(count: int, chosen: tuple[int, ...], change: Change) -> Change:
    def changed(weight: "Tensor") -> "Tensor":
        import torch

        blocks = weight.chunk(count, dim=1)
        return torch.cat([change(block) if tap in chosen else block for tap, block in enumerate(blocks)], dim=1)

    return changed


def _on_all(count: int, factor: float | None, weight: "Tensor") -> "Tensor":
    """Each block times a factor more than the block before, or every block brought to the size of the first."""
    import torch

    blocks = weight.chunk(count, dim=1)
    if factor is None:
        sizes = [float(block.float().norm()) or 1.0 for block in blocks]
        return torch.cat([block * (sizes[0] / size) for block, size in zip(blocks, sizes, strict=True)], dim=1)
    return torch.cat([block * factor**tap for tap, block in enumerate(blocks)], dim=1)
