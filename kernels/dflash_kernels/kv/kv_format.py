"""How caches store keys and values: in the dtype of the rows, or in FP8 (e4m3) with a scale.

A cache in FP8 holds `row / scale`, rounded to the nearest number. Larger numbers become 448. Kernels convert tiles
right after they load them, which is exact. Attention converts them to float16 where queries are in bfloat16, because a
GPU converts FP8 to no other 16 bits in one instruction. Kernels multiply the key scale into the scores and the value
scale into the output. Rows of a block that later steps read from the cache are rounded before attention, too,
so that a row sees the same keys in every step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_config import has_fp8
from dflash_kernels.fp8.fp8_numbers import as_bytes, as_fp8, from_bytes
from dflash_kernels.fp8.fp8_weight import FP8, FP8_MAX
from dflash_kernels.launch import check_dtypes, constexpr, jit, tl


class KVScales(NamedTuple):
    """The numbers by which the keys and values of a cache in FP8 are multiplied. Other caches have scales of 1."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def stored_ref(rows: Tensor, cache: Tensor, scale: float) -> Tensor:
    """Return rows as a cache stores them, in the dtype of the cache."""
    if cache.dtype != FP8:
        return rows
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)) * (1 / scale)
    return wide.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def check_formats(key_cache: Tensor, value_cache: Tensor, *rows: Tensor) -> None:
    """Raise TypeError unless all rows have one dtype, one of FLOATS, and both caches this dtype or both FP8."""
    if key_cache.dtype == value_cache.dtype == FP8:
        check_dtypes(*rows)
    else:
        check_dtypes(*rows, key_cache, value_cache)


def as_readable(cache: Tensor) -> Tensor:
    """Return a cache for a launch: in bytes if the device does not convert FP8."""
    return cache.view(torch.uint8) if cache.dtype == FP8 and not has_fp8(cache.device) else cache


_TL_FOUR_NUMBERS = constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
"""Converts four numbers of e4m3 to float16, exactly."""


@jit
def to_cache(rows, inverse_scale, dtype: tl.constexpr):
    """Return a tile of rows as a cache of this dtype stores it. `inverse_scale` is a number, or a tile of numbers."""
    if dtype == tl.uint8:
        rows = as_bytes(rows.to(tl.float32) * inverse_scale)
    elif dtype == tl.float8e4nv:
        rows = as_fp8(rows.to(tl.float32) * inverse_scale, dtype)
    return rows


@jit
def beside_cache(queries, dtype: tl.constexpr):
    """Return queries as scores with tiles of a cache of this dtype take them. Float16 ends at 65,504."""
    is_fp8: tl.constexpr = dtype == tl.float8e4nv or dtype == tl.uint8
    if is_fp8 and queries.dtype == tl.bfloat16:
        queries = tl.minimum(tl.maximum(queries.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return queries


@jit
def from_cache(tile, dtype: tl.constexpr, IS_TURNED: tl.constexpr = False):
    """Return a tile of a cache in the dtype of a computation, without its scale.

    IS_TURNED: a product sums over the rows of the tile. Tensor cores then want its columns, which hardware turns in 16
    bits only. The compiler would turn FP8 byte by byte and convert afterwards, unless the conversion must not move.
    """
    if tile.dtype == tl.uint8:
        tile = from_bytes(tile)
    if IS_TURNED and tile.dtype == tl.float8e4nv and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _TL_FOUR_NUMBERS, "=r,=r,r", [tile], dtype=tl.float16, is_pure=False, pack=4
        )  # fmt: skip
    return tile.to(dtype)
