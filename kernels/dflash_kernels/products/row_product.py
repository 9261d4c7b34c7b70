"""Products of one row with a weight, as in plain decoding of one request.

Threads multiply and add, and keep the next tiles of the weight in registers. Tensor cores would wait for a whole tile
in shared memory, and for each sum before the next one. The first tiles are loaded before the wait for earlier launches.

Axis letters: K inner width, N columns, P parts, F width of a gated product, C weight rows of a tile.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import IS_INTERPRETED, ceil_div, check_dtypes, check_tensors, jit, require, tl
from dflash_kernels.products.activation import SILU, Gate, gate_options, joined_tiles
from dflash_kernels.products.product_config import ROW_DEPTH, RowShape, row_shape


@jit
def _weight_tile(
    weight_rows, is_column, inner, DEPTH: tl.constexpr, HAS_ALL_COLUMNS: tl.constexpr, MAY_END: tl.constexpr
):
    """Load columns `inner` of weight rows, given as pointers: [C, TILE_K]. `MAY_END` tiles extend beyond DEPTH."""
    tile = weight_rows[:, None] + inner[None, :]
    # Each weight is read once per step, so it should not displace other data in the cache.
    if MAY_END:
        is_weight = is_column[:, None] & (inner < DEPTH)[None, :]
        loaded = tl.load(tile, mask=is_weight, other=0.0, eviction_policy="evict_first")
    elif HAS_ALL_COLUMNS:
        loaded = tl.load(tile, eviction_policy="evict_first")
    else:
        loaded = tl.load(tile, mask=is_column[:, None], other=0.0, eviction_policy="evict_first")
    return loaded


@jit
def _row_tile(hidden, inner, DEPTH: tl.constexpr, MAY_END: tl.constexpr):
    """Load columns `inner` of the row, [TILE_K]. L1 may hold what a launch that still runs has replaced: skip it."""
    if MAY_END:
        loaded = tl.load(hidden + inner, mask=inner < DEPTH, other=0.0, cache_modifier=".cg")
    else:
        loaded = tl.load(hidden + inner, cache_modifier=".cg")
    return loaded


@jit
def row_sums(
    hidden, weight_rows, is_column, first_tile,
    DEPTH: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_ALL_COLUMNS: tl.constexpr, TILE_C: tl.constexpr,
    TILE_K: tl.constexpr, TILES_AHEAD: tl.constexpr, WAITS: tl.constexpr, LETS_NEXT_BEGIN: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Return the sums of a row times weight rows, which are pointers, over one part of the row: float32 [TILE_C].

    The first `TILES_AHEAD` tiles of the weight are loaded first. Then `WAITS` waits for the launches before, and
    `LETS_NEXT_BEGIN` lets the next launch begin.
    """
    # Equal numbers of tiles per part, known to the compiler. Tiles of the last part after the end are zeros.
    NUM_TILES: tl.constexpr = ((DEPTH + TILE_K - 1) // TILE_K + NUM_PARTS - 1) // NUM_PARTS
    NUM_WHOLE: tl.constexpr = NUM_TILES - (NUM_TILES * NUM_PARTS * TILE_K - DEPTH + TILE_K - 1) // TILE_K
    NUM_AHEAD: tl.constexpr = TILES_AHEAD if TILES_AHEAD < NUM_TILES else NUM_TILES
    ROWS_AHEAD: tl.constexpr = 3 if NUM_TILES > 3 else NUM_TILES
    first = first_tile * NUM_TILES * TILE_K + tl.arange(0, TILE_K)
    tiles, rows = (), ()
    for tile in tl.static_range(NUM_AHEAD):
        tiles += (  # type: ignore[assignment]
            _weight_tile(weight_rows, is_column, first + tile * TILE_K, DEPTH, HAS_ALL_COLUMNS, tile >= NUM_WHOLE),
        )
    if WAITS:
        wait_for_launches_before(IS_EARLY)
    if LETS_NEXT_BEGIN:
        let_next_launch_begin(IS_EARLY)
    for tile in tl.static_range(ROWS_AHEAD):
        rows += (_row_tile(hidden, first + tile * TILE_K, DEPTH, tile >= NUM_WHOLE),)  # type: ignore[assignment]
    acc = tl.zeros((TILE_C, TILE_K), tl.float32)
    for tile in tl.static_range(NUM_TILES):
        row = tl.broadcast_to(rows[tile].to(tl.float32)[None, :], (TILE_C, TILE_K))
        acc = tl.fma(tiles[tile].to(tl.float32), row, acc)
        if tile + NUM_AHEAD < NUM_TILES:
            inner = first + (tile + NUM_AHEAD) * TILE_K
            tiles += (
                _weight_tile(weight_rows, is_column, inner, DEPTH, HAS_ALL_COLUMNS, tile + NUM_AHEAD >= NUM_WHOLE),
            )
        if tile + ROWS_AHEAD < NUM_TILES:
            inner = first + (tile + ROWS_AHEAD) * TILE_K
            rows += (_row_tile(hidden, inner, DEPTH, tile + ROWS_AHEAD >= NUM_WHOLE),)
    return tl.sum(acc, 1)


@jit
def gated_sums(sums, dtype: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
               TILE_F: tl.constexpr):  # fmt: skip
    """Return the gate of sums of TILE_F gate rows, then TILE_F up rows, in the model's dtype: [TILE_F]."""
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, TILE_F)), (1, 0)))
    return joined_tiles(gate.to(dtype), up.to(dtype), KIND, ALPHA, LIMIT)


@jit
def _row_product_kernel(
    hidden, weight, bias, out,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, NUM_PARTS: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE_C: tl.constexpr, TILE_K: tl.constexpr, TILES_AHEAD: tl.constexpr, IS_BESIDE: tl.constexpr,
    LETS_NEXT_BEGIN: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    TILE_F: tl.constexpr = TILE_C // 2 if IS_GATED else TILE_C
    dtype: tl.constexpr = out.dtype.element_ty
    side, part = tl.arange(0, TILE_C), tl.program_id(1)
    column = tl.program_id(0) * TILE_F + side % TILE_F
    weight_rows = weight + (side // TILE_F * NUM_COLUMNS + column).to(tl.int64) * DEPTH
    sums = row_sums(
        hidden, weight_rows, column < NUM_COLUMNS, part, DEPTH, NUM_PARTS, NUM_COLUMNS % TILE_F == 0,
        TILE_C, TILE_K, TILES_AHEAD, not IS_BESIDE, LETS_NEXT_BEGIN, IS_EARLY,
    )  # fmt: skip
    place = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    is_place = place < NUM_COLUMNS
    if IS_GATED:
        sums = gated_sums(sums, dtype, KIND, ALPHA, LIMIT, TILE_F).to(tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + place, mask=is_place & (part == 0), other=0.0).to(tl.float32)
    tl.store(out + part.to(tl.int64) * NUM_COLUMNS + place, sums.to(dtype), mask=is_place)
    if IS_BESIDE:
        wait_for_launches_before(IS_EARLY)


def cut_of_row(hidden: Tensor, weight: Tensor, *, is_gated: bool = False) -> RowShape | None:
    """Return the tiling of a product of [1, K] and [N, K], or None if other kernels compute it."""
    itemsize = hidden.element_size()
    if hidden.dim() != 2 or len(hidden) != 1 or not (itemsize == 2 or IS_INTERPRETED):
        return None
    num_columns = len(weight) // 2 if is_gated else len(weight)
    return row_shape(num_columns, hidden.shape[1], hidden.device, is_gated=is_gated)


def row_product(
    hidden: Tensor,
    weight: Tensor,
    shape: RowShape,
    *,
    bias: Tensor | None = None,
    gate: Gate | None = None,
    is_beside: bool = False,
    lets_next_begin: bool = True,
) -> Tensor:
    """Multiply one row in one launch: [1, K], [N, K] -> parts [P, 1, N], or with a gate [1, K], [2 F, K] -> [1, 1, F].

    is_beside        the launch before writes nothing that this one reads, and has let this one begin after its wait,
                     so this launch runs beside it
    lets_next_begin  the next launch begins with this one
    """
    biases, is_gated = () if bias is None else (bias,), gate is not None
    check_tensors(hidden, weight, *biases)
    check_dtypes(hidden, weight, *biases)
    depth, num_columns = hidden.shape[1], len(weight) // 2 if is_gated else len(weight)
    require(weight.dim() == 2 and weight.shape[1] == depth, "weight", "as many columns as `hidden`")
    require(weight.is_contiguous() and hidden.stride(1) == 1, "hidden, weight", "contiguous rows")
    require(not is_gated or len(weight) % 2 == 0, "weight", "equally many gate rows and up rows")
    require(bias is None or bias.shape == (len(weight),), "bias", "one number per row of `weight`")
    dtype = torch.float32 if shape.num_parts > 1 else hidden.dtype
    out = torch.empty((shape.num_parts, 1, num_columns), dtype=dtype, device=hidden.device)
    tile = shape.weight_rows // 2 if is_gated else shape.weight_rows
    _row_product_kernel[(ceil_div(num_columns, tile), shape.num_parts)](
        hidden, weight, out if bias is None else bias.contiguous(), out,
        NUM_COLUMNS=num_columns, DEPTH=depth, NUM_PARTS=shape.num_parts, IS_GATED=is_gated, HAS_BIAS=bias is not None,
        TILE_C=shape.weight_rows, TILE_K=ROW_DEPTH, TILES_AHEAD=shape.tiles_ahead, IS_BESIDE=is_beside,
        LETS_NEXT_BEGIN=lets_next_begin, num_warps=shape.num_warps, maxnreg=shape.max_registers,
        enable_fp_fusion=False, **gate_options(gate or SILU), **early(hidden.device),
    )  # fmt: skip
    return out
