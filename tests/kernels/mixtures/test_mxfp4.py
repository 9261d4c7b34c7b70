"""Packed weights: the same numbers as transformers unpacks, and products equal to products of plain weights."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_kernels.mixtures import experts as module
from dflash_kernels.mixtures.expert_choice import choose_experts, choose_experts_ref
from dflash_kernels.mixtures.experts import experts, experts_ref
from dflash_kernels.mixtures.mixture_config import JOINT_ROWS, MAX_EXPERT_ROWS
from dflash_kernels.mixtures.mxfp4 import (
    FACTORS,
    LARGEST_SCALE,
    MAGNITUDES,
    UNPACK,
    UNPACK_FIRST,
    UNPACK_LAST,
    Packed,
    unpack,
)
from dflash_kernels.products.activation import GELU, SILU, Gate, gate_ref
from dflash_testing.assembly import bfloat16_of, run_assembly
from dflash_testing.packed_experts import expected_parts, pack_stored, packed, stored
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
CLAMPED = Gate("clamped", alpha=1.702, limit=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    blocks, scales = stored(3, 64, 160)
    found = unpack(pack_stored(blocks, scales), dtype)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2))


def test_every_number_and_the_least_and_largest_scales() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(32, 16, 16)
    scales = torch.tensor([0, 1, 127, 254], dtype=torch.uint8).repeat(8)[:, None].expand(32, 16)
    found = unpack(pack_stored(blocks, scales), torch.float64)
    values = found.view(32, 256, 2)
    assert values[2, 0x7F].tolist() == [-6.0, 6.0]
    assert values[2, 0x1A].tolist() == [-1.0, 0.5]
    assert torch.equal(values[0], values[2] * 2.0**-127)
    assert torch.equal(values[3], values[2] * 2.0**127)


@pytest.mark.triton
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_assembly_gives_the_unpacked_numbers(is_reversed: bool) -> None:
    """Each byte eight times, and each scale with which the fast way is in use, 0 to 127 or 1 to 128."""
    blocks = torch.arange(256).repeat(8)[torch.randperm(2048, generator=torch.Generator().manual_seed(0))]
    scales = LARGEST_SCALE - torch.arange(128) if is_reversed else torch.arange(128)
    weight = pack_stored(blocks.view(1, 32, 4, 16).to(torch.uint8), scales.view(1, 32, 4).to(torch.uint8))
    assert weight.has_small_scales
    wanted = unpack(weight, torch.float64)[0]
    assert torch.equal(torch.cat(run_unpack(weight, UNPACK.value), dim=1), wanted)
    halves = [run_unpack(weight, text.value, half)[0] for half, text in enumerate((UNPACK_FIRST, UNPACK_LAST))]
    assert torch.equal(torch.cat(halves, dim=1), wanted)


def run_unpack(weight: Packed, text: str, half: int | None = None) -> tuple[Tensor, ...]:
    """Run the assembly for both halves or one half of a weight of one tile -> the columns of each half, [32, 64]."""
    numbers, scales = (part[0, 0, 0].long() & 0xFFFFFFFF for part in (weight.numbers, weight.scales))
    factors = run_assembly(FACTORS.value, {"$2": scales[:, None].expand(32, 8)})
    words = numbers[:, ::2], numbers[:, 1::2]
    if half is None:
        given = {"$8": words[0], "$9": words[1], "$10": factors["$0"], "$12": factors["$1"]}
    else:
        given = {"$4": words[0], "$5": words[1], "$6": factors[f"${half}"]}
    found, count = run_assembly(text, given), 8 if half is None else 4
    columns = [torch.stack([bfloat16_of(found[f"${j}"] >> at) for at in (0, 16)], dim=-1) for j in range(count)]
    return tuple(torch.stack(columns[at : at + 4], dim=1).flatten(1) for at in range(0, count, 4))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "gate"),
    [
        pytest.param(*counts, gate, marks=() if gate is CLAMPED or counts == (3, 4, 4) else pytest.mark.slow)
        for counts in (
            (1, 4, 2),
            (2, 9, 3),
            (3, 4, 4),
            (4, 16, 4),
            (9, 5, 2),
            (20, 5, 2),
            (70, 4, 2),
            (120, 3, 2),
            (MAX_EXPERT_ROWS + 7, 3, 2),
        )
        for gate in (SILU, GELU, CLAMPED)
    ],
)
def test_packed_experts_equal_unpacked_ones(num_rows: int, num_experts: int, num_chosen: int, gate: Gate) -> None:
    """Widths of the layer and of the experts differ, the last tile is cut, and the number of groups is odd."""
    hidden = normal(num_rows, 160, dtype=DTYPE, seed=1)
    gate_up, down = packed(num_experts, 2 * 64, 160), packed(num_experts, 160, 64, seed=1)
    biases = normal(num_experts, 2 * 64, dtype=DTYPE, seed=2), normal(num_experts, 160, dtype=DTYPE, seed=3)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_rows)]
    chosen = torch.stack(rows).to(DEVICE)
    scores = normal(num_rows, num_chosen, dtype=DTYPE, seed=5).abs()
    found = experts(hidden, gate_up, down, chosen, scores, gate, biases)
    wanted = expected_parts(hidden, gate_up, down, chosen, scores, gate, biases)
    assert_rows_close(found, wanted.double(), DTYPE)
    reference = experts_ref(hidden, gate_up, down, chosen, scores, gate, biases)
    assert_rows_close(reference.double().sum(0).to(DTYPE), wanted.double().sum(0), DTYPE)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen"),
    [(JOINT_ROWS[0], 16, 2), (12, 5, 3), (JOINT_ROWS[-1], 2, 1)],
    ids=["one program per route", "one program per expert", "more rows than a tile"],
)
def test_one_launch_equals_two(
    num_rows: int, num_experts: int, num_chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers, also in the next launch, which finds all counts set back."""
    hidden = normal(num_rows, 96, dtype=DTYPE, seed=1)
    gate_up, down = packed(num_experts, 2 * 160, 96), packed(num_experts, 96, 160, seed=1)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_rows)]
    routed = torch.stack(rows).to(DEVICE), normal(num_rows, num_chosen, dtype=DTYPE, seed=5).abs()
    found = [experts(hidden, gate_up, down, *routed) for _ in range(2)]
    assert not down.program_counts.any()
    monkeypatch.setattr(module, "JOINT_ROWS", range(0))
    wanted = experts(hidden, gate_up, down, *routed)
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)


@pytest.mark.triton
def test_which_rows_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(module, "joint_experts", lambda hidden, *_: taken.append(len(hidden)))
    monkeypatch.setattr(module, "_two_launches", lambda *_: None)
    for num_rows in (4, 5, 32, 33):
        chosen, scores = torch.zeros(num_rows, 1, dtype=torch.int64, device=DEVICE), normal(num_rows, 1, dtype=DTYPE)
        experts(normal(num_rows, 32, dtype=DTYPE), packed(1, 64, 32), packed(1, 32, 32), chosen, scores)
    assert taken == [5, 32]


@pytest.mark.triton
@pytest.mark.parametrize(("scale", "is_small"), [(0, True), (LARGEST_SCALE, True), (LARGEST_SCALE + 1, False)])
def test_products_at_the_least_and_at_large_scales(scale: int, is_small: bool) -> None:
    """One number of each row is not zero, so a product is one number times one hidden state."""
    width, count = 96, 32
    blocks = torch.zeros(1, count, width // 32, 16, dtype=torch.uint8)
    numbers = torch.arange(count) % 16
    column = 37 * torch.arange(count) % width
    byte = numbers << 4 * (column % 2)
    blocks.view(count, -1)[torch.arange(count), column // 2] = byte.to(torch.uint8)
    down = pack_stored(blocks.to(DEVICE), torch.full((1, count, width // 32), scale, dtype=torch.uint8, device=DEVICE))
    assert down.has_small_scales is is_small
    plain = unpack(down, torch.float64)[0]
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64, device=DEVICE)
    assert torch.equal(plain.sum(1), values[numbers.to(DEVICE)] * 2.0 ** (scale - 127))
    gate_up = packed(1, 2 * width, count)
    hidden = normal(3, count, dtype=DTYPE)
    chosen, scores = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), torch.ones(3, 1, dtype=DTYPE, device=DEVICE)
    found = experts(hidden, gate_up, down, chosen, scores)[0]
    both = (hidden.double() @ unpack(gate_up, torch.float64)[0].T).to(DTYPE)
    assert_rows_close(found, (gate_ref(both, SILU).double() @ plain.T), DTYPE)


@pytest.mark.triton
def test_factors_multiply_scores_after_they_are_normalised() -> None:
    hidden, router = normal(5, 32, dtype=DTYPE), normal(6, 32, dtype=DTYPE, seed=1)
    factors = normal(6, dtype=DTYPE, seed=2) + 2
    plain = choose_experts(hidden, router, 2, True)
    chosen, scores = choose_experts(hidden, router, 2, True, factors=factors)
    assert torch.equal(chosen, plain[0])
    assert_rows_close(scores, choose_experts_ref(hidden, router, 2, True, factors=factors)[1].double(), DTYPE)
    assert not torch.equal(scores, plain[1])


@pytest.mark.triton
def test_the_routers_bias_changes_the_choice() -> None:
    hidden, router = normal(5, 32, dtype=DTYPE), normal(6, 32, dtype=DTYPE, seed=1)
    bias = 8 * normal(6, dtype=DTYPE, seed=2)
    chosen, scores = choose_experts(hidden, router, 2, True, bias=bias)
    wanted = choose_experts_ref(hidden, router, 2, True, bias=bias)
    assert torch.equal(chosen, wanted[0])
    assert_rows_close(scores, wanted[1].double(), DTYPE)
    assert not torch.equal(chosen, choose_experts_ref(hidden, router, 2, True)[0])
