"""Rows arranged by the kernel and products of packed weights by the assembly, run on the CPU, equal plain products."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.mixtures.arranged_rows import ArrangedRows, arrange_rows, arranged_width
from dflash_kernels.mixtures.mxfp4 import Packed, arrange_numbers, arrange_scales, pack, unpack
from dflash_kernels.mixtures.warpgroup_products import warpgroup_products
from dflash_testing.async_assembly import Memory
from dflash_testing.tensors import DEVICE
from dflash_testing.warp_assembly import run_warps

FIRST, EXPERTS = 1 << 12, 5

THREAD = torch.arange(128).view(4, 32)
WARP, GROUP_ROW, PAIR = THREAD // 32, THREAD % 32 // 4, THREAD % 4


def weight_of(rows: int, width: int) -> Packed:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (1, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 128, (1, rows, width // 32), generator=generator, dtype=torch.uint8)
    return pack(arrange_numbers(blocks), arrange_scales(scales), width)


def routed(num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows of hidden states of random width, and two experts of each. All choose expert 1, none chooses expert 3."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_rows, width + 32, generator=generator).bfloat16()[:, :width]
    others = torch.tensor([0, 2, 4])[torch.randint(3, (num_rows, 1), generator=generator)]
    return hidden.to(DEVICE), torch.cat([others, torch.ones_like(others)], dim=1).to(DEVICE)


def rows_of(arranged: ArrangedRows, begin: int, count: int, width: int) -> Tensor:
    """Return the rows of a tile in the order of columns, [count, width]."""
    whole = arranged_width(width)
    pieces = arranged.rows.flatten()[begin * whole : (begin + count) * whole].view(-1, count, 8, 8)
    found = torch.empty(count, len(pieces), 4, 4, 2, 2, dtype=pieces.dtype)
    for row in range(count):
        for chunk in range(8):
            # Chunk 2 j + i has the i-th pairs of four lanes.
            found[row, :, chunk // 2, :, chunk % 2] = pieces[:, row, chunk ^ row % 8].view(-1, 4, 2).cpu()
    assert not found.flatten(1)[:, width:].any()
    return found.flatten(1)[:, :width]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "width", "tile_rows"), [(40, 320, 24), (33, 64, 8), (128, 96, 24), (70, 2880, 32)]
)
def test_tiles_have_the_rows_of_their_experts(num_rows: int, width: int, tile_rows: int) -> None:
    """Each route is in one tile of its expert. Entries that no expert needs have no rows."""
    hidden, chosen = routed(num_rows, width)
    arranged = arrange_rows(hidden, chosen, EXPERTS, tile_rows)
    routes, tiles = arranged.routes.cpu().long(), arranged.tiles.tolist()
    assert routes.sort().values.tolist() == list(range(2 * num_rows))
    seen = []
    for place, (expert, begin, count, num_done) in enumerate(tiles):
        its_routes = routes[begin : begin + count]
        assert 0 <= count <= tile_rows
        assert num_done == 0
        if not count:
            continue
        assert set(chosen.flatten()[its_routes].tolist()) == {place if place < EXPERTS else expert}
        assert torch.equal(rows_of(arranged, begin, count, width), hidden.cpu()[its_routes // 2])
        seen += its_routes.tolist()
    assert sorted(seen) == list(range(2 * num_rows))


def run(
    weight: Packed, arranged: ArrangedRows, tile: int, rows: int, stages: int, writers: int, *, is_late: bool
) -> Tensor:
    """Multiply the 128 rows of a weight with a tile of rows, as a program does: [128, R]."""
    num_tiles = weight.numbers.shape[2]
    parts = [weight.numbers.flatten(), weight.scales.flatten(), arranged.rows.flatten().view(torch.int32),
             arranged.tiles.flatten()]  # fmt: skip
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    numbers, scales, states, table = (FIRST + 4 * end for end in ends[:4])
    group, within = WARP // 2, WARP % 2 * 16 + GROUP_ROW
    of_scale = num_tiles * 32 * (PAIR // 2 * 2 + group) + within + PAIR % 2 * 8
    given = {
        rows + 2: numbers + num_tiles * 2048 * group + within * 64 + PAIR * 16,
        rows + 3: numbers + num_tiles * 2048 * (2 + group) + within * 64 + PAIR * 16,
        rows + 4: scales + 4 * of_scale,
        rows + 5: torch.full_like(THREAD, states),
        rows + 6: torch.full_like(THREAD, table + 16 * tile),
    }
    memory = Memory(FIRST, torch.cat([part.cpu().long() for part in parts]))
    text = warpgroup_products(rows, weight.width, stages, writers)
    found = torch.full((128, rows), float("nan"), dtype=torch.float64)
    operands = {f"${place}": value for place, value in given.items()}
    for warp, registers in enumerate(run_warps(text, 4, operands, memory, is_late=is_late)):
        assert [registers[f"${rows + i}"][0] for i in range(2)] == arranged.tiles[tile, 1:3].tolist()
        for half in range(2):
            for c in range(rows // 2):
                row = 64 * half + 16 * warp + c % 4 // 2 * 8 + GROUP_ROW[0]
                found[row, c // 4 * 8 + 2 * PAIR[0] + c % 2] = registers[f"${rows // 2 * half + c}"]
    return found


@pytest.mark.triton
@pytest.mark.parametrize("width", [32, 96, 128, 320, 672])
@pytest.mark.parametrize(
    ("num_rows", "rows", "stages", "is_late"),
    [(40, 24, 2, False), (40, 24, 2, True), (9, 32, 3, True), (24, 8, 2, False)],
    ids=["in use", "late copies", "three stages", "eight rows"],
)
def test_products_equal_those_of_unpacked_weights(
    width: int, num_rows: int, rows: int, stages: int, is_late: bool
) -> None:
    """Cut tiles, fewer tiles than stages, and tiles with fewer rows. Memory ends where its contents end."""
    weight, (hidden, chosen) = weight_of(128, width), routed(num_rows, width)
    arranged = arrange_rows(hidden, chosen, EXPERTS, rows)
    wanted = unpack(weight, torch.float64)[0] @ hidden.cpu().double()[arranged.routes.cpu().long() // 2].T
    for tile in (1, EXPERTS + len(arranged.tiles[EXPERTS:]) - 1):
        begin, count = arranged.tiles[tile, 1:3].tolist()
        found = run(weight, arranged, tile, rows, stages, 0, is_late=is_late)
        torch.testing.assert_close(found[:, :count], wanted[:, begin : begin + count], rtol=1e-12, atol=1e-12)


@pytest.mark.triton
def test_a_tile_without_rows_has_no_sums() -> None:
    weight, (hidden, chosen) = weight_of(128, 256), routed(33, 256)
    arranged = arrange_rows(hidden, chosen, EXPERTS, 24)
    assert arranged.tiles[3, 2] == 0
    assert not run(weight, arranged, 3, 24, 2, 0, is_late=False).any()


@pytest.mark.triton
def test_a_program_waits_for_the_writers_of_its_rows() -> None:
    """It reads rows only if enough programs have counted themselves. Otherwise it waits for ever."""
    weight, (hidden, chosen) = weight_of(128, 256), routed(33, 256)
    arranged = arrange_rows(hidden, chosen, EXPERTS, 24)
    arranged.tiles[1, 3] = 4
    plain = run(weight, arranged, 1, 24, 2, 0, is_late=True)
    assert torch.equal(run(weight, arranged, 1, 24, 2, 4, is_late=True), plain)
    with pytest.raises(AssertionError, match="all warps wait"):
        run(weight, arranged, 1, 24, 2, 5, is_late=True)
