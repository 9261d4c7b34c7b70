"""The assembly of packed products, run on the CPU, equals products of unpacked weights."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.mixtures.mxfp4 import Packed, arrange_numbers, arrange_scales, pack, unpack
from dflash_kernels.mixtures.warp_products import warp_products
from dflash_testing.async_assembly import Memory
from dflash_testing.warp_assembly import run_warps

FIRST = 1 << 12


def weight_of(rows: int, width: int) -> Packed:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (1, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 128, (1, rows, width // 32), generator=generator, dtype=torch.uint8)
    return pack(arrange_numbers(blocks), arrange_scales(scales), width)


def run(weight: Packed, hidden: Tensor, has_row: Tensor, warps: int, *, waits: bool = False) -> Tensor:
    """Multiply all groups of a weight with the rows that are there, as a program does: [32 G, 8]."""
    groups, num_tiles = weight.numbers.shape[1:3]
    parts = [weight.numbers.flatten(), weight.scales.flatten(), hidden.bfloat16().view(torch.int32).flatten()]
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    numbers, scales, states = (FIRST + 4 * end for end in ends[:3])
    lane = torch.arange(32).expand(warps, -1)
    row = lane // 4
    count = 8 * groups // warps
    given = {f"${count + i}": torch.full_like(lane, numbers + i * num_tiles * 2048) for i in range(groups)}
    given |= {f"${count + groups + i}": torch.full_like(lane, scales + i * num_tiles * 128) for i in range(groups)}
    given[f"${count + 2 * groups}"] = torch.where(has_row[row], states + row * 2 * weight.width, 0)
    memory = Memory(FIRST, torch.cat(parts).long())
    text = warp_products(groups, weight.width, warps, waits)
    found = torch.full((32 * groups, 8), float("nan"), dtype=torch.float64)
    for warp, registers in enumerate(run_warps(text, warps, given, memory)):
        for i in range(groups):
            for c in range(8 // warps):
                q = 8 // warps * warp + c
                column = 32 * i + 16 * (q // 4) + 8 * (q % 4 // 2) + lane[0] // 4
                found[column, 2 * (lane[0] % 4) + q % 2] = registers[f"${8 // warps * i + c}"]
    return found


@pytest.mark.triton
@pytest.mark.parametrize("width", [32, 96, 128, 320, 672])
@pytest.mark.parametrize(("groups", "warps"), [(1, 1), (2, 1), (1, 4), (2, 2), (2, 4), (1, 8)])
def test_products_equal_those_of_unpacked_weights(width: int, groups: int, warps: int) -> None:
    """Cut tiles, fewer tiles than warps, and rows that are absent. Memory ends where its contents end."""
    weight = weight_of(32 * groups, width)
    hidden = torch.randn(8, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16().double()
    has_row = torch.tensor([True, False, True, True, False, True, True, True])
    found = run(weight, hidden, has_row, warps, waits=groups == 1)
    wanted = unpack(weight, torch.float64)[0] @ (hidden * has_row[:, None]).T
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.triton
def test_a_weight_with_address_0_is_not_read() -> None:
    text = warp_products(1, 256, 2, False)
    nothing = torch.zeros(2, 32, dtype=torch.int64)
    memory = Memory(FIRST, torch.zeros(0, dtype=torch.int64))
    for registers in run_warps(text, 2, {"$4": nothing, "$5": nothing, "$6": nothing}, memory):
        assert all(not registers[f"${c}"].any() for c in range(4))
