"""Products of packed weights with up to eight rows, in assembly: each warp reads, unpacks and multiplies by itself.

A warp loads numbers into the registers in which tensor cores want them. The warps of a program share a sum over
columns: each computes every W-th tile of 128 columns. Warps use shared memory and wait for each other only at the end,
to add up their sums.

The loop is assembly for two reasons. Triton decides where the elements of a tile lie. And the assembler would move the
loads of the next tile behind the products of this tile, unless a branch stands between them.

A thread is lane 4 g + t of its warp. It holds the columns 16 j + 4 t + (0, 1, 2, 3) of each tile. Of a weight it holds
the rows g, g + 8, g + 16 and g + 24, and of the hidden states row g. The j-th of eight products sums these columns over
the lanes.

Axis letters: G groups of 32 rows of a weight, W warps.
"""

from collections.abc import Iterator

from dflash_kernels.launch import constexpr_function, tl
from dflash_kernels.mixtures.mxfp4 import FACTOR_MASK, GROUP, MASK, MASKED_VIEWS, TILE, WORDS

TILE_BYTES, SCALE_BYTES, HIDDEN_BYTES = 4 * WORDS * GROUP, 4 * GROUP, 2 * TILE
"""Bytes of a tile's numbers and scales, and of the same columns of a row of hidden states in bfloat16."""


@constexpr_function
def sum_types(groups: int, warps: int) -> tuple[object, ...]:
    """Return the dtypes of a thread's sums."""
    return (tl.float32,) * (8 * groups // warps)


@constexpr_function
def constraints(groups: int, warps: int) -> str:
    """Return the constraints of a thread's sums, and of the addresses of numbers, scales and a hidden state."""
    return ",".join(["=f"] * (8 * groups // warps) + ["l"] * (2 * groups + 1))


@constexpr_function
def warp_products(groups: int, depth: int, warps: int, waits: bool) -> str:
    """Return the assembly. Its operands: 8 G / W sums, G addresses of numbers, G of scales, one of a hidden state.

    A weight or hidden state with address 0 is zero. With `waits`, the launches before are awaited after the first
    weights are loaded. Sum c of a group in warp w has the number q = 8 w / W + c. It belongs to row
    16 (q / 4) + 8 (q % 4 / 2) + g of the group and to hidden state 2 t + q % 2.
    """
    return "\n".join(_program(groups, depth, warps, waits))


@constexpr_function
def _program(groups: int, depth: int, warps: int, waits: bool) -> Iterator[str]:
    """Return the lines of the program. Each of two turns has its registers: one loads while the other multiplies."""
    num_tiles = -(-depth // TILE)
    yield "{"
    yield ".reg .pred last, inner, near, never, has, none;"
    yield ".reg .b16 l, h;  .reg .b32 warp, lane, tile, at, s, z, a<4>, e<4>, k<2>;  .reg .b64 o, x;"
    yield f".reg .b64 n<{groups}>, c<{groups}>;  .reg .f32 d<{8 * groups}>, p<4>;"
    for turn in range(2):
        yield f".reg .b32 w{turn}_<{16 * groups}>, f{turn}_<{4 * groups}>, v{turn}_<16>;"
    yield from _addresses(groups, warps)
    yield from (f"mov.b32 v{turn}_{i}, 0;" for turn in range(2) for i in range(16))
    yield from (f"mov.f32 d{i}, 0f00000000;" for i in range(8 * groups))
    yield f"setp.eq.u64 none, ${8 * groups // warps}, 0;  @none bra.uni done;"
    yield f"setp.ge.u32 last, tile, {num_tiles};  @last bra.uni done;"
    yield from _weight_loads(0, groups, 0)
    if waits:
        yield "griddepcontrol.wait;"
    yield from _hidden_loads(0, depth, 0)
    yield "again:"
    for turn in range(2):
        yield f"and.b32 s, f{turn}_{4 * groups - 1}, 0x7F80;  setp.eq.u32 never, s, 0;"
        yield f"add.u32 tile, tile, {warps};  setp.ge.u32 last, tile, {num_tiles};  @last bra.uni last{turn};"
        yield from _weight_loads(1 - turn, groups, (turn + 1) * warps)
        yield from _hidden_loads(1 - turn, depth, (turn + 1) * warps)
        yield f"last{turn}:"
        # A scale's exponent is never 0, so this branch is never taken. It keeps the loads before it where they are.
        yield "@never bra.uni done;"
        for half in range(2 * groups):
            yield from _products(turn, half)
        if turn:
            yield from _next_addresses(groups, 2 * warps)
        yield "@!last bra.uni again;" if turn else "@last bra.uni done;"
    yield "done:"
    yield from _sums_of_warps(groups, warps)
    yield "}"


@constexpr_function
def _addresses(groups: int, warps: int) -> Iterator[str]:
    """Find the warp and its first tile, and the addresses of a lane's first numbers, scales and hidden states."""
    numbers = 8 * groups // warps
    yield "mov.u32 lane, %tid.x;  shr.u32 warp, lane, 5;  and.b32 lane, lane, 31;  mov.b32 z, 0x80008000;"
    yield f"mov.b32 tile, warp;  mul.lo.u32 at, tile, {TILE_BYTES};  mad.lo.u32 at, lane, 16, at;  cvt.u64.u32 o, at;"
    yield from (f"add.u64 n{i}, ${numbers + i}, o;" for i in range(groups))
    yield f"shr.u32 s, lane, 2;  mul.lo.u32 at, tile, {SCALE_BYTES};  mad.lo.u32 at, s, 4, at;  cvt.u64.u32 o, at;"
    yield from (f"add.u64 c{i}, ${numbers + groups + i}, o;" for i in range(groups))
    yield f"and.b32 s, lane, 3;  mul.lo.u32 at, tile, {HIDDEN_BYTES};  mad.lo.u32 at, s, 8, at;  cvt.u64.u32 o, at;"
    yield f"add.u64 x, ${numbers + 2 * groups}, o;  setp.ne.u64 has, ${numbers + 2 * groups}, 0;"


@constexpr_function
def _next_addresses(groups: int, distance: int) -> Iterator[str]:
    """Move the addresses by a number of tiles."""
    for i in range(groups):
        yield f"add.u64 n{i}, n{i}, {distance * TILE_BYTES};  add.u64 c{i}, c{i}, {distance * SCALE_BYTES};"
    yield f"add.u64 x, x, {distance * HIDDEN_BYTES};"


@constexpr_function
def _weight_loads(turn: int, groups: int, distance: int) -> Iterator[str]:
    """Load a lane's numbers and scales of the tile at a distance from the addresses."""
    for i in range(groups):
        for j in range(4):  # row g + 8 j
            words = ", ".join(f"w{turn}_{16 * i + 4 * j + word}" for word in range(4))
            numbers, scale = 32 * WORDS * j + distance * TILE_BYTES, 32 * j + distance * SCALE_BYTES
            yield f"ld.global.L1::no_allocate.v4.b32 {{{words}}}, [n{i} + {numbers}];"
            yield f"ld.global.L1::no_allocate.b32 f{turn}_{4 * i + j}, [c{i} + {scale}];"


@constexpr_function
def _hidden_loads(turn: int, depth: int, distance: int) -> Iterator[str]:
    """Load a lane's columns of the hidden state. Of the last tile, only some of the eight parts may exist.

    Numbers of the other parts are zero, so registers keep what they have.
    """
    num_last = depth % TILE // 16
    if num_last:
        yield f"setp.lt.u32 inner, tile, {depth // TILE};  and.pred near, has, inner;"
    for j in range(8):
        words, is_cut = (f"v{turn}_{2 * j}", f"v{turn}_{2 * j + 1}"), num_last and j >= num_last
        address = f"[x + {32 * j + distance * HIDDEN_BYTES}]"
        yield f"@{'near' if is_cut else 'has'} ld.global.cg.v2.b32 {{{', '.join(words)}}}, {address};"


@constexpr_function
def _products(turn: int, half: int) -> Iterator[str]:
    """Unpack and multiply half of a group: rows g and g + 8 of its 16."""
    rows = (2 * half, 2 * half + 1)
    for side, row in enumerate(rows):
        scale = f"f{turn}_{row}"
        yield f"and.b32 e{2 * side}, {scale}, {FACTOR_MASK};"
        yield f"shf.l.wrap.b32 at, {scale}, {scale}, 8;  and.b32 e{2 * side + 1}, at, {FACTOR_MASK};"
    sums = ", ".join(f"d{4 * half + r}" for r in range(4))
    for step in range(8):
        word, view = divmod(step, 4)
        for side in range(2):
            yield f"mov.b32 {{l, h}}, e{2 * side + word};  mov.b32 k{side}, {{{'h, h' if view >= 2 else 'l, l'}}};"
        for pair in range(2):
            for side, row in enumerate(rows):
                number, packed = f"a{2 * pair + side}", f"w{turn}_{4 * row + 2 * pair + word}"
                yield MASKED_VIEWS[view].format(to=number, word=packed, other="at", mask=MASK)
                yield f"fma.rn.bf16x2 {number}, {number}, k{side}, z;"
        hidden = f"v{turn}_{2 * step}, v{turn}_{2 * step + 1}"
        yield "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        yield f"{{{sums}}}, {{a0, a1, a2, a3}}, {{{hidden}}}, {{{sums}}};"


@constexpr_function
def _sums_of_warps(groups: int, warps: int) -> Iterator[str]:
    """Add up the sums of all warps through shared memory. Each warp adds up 8 / W sums of each group."""
    count = 8 // warps
    if warps == 1:
        yield from (f"mov.f32 ${i}, d{i};" for i in range(8 * groups))
        return
    yield f".shared .align 16 .b8 room[{1024 * groups * warps}];"
    yield "mad.lo.u32 at, warp, 32, lane;  shl.b32 at, at, 4;  mov.u32 s, room;  add.u32 at, at, s;"
    for half in range(2 * groups):
        sums = ", ".join(f"d{4 * half + r}" for r in range(4))
        yield f"st.shared.v4.f32 [at + {512 * warps * half}], {{{sums}}};"
    yield f"bar.sync 0;  mul.lo.u32 at, warp, {count};  shr.u32 tile, at, 2;  and.b32 at, at, 3;"
    yield f"mad.lo.u32 s, lane, 16, s;  mad.lo.u32 s, at, 4, s;  mad.lo.u32 s, tile, {512 * warps}, s;"
    vector = f".v{count}" if count > 1 else ""
    for i in range(groups):
        for other in range(warps):
            parts = [f"p{c}" if other else f"d{4 * i + c}" for c in range(count)]
            words = f"{{{', '.join(parts)}}}" if count > 1 else parts[0]
            yield f"ld.shared{vector}.f32 {words}, [s + {512 * (2 * warps * i + other)}];"
            if other:
                yield from (f"add.f32 d{4 * i + c}, d{4 * i + c}, p{c};" for c in range(count))
        yield from (f"mov.f32 ${count * i + c}, d{4 * i + c};" for c in range(count))
