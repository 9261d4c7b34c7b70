"""Products of packed weights with up to 32 rows, in assembly: tensor cores multiply while warps unpack.

The four warps of a program multiply two halves of 64 weight rows with a tile of hidden states. The tensor cores of
Hopper (`wgmma`) take weights from registers and hidden states from shared memory, and warps do not wait for them. A
tile of 128 columns has four parts, each with one scale per row. There are registers for two unpacked parts: one is
multiplied while the other is unpacked. Triton would wait for each product.

A thread copies the numbers that it will unpack to its own place in shared memory, some tiles ahead, so it waits for no
other warp. One warp copies the hidden states of a tile (`arranged_rows.py`) for all, in two pieces. Of two barriers per
stage, the first says that they are there, and the second that all warps have multiplied them.

A thread is lane 4 g + t of warp w. In each half it holds the rows 16 w + g and 16 w + g + 8, and the columns
16 j + 4 t + (0, 1, 2, 3) of each tile, as in `warp_products.py`. The j-th of eight products sums these columns.

Axis letters: R rows of a tile of hidden states, S stages, T tiles of 128 columns.
"""

from collections.abc import Iterator

from dflash_kernels.launch import constexpr_function, tl
from dflash_kernels.mixtures.arranged_rows import PIECE
from dflash_kernels.mixtures.mxfp4 import FACTOR_MASK, GROUP, MASK, MASKED_VIEWS, TILE, WORDS

WARPS, THREADS = 4, 128

TILE_BYTES, SCALE_BYTES = 4 * WORDS * GROUP, 4 * GROUP
"""Bytes of the numbers and scales of a group of 32 rows in a tile."""

NUMBERS_BYTES, WEIGHT_BYTES = 64 * THREADS, 68 * THREADS
"""Bytes of a stage: the numbers of both halves, and numbers and scales."""

DESCRIPTOR = 1 << 30 | 8 * 2 * PIECE // 16
"""Upper word of a descriptor: the swizzle of 128 bytes, and the distance of eight rows in units of 16 bytes."""


@constexpr_function
def sum_types(rows: int) -> tuple[object, ...]:
    """Return the dtypes of the results of a thread: its sums, the first route of the tile and its number of rows."""
    return (tl.float32,) * rows + (tl.int32, tl.int32)


@constexpr_function
def constraints(rows: int) -> str:
    """Return the constraints of the operands."""
    return ",".join(["=f"] * rows + ["=r"] * 2 + ["l"] * 5)


@constexpr_function
def warpgroup_products(rows: int, depth: int, stages: int, writers: int) -> str:
    """Return the assembly. Its operands: R sums, the first route, the number of rows, and five addresses of a thread.

    The five addresses:

    - the thread's numbers in the first half, at row 16 w + g, and in the second half
    - one scale: lane 4 g + t has the scale of row 16 w + g + 8 (t % 2) of half t / 2
    - all arranged rows
    - the program's entry in the table of tiles

    Sum c of a half belongs to row 16 w + g + 8 (c % 4 / 2) of the half. Its row of the tile is 8 (c / 4) + 2 t + c % 2.
    Sums are zeros if the tile has no rows.

    Weights are loaded before the wait for hidden states. With `writers` = 0 the program waits for the launch before.
    Otherwise that launch may still run, and the program waits until `writers` programs of it have counted themselves in
    the entry.
    """
    return "\n".join(_program(rows, depth, stages, writers))


@constexpr_function
def _program(rows: int, depth: int, stages: int, writers: int) -> Iterator[str]:
    num_tiles = -(-depth // TILE)
    yield "{"
    yield from _declarations(rows, stages)
    yield from _addresses(rows, stages)
    for stage in range(stages):
        if stage < num_tiles:
            yield from _weight_loads(stage, stage, rows, stages)
        yield "cp.async.commit_group;"
    yield from _barriers(rows, stages)
    yield from _wait_for_rows(rows, depth, writers)
    for stage in range(min(stages - 1, num_tiles)):
        yield f"mov.b32 at, {stage};"
        yield from _hidden_loads(stage, "first", rows, depth, stages)
    yield "mov.b32 tile, 0;  mov.b32 phase, 0;"
    yield "again:"
    for stage in range(stages):
        yield from _tile(stage, rows, depth, stages)
        yield f"add.u32 tile, tile, 1;  setp.ge.u32 last, tile, {num_tiles};"
        if stage < stages - 1:
            yield "@last bra.uni done;"
    for address, distance in (("n0", TILE_BYTES), ("n1", TILE_BYTES), ("c", SCALE_BYTES)):
        yield f"add.u64 {address}, {address}, {stages * distance};"
    yield "xor.b32 phase, phase, 1;  @!last bra.uni again;"
    yield "done: wgmma.wait_group.sync.aligned 0;  cp.async.wait_group 0;"
    yield from (f"mov.f32 ${i}, d{i};" for i in range(rows))
    yield f"mov.b32 ${rows}, begin;  mov.b32 ${rows + 1}, count;"
    yield "}"


@constexpr_function
def _weights_at(rows: int, stages: int) -> int:
    """Return where numbers and scales begin in shared memory, behind the hidden states of all stages."""
    return stages * rows * 2 * TILE


@constexpr_function
def _full_at(stage: int, rows: int, stages: int) -> int:
    """Return the place of a stage's first barrier: its hidden states are there."""
    first: int = _weights_at(rows, stages) + stages * WEIGHT_BYTES
    return first + 8 * stage


@constexpr_function
def _empty_at(stage: int, rows: int, stages: int) -> int:
    """Return the place of a stage's second barrier: all warps have multiplied its hidden states."""
    place: int = _full_at(stages + stage, rows, stages)
    return place


@constexpr_function
def _declarations(rows: int, stages: int) -> Iterator[str]:
    yield f".shared .align 1024 .b8 room[{_full_at(2 * stages, rows, stages)}];"
    yield ".reg .pred last, on, lead, one, first, none, p;  .reg .b16 l, h;"
    yield ".reg .b32 shared, units, thread, lane, warp, tile, at, s, z, phase, bytes, both, wp, cp, begin, count;"
    yield ".reg .b32 e<6>, f<4>, w<16>, a<32>;"
    yield f".reg .b64 n0, n1, c, x, g, o, once, descriptor;  .reg .f32 d<{rows}>;"


@constexpr_function
def _addresses(rows: int, stages: int) -> Iterator[str]:
    """Find the warp, and the places of a thread's numbers and scales in shared memory."""
    at = _weights_at(rows, stages)
    yield from (f"mov.f32 d{i}, 0f00000000;" for i in range(rows))
    yield "mov.u32 thread, %tid.x;  and.b32 lane, thread, 31;  shr.u32 warp, thread, 5;  mov.u32 shared, room;"
    yield "mov.b32 z, 0x80008000;"
    yield "shfl.sync.idx.b32 warp, warp, 0, 31, 0xFFFFFFFF;  shr.u32 units, shared, 4;  and.b32 units, units, 0x3FFF;"
    yield "setp.eq.u32 lead, lane, 0;  setp.eq.u32 first, thread, 0;"
    yield f"mad.lo.u32 wp, thread, 16, shared;  add.u32 wp, wp, {at};"
    yield f"mad.lo.u32 cp, thread, 4, shared;  add.u32 cp, cp, {at + NUMBERS_BYTES};"
    yield f"and.b32 s, thread, 0xFFFFFFFC;  mad.lo.u32 s, s, 4, shared;  add.u32 s, s, {at + NUMBERS_BYTES};"
    yield f"mov.b64 n0, ${rows + 2};  mov.b64 n1, ${rows + 3};  mov.b64 c, ${rows + 4};"
    yield "createpolicy.fractional.L2::evict_first.b64 once, 1.0;"


@constexpr_function
def _weight_loads(stage: int, distance: int, rows: int, stages: int) -> Iterator[str]:
    """Copy a thread's numbers and one scale of the tile at a distance from the addresses. They are read only once."""
    at = stage * WEIGHT_BYTES
    for half in range(2):
        for side in range(2):  # row g + 8 side
            to, source = at + (2 * half + side) * 16 * THREADS, distance * TILE_BYTES + 32 * WORDS * side
            yield f"cp.async.cg.shared.global.L2::cache_hint [wp + {to}], [n{half} + {source}], 16, once;"
    yield f"cp.async.ca.shared.global.L2::cache_hint [cp + {at}], [c + {distance * SCALE_BYTES}], 4, once;"


@constexpr_function
def _barriers(rows: int, stages: int) -> Iterator[str]:
    for stage in range(stages):
        yield f"@first mbarrier.init.shared::cta.b64 [shared + {_full_at(stage, rows, stages)}], 1;"
        yield f"@first mbarrier.init.shared::cta.b64 [shared + {_empty_at(stage, rows, stages)}], {WARPS};"
    yield "@first fence.mbarrier_init.release.cluster;"


@constexpr_function
def _wait_for_rows(rows: int, depth: int, writers: int) -> Iterator[str]:
    """Wait until the hidden states are written, and find them."""
    entry = f"${rows + 6}"
    if not writers:
        yield "griddepcontrol.wait;"
    yield "griddepcontrol.launch_dependents;"
    yield f"ld.global.cg.b32 begin, [{entry} + 4];  ld.global.cg.b32 count, [{entry} + 8];"
    yield "shfl.sync.idx.b32 begin, begin, 0, 31, 0xFFFFFFFF;  shfl.sync.idx.b32 count, count, 0, 31, 0xFFFFFFFF;"
    yield "setp.eq.s32 none, count, 0;  @none bra.uni done;"
    yield f"mad.wide.u32 x, begin, {2 * PIECE * -(-depth // PIECE)}, ${rows + 5};"
    yield f"shl.b32 bytes, count, {(2 * PIECE).bit_length() - 1};  shl.b32 both, bytes, 1;"
    if writers:
        yield f"written: ld.acquire.gpu.global.b32 at, [{entry} + 12];"
        yield f"setp.lt.u32 p, at, {writers};  @p bra.uni written;  fence.proxy.async;"
    yield "bar.sync 0;"


@constexpr_function
def _hidden_loads(stage: int, guard: str, rows: int, depth: int, stages: int) -> Iterator[str]:
    """Let a thread copy the rows of tile `at`. If the last tile has no second piece, its numbers are zero.

    Then the first piece is copied twice, because a zero times what memory holds by chance may not be zero.
    """
    to, full = stage * rows * 2 * TILE, f"[shared + {_full_at(stage, rows, stages)}]"
    copy = f"@{guard} cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    yield f"@{guard} mbarrier.arrive.expect_tx.shared::cta.b64 _, {full}, both;"
    yield "mad.wide.u32 g, at, both, x;"
    yield f"{copy} [shared + {to}], [g], bytes, {full};"
    if 0 < depth % TILE <= PIECE:
        yield f"setp.lt.u32 p, at, {depth // TILE};  selp.b32 at, bytes, 0, p;  cvt.u64.u32 o, at;"
    else:
        yield "cvt.u64.u32 o, bytes;"
    yield f"add.u64 g, g, o;  {copy} [shared + {to + rows * 2 * PIECE}], [g], bytes, {full};"


@constexpr_function
def _tile(stage: int, rows: int, depth: int, stages: int) -> Iterator[str]:
    """Multiply a tile, and load others where this tile and the rows of the tile before were.

    A stage is released once more than it is loaded, in the first tile. Then its barriers have the same phase.
    """
    released = (stage - 1) % stages
    yield from _weight_reads(stage, stages)
    for part in range(4):
        yield "wgmma.wait_group.sync.aligned 1;"
        if part == 1:
            yield f"@lead mbarrier.arrive.shared::cta.b64 _, [shared + {_empty_at(released, rows, stages)}];"
        yield from _unpack(part)
        if part == 0:
            yield from _wait(f"full{stage}", _full_at(stage, rows, stages))
        yield "wgmma.fence.sync.aligned;"
        for product in range(4):
            yield from _product(stage, part, product, rows)
        yield "wgmma.commit_group.sync.aligned;"
        if part == 1:
            yield from _next_hidden(released, stage, rows, depth, stages)
            yield from _next_weights(stage, rows, depth, stages)


@constexpr_function
def _weight_reads(stage: int, stages: int) -> Iterator[str]:
    """Read a thread's numbers of a tile, and the four scales that the lanes 4 g to 4 g + 3 have copied."""
    at = stage * WEIGHT_BYTES
    yield f"cp.async.wait_group {stages - 1};  bar.warp.sync 0xFFFFFFFF;"
    yield f"ld.shared.v4.b32 {{f0, f1, f2, f3}}, [s + {at}];"
    for k in range(4):
        words = ", ".join(f"w{4 * k + word}" for word in range(4))
        yield f"ld.shared.v4.b32 {{{words}}}, [wp + {at + 16 * THREADS * k}];"


@constexpr_function
def _wait(label: str, at: int) -> Iterator[str]:
    """Wait for the end of a barrier's phase."""
    yield f"{label}: mbarrier.try_wait.parity.shared::cta.b64 p, [shared + {at}], phase;"
    yield f"@!p bra.uni {label};"


@constexpr_function
def _next_hidden(released: int, stage: int, rows: int, depth: int, stages: int) -> Iterator[str]:
    """Let one warp load the rows of a later tile, after all warps have multiplied the rows of the tile before."""
    num_loaded = max(-(-depth // TILE) - stages + 1, 0)
    yield f"setp.lt.u32 on, tile, {num_loaded};  setp.eq.and.u32 on, warp, {stage % WARPS}, on;"
    yield f"@!on bra.uni rows{stage};"
    yield from _wait(f"empty{stage}", _empty_at(released, rows, stages))
    yield f"add.u32 at, tile, {stages - 1};  elect.sync lane|one, 0xFFFFFFFF;"
    yield from _hidden_loads(released, "one", rows, depth, stages)
    yield f"rows{stage}:"


@constexpr_function
def _next_weights(stage: int, rows: int, depth: int, stages: int) -> Iterator[str]:
    """Load the numbers and scales of a later tile where this tile's were, which are in registers."""
    num_loaded = max(-(-depth // TILE) - stages, 0)
    yield f"bar.warp.sync 0xFFFFFFFF;  setp.ge.u32 on, tile, {num_loaded};  @on bra.uni weights{stage};"
    yield from _weight_loads(stage, stage + stages, rows, stages)
    yield f"weights{stage}: cp.async.commit_group;"


@constexpr_function
def _unpack(part: int) -> Iterator[str]:
    """Unpack the 32 columns of a part, in both halves, into the registers of every second part."""
    for product in range(4):
        half, view = product % 2, 2 * (part % 2) + product // 2
        for side in range(2):
            factors, scales = f"e{2 * half + side}", f"f{2 * half + side}"
            if part >= 2:
                yield f"shf.l.wrap.b32 at, {scales}, {scales}, 8;"
            yield f"and.b32 {factors}, {'at' if part >= 2 else scales}, {FACTOR_MASK};"
            yield f"mov.b32 {{l, h}}, {factors};  mov.b32 e{4 + side}, {{{'h, h' if part % 2 else 'l, l'}}};"
            for pair in range(2):
                number = f"a{16 * (part % 2) + 4 * product + 2 * pair + side}"
                word = f"w{8 * half + 4 * side + 2 * pair + part // 2}"
                yield MASKED_VIEWS[view].format(to=number, word=word, other="at", mask=MASK)
                yield f"fma.rn.bf16x2 {number}, {number}, e{4 + side}, z;"


@constexpr_function
def _product(stage: int, part: int, product: int, rows: int) -> Iterator[str]:
    """Multiply 16 columns of a half with the hidden states."""
    half, step = product % 2, 2 * part + product // 2
    sums = ", ".join(f"d{rows // 2 * half + i}" for i in range(rows // 2))
    numbers = ", ".join(f"a{16 * (part % 2) + 4 * product + i}" for i in range(4))
    at = stage * rows * 2 * TILE + step // 4 * rows * 2 * PIECE + 32 * (step % 4)
    yield f"add.u32 at, units, {at // 16};  mov.b64 descriptor, {{at, {DESCRIPTOR}}};"
    yield f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 "
    yield f"{{{sums}}}, {{{numbers}}}, descriptor, 1, 1, 1, 0;"
