"""Packed weights: the same numbers as transformers unpacks, and products equal to products of plain weights."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_kernels import experts as module
from dflash_kernels.activation import GELU, SILU, Gate, gate_ref
from dflash_kernels.experts import choose_experts, choose_experts_ref, experts, experts_ref
from dflash_kernels.launch_config import MAX_EXPERT_ROWS
from dflash_kernels.mxfp4 import Packed, group_scales, halve_blocks, unpack
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
CLAMPED = Gate("clamped", alpha=1.702, limit=0.5)


def stored(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a weight [..., N, K], as files have them."""
    generator = torch.Generator().manual_seed(seed)
    *stack, width = shape
    blocks = torch.randint(256, (*stack, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (*stack, width // 32), generator=generator, dtype=torch.uint8)
    return blocks.to(DEVICE), scales.to(DEVICE)


def packed(*shape: int, seed: int = 0) -> Packed:
    blocks, scales = stored(*shape, seed=seed)
    return Packed(halve_blocks(blocks), group_scales(scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    blocks, scales = stored(3, 6, 128)
    found = unpack(Packed(halve_blocks(blocks), group_scales(scales)), dtype)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2))


def test_every_number_and_the_least_and_largest_scales() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(4, 16, 16)
    scales = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)[:, None].expand(4, 16)
    found = unpack(Packed(halve_blocks(blocks), group_scales(scales)), torch.float64)
    values = found.view(4, 256, 2)
    assert values[2, 0x7F].tolist() == [-6.0, 6.0]
    assert values[2, 0x1A].tolist() == [-1.0, 0.5]
    assert torch.equal(values[0], values[2] * 2.0**-127)
    assert torch.equal(values[3], values[2] * 2.0**127)


@pytest.mark.triton
@pytest.mark.parametrize("gate", [SILU, GELU, CLAMPED], ids=lambda gate: gate.kind)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen"), [(1, 4, 2), (3, 4, 4), (9, 5, 2), (MAX_EXPERT_ROWS + 7, 3, 2)]
)
def test_packed_experts_equal_unpacked_ones(num_rows: int, num_experts: int, num_chosen: int, gate: Gate) -> None:
    """Widths of the layer and of the experts differ, and the last tile is cut."""
    hidden = normal(num_rows, 192, dtype=DTYPE, seed=1)
    gate_up, down = packed(num_experts, 2 * 64, 192), packed(num_experts, 192, 64, seed=1)
    biases = normal(num_experts, 2 * 64, dtype=DTYPE, seed=2), normal(num_experts, 192, dtype=DTYPE, seed=3)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_rows)]
    chosen = torch.stack(rows).to(DEVICE)
    scores = normal(num_rows, num_chosen, dtype=DTYPE, seed=5).abs()
    found = experts(hidden, gate_up, down, chosen, scores, gate, biases)
    assert len(found) == num_chosen
    wanted = torch.empty_like(found)
    first, second = (unpack(weight, torch.float64) for weight in (gate_up, down))
    for place in range(num_chosen):
        ids = chosen[:, place]
        both = torch.einsum("tk,tnk->tn", hidden.double(), first[ids]) + biases[0][ids].double()
        inner = gate_ref(both.to(DTYPE), gate).double()
        output = torch.einsum("tk,tnk->tn", inner, second[ids]) + biases[1][ids].double()
        wanted[place] = (output.to(DTYPE).double() * scores[:, place, None].double()).to(DTYPE)
    assert_rows_close(found, wanted.double(), DTYPE)
    reference = experts_ref(hidden, gate_up, down, chosen, scores, gate, biases)
    assert_rows_close(reference.double().sum(0).to(DTYPE), wanted.double().sum(0), DTYPE)


@pytest.mark.triton
def test_a_width_with_half_a_block_uses_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def watched(*given: Tensor) -> Tensor:
        called.append(len(given))
        return given[0][None]

    monkeypatch.setattr(module, "experts_ref", watched)
    hidden = normal(2, 96, dtype=DTYPE)
    chosen, scores = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), normal(2, 1, dtype=DTYPE)
    experts(hidden, packed(1, 128, 96), packed(1, 96, 64), chosen, scores)
    assert called == [7]


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
