"""Readings of DFlash 2 drafts: convolutions and the candidate selector.

A convolution has a shared part, `base_kernel` [2, S, H], and `kernel_projection` with rows for [2, S, G]. The axes are
the sides before and after the sublayer, taps, and columns or groups of columns.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import FAMILY_READINGS, AlternativeReading, ReadingSpace
from dflash_cli.diagnosis.family_readings.token_pairs import (
    candidate_readings,
    embedding_readings,
    permuted,
    scale_readings,
    table_readings,
    without_table,
)
from dflash_cli.diagnosis.run_level import reading_rule
from dflash_cli.diagnosis.weight_rewrites import Change
from dflash_cli.rules.subject import WEIGHTS
from dflash_runtime.checkpoint.layout import CONVOLUTIONS, SELECTOR

if TYPE_CHECKING:
    from torch import Tensor

PREDECESSORS, SUCCESSORS = (f"{SELECTOR}.{part}_codebook" for part in ("predecessor", "successor"))
PROJECTION = f"{SELECTOR}.hidden_projection.weight"
BASE, DYNAMIC = "base_kernel", "kernel_projection.weight"
MOST_LAYERS_ALONE = 8
"""In drafts with more layers, single layers are not tried."""


@FAMILY_READINGS.register("dflash2")
def dflash2_readings(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Every reading that only DFlash 2 drafts have."""
    yield from scale_readings(space)
    yield from embedding_readings(space)
    if space.weights:
        yield from _convolutions(space)
        yield from _selector(space)
    yield from candidate_readings(space, "selector")


def _selector(space: ReadingSpace) -> Iterator[AlternativeReading]:
    factors = ("predecessor_codebook", "hidden_projection")
    yield from table_readings(space, "selector", PREDECESSORS, SUCCESSORS, factors=factors)
    yield without_table(space, "selector", "the selector", SUCCESSORS)
    cause = "the values of hidden_projection are in another order"
    changes = {
        "rows of hidden_projection in reverse": rewrites.along(0, rewrites.reverse),
        "rows of hidden_projection with halves exchanged": rewrites.along(0, rewrites.exchange_halves),
        "columns of hidden_projection in reverse": rewrites.along(1, rewrites.reverse),
        "columns of hidden_projection with halves exchanged": rewrites.along(1, rewrites.exchange_halves),
        "hidden_projection read by columns": rewrites.by_column,
    }
    for name, change in changes.items():
        rewrite = rewrites.change_tensors({PROJECTION: change})
        touches = frozenset({(PROJECTION, None)})
        yield AlternativeReading("selector", name, space.config, cause, rewrite, touches=touches)


def _convolutions(space: ReadingSpace) -> Iterator[AlternativeReading]:
    count = space.config.num_layers
    for layer in (None, *(range(count) if 1 < count <= MOST_LAYERS_ALONE else ())):
        layers, where = (range(count), "") if layer is None else ((layer,), f" in layer {layer}")
        for parts in (CONVOLUTIONS, *((part,) for part in CONVOLUTIONS)):
            names = [f"layers.{at}.{part}." for at in layers for part in parts]
            touches = frozenset((part, layer) for part in parts)
            for title, (cause, base, dynamic) in _changes(space).items():
                changes = {f"{name}{BASE}": base for name in names} | {f"{name}{DYNAMIC}": dynamic for name in names}
                wanted = {name: change for name, change in changes.items() if change is not None}
                is_scale = title in WEAKER or (" times " in title and " -1" not in title)
                yield AlternativeReading(
                    "convolution", f"{title} of {' and '.join(parts)}{where}", space.config, cause,
                    rewrites.change_tensors(wanted), touches=touches, is_guess=layer is not None,
                    is_neutral=title == WITHOUT, is_scale=is_scale,
                )  # fmt: skip
        pairs = [
            tuple(f"layers.{at}.{part}.{tensor}" for part in CONVOLUTIONS)
            for at in layers
            for tensor in (BASE, DYNAMIC)
        ]
        yield AlternativeReading(
            "convolution", f"attention_conv and mlp_conv exchanged{where}", space.config,
            "attention_conv and mlp_conv are exchanged",
            rewrites.exchange_tensors([(one, other) for one, other in pairs]),
            touches=frozenset((part, layer) for part in CONVOLUTIONS), is_guess=layer is not None,
            halves=(
                rewrites.exchange_tensors([(one, other) for one, other in pairs], is_half=True),
                rewrites.exchange_tensors([(other, one) for one, other in pairs], is_half=True),
            ),
        )  # fmt: skip


WITHOUT = "without convolutions"
WEAKER = ("shared kernels alone", "kernels as offsets from the row itself", "kernels without the row itself")
"""Titles of changes that may also make up for damaged values."""


def _changes(space: ReadingSpace) -> dict[str, tuple[str, Change | None, Change | None]]:
    """Title -> (cause, change of the shared part, change of the projection)."""
    convolution, hidden = space.config.convolution, space.config.hidden_size
    assert convolution is not None
    grid = (2, convolution.kernel_size, hidden // convolution.group_size)
    sides, taps = "the convolutions before and after a sublayer are exchanged", "the taps of convolutions are reversed"
    found: dict[str, tuple[str, Change | None, Change | None]] = {
        "sides exchanged": (sides, _flipped(0), _rows_flipped(grid, 0)),
        "sides of base_kernel exchanged": (sides, _flipped(0), None),
        "sides of kernel_projection exchanged": (sides, None, _rows_flipped(grid, 0)),
        "kernels as offsets from the row itself": (
            "base_kernel holds offsets from the row itself",
            _shifted(1.0),
            None,
        ),
        "kernels without the row itself": ("the row itself was added to base_kernel", _shifted(-1.0), None),
        WITHOUT: ("convolutions are damaged", _identity, rewrites.scale(0.0)),
        "shared kernels alone": ("kernel_projection is damaged", None, rewrites.scale(0.0)),
        "groups in reverse": ("the groups of kernel_projection are in another order", None, _rows_flipped(grid, 2)),
    }
    if convolution.kernel_size > 1:
        found |= {
            "taps reversed": (taps, _flipped(1), _rows_flipped(grid, 1)),
            "taps of base_kernel reversed": (taps, _flipped(1), None),
            "taps of kernel_projection reversed": (taps, None, _rows_flipped(grid, 1)),
        }
    for order in permutations(range(3)):
        if order != (0, 1, 2):
            words = " ".join(("sides", "taps", "groups")[axis] for axis in order)
            cause = "the rows of kernel_projection are in another order"
            found[f"rows of kernel_projection as {words}"] = (cause, None, permuted(grid, order))
    for factor in (-1.0, 0.25, 0.5, 2.0, 4.0):
        for title, changes in (
            ("base_kernel", (rewrites.scale(factor), None)),
            ("kernel_projection", (None, rewrites.scale(factor))),
        ):
            found[f"{title} times {factor:g}"] = (f"the values of {title} are scaled or negated", *changes)
    return found


def _flipped(axis: int) -> Change:
    return lambda tensor: tensor.flip(axis)


def _rows_flipped(grid: tuple[int, int, int], axis: int) -> Change:
    return lambda tensor: tensor.view(*grid, -1).flip(axis).reshape(tensor.shape)


def _shifted(amount: float) -> Change:
    def change(tensor: "Tensor") -> "Tensor":
        tensor = tensor.clone()
        tensor[:, 0] += amount
        return tensor

    return change


def _identity(tensor: "Tensor") -> "Tensor":
    return _shifted(1.0)(tensor * 0)


reading_rule(
    "R13",
    "convolution",
    """No exchange or rewriting of convolutions explains why few draft tokens of a DFlash 2 draft are accepted.

    The run tries the sides before and after a sublayer, taps, groups and rows in other orders, and other scales.
    """,
    at=lambda _: WEIGHTS,
    effect="readers probably convolve the rows of a block in another way than in training",
    step="export the draft again with the right tensors (the reading names them)",
    source="z-lab/dflash 0.1.0 model.py, GroupedDynamicCausalConv; vLLM 0.33.0 qwen3_dflash2.py",
)
reading_rule(
    "R14",
    "selector",
    """No exchange or rewriting of the selector's tensors explains why few draft tokens are accepted.

    The run tries the codebooks exchanged, with rows of other tokens, in other orders and scales, and no selector.
    """,
    at=lambda _: WEIGHTS,
    effect="the selector probably scores other pairs of tokens than in training",
    step="export the draft again with the right tensors (the reading names them)",
    source="z-lab/dflash 0.1.0 model.py; speculators 0.9.0 models/dflash2",
)
