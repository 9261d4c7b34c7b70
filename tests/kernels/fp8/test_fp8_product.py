"""Products and experts in FP8 equal their references, for every form of scales and every way to round activations."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.fp8 import fp8_product as module
from dflash_kernels.fp8.fp8_config import Fp8Shape, has_fp8
from dflash_kernels.fp8.fp8_library import library_multiplies, library_product
from dflash_kernels.fp8.fp8_product import (
    fp8_gated_product,
    fp8_gated_product_ref,
    fp8_product,
    fp8_product_parts,
    fp8_product_parts_ref,
    launch_product,
    round_rows,
)
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight, round_rows_ref, rounded_ref, to_fp8
from dflash_kernels.mixtures.fp8_experts import fp8_experts, fp8_experts_ref
from dflash_kernels.mixtures.mixture_config import MAX_EXPERT_ROWS
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The interpreter cannot multiply bfloat16."""

DYNAMIC, STATIC, NONE = "dynamic", "static", "none"
SHAPES = [
    (1, 256, 512, (128, 128), DYNAMIC),
    (2, 70, 1100, (128, 128), DYNAMIC),  # the sum is cut into parts
    (16, 130, 300, (128, 128), DYNAMIC),  # cut blocks, and fewer columns than a tile
    (17, 576, 300, (128, 128), DYNAMIC),  # rounded before, 576 rows as in latent attention
    (3, 70, 40, (16, 16), DYNAMIC),
    (5, 128, 384, (1, 128), DYNAMIC),
    (40, 96, 256, (64, 64), DYNAMIC),
    (5, 64, 256, (1, 4096), DYNAMIC),
    (33, 64, 256, (1, 4096), DYNAMIC),
    (5, 64, 256, (1, 4096), STATIC),
    (20, 64, 256, (1, 4096), STATIC),
    (5, 130, 256, (64, 64), NONE),
    (3, 64, 256, (1, 4096), NONE),
]
"""Rows, columns, inner width, block with one scale, and rounding of activations."""


def weight(num_columns: int, depth: int, block: tuple[int, int], rounding: str = DYNAMIC) -> Fp8Weight:
    made = to_fp8(normal(num_columns, depth, seed=1) * depth**-0.5, block)
    fixed = {DYNAMIC: None, STATIC: torch.tensor([0.01], device=DEVICE), NONE: torch.zeros(0, device=DEVICE)}[rounding]
    return Fp8Weight(made.values, made.scales, fixed)


def exact(hidden: Tensor, form: Fp8Weight) -> Tensor:
    """The product of the rounded numbers in float64."""
    return rounded_ref(hidden, form).double() @ form.dequantised(torch.float64).T


@pytest.mark.parametrize(("num_rows", "num_columns", "depth", "block", "rounding"), SHAPES)
def test_products(num_rows: int, num_columns: int, depth: int, block: tuple[int, int], rounding: str) -> None:
    hidden, form = normal(num_rows, depth, dtype=DTYPE), weight(num_columns, depth, block, rounding)
    wanted = exact(hidden, form)
    assert_rows_close(fp8_product(hidden, form), wanted, DTYPE)
    parts = fp8_product_parts(hidden, form)
    assert_rows_close(parts.sum(0).to(DTYPE), wanted, DTYPE)
    assert parts.dtype == DTYPE
    assert depth < 1100 or len(parts) > 1
    assert_rows_close(fp8_product_parts_ref(hidden, form).sum(0), wanted, DTYPE)
    gated = fp8_gated_product_ref(hidden, form).double()
    assert_rows_close(fp8_gated_product(hidden, form), gated, DTYPE)


@pytest.mark.parametrize("num_rows", [1, 20])
def test_small_integers_are_exact(num_rows: int) -> None:
    """Each group of activations has its peak, 448, where the weight is 0, so all scales are 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-3, 4, (num_rows, 256), generator=generator).to(DEVICE, DTYPE)
    values = torch.randint(-3, 4, (128, 256), generator=generator).float()
    hidden[:, ::128], values[:, ::128] = 448, 0
    form = Fp8Weight(values.to(FP8).to(DEVICE), torch.ones(1, 2, device=DEVICE))
    wanted = hidden.double() @ values.double().to(DEVICE).T
    assert torch.equal(fp8_product_parts(hidden, form).sum(0).double(), wanted)
    assert torch.equal(fp8_product(hidden, form), wanted.to(DTYPE))


@pytest.mark.parametrize(("block", "rounding"), [((128, 128), DYNAMIC), ((1, 4096), DYNAMIC), ((1, 4096), STATIC)])
def test_rounded_rows_equal_the_reference(block: tuple[int, int], rounding: str) -> None:
    """All magnitudes occur: subnormal numbers of e4m3, ties, and numbers above a fixed scale's largest."""
    hidden = torch.cat((torch.linspace(-9, 9, 2000), normal(1000).cpu() * 1e-3, torch.zeros(72), torch.ones(3) / 3))
    hidden = torch.stack((hidden, hidden.flip(0))).to(DEVICE, DTYPE)
    form = weight(4, hidden.shape[1], block, rounding)
    found, wanted = round_rows(hidden, form), round_rows_ref(hidden, form)
    assert torch.equal(found.rows.float(), wanted.rows.float())
    assert torch.equal(found.scales, wanted.scales)


def test_the_factor_of_a_row_is_rounded_once() -> None:
    """This number is a tie after multiplication by 448 / peak. A factor with two roundings would move it."""
    hidden = torch.tensor([[float.fromhex("0x1.60e604p+1"), float.fromhex("0x1.3b1684p-3")]], device=DEVICE)
    form = weight(4, 2, (1, 2))
    assert round_rows_ref(hidden, form).rows.float().tolist() == [[448.0, 24.0]]
    assert round_rows(hidden, form).rows.float().tolist() == [[448.0, 24.0]]


@pytest.mark.interpreter
def test_every_byte_is_the_number_that_torch_reads() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    numbers = every.view(FP8).float()
    form = Fp8Weight(torch.where(numbers.isnan(), 0, numbers).to(FP8), torch.ones(2, 1), torch.zeros(0))
    found = fp8_product(torch.eye(128), form)
    assert torch.equal(found.T, torch.where(numbers.isnan(), 0, numbers))


def test_parts_and_tiles_do_not_change_a_product() -> None:
    """Every part of the inner sum, tiles wider than a block, and rounding before instead of in place."""
    hidden, form = normal(5, 700, dtype=DTYPE), weight(200, 700, (128, 128))
    wanted = exact(hidden, form)
    for columns, num_parts, in_place in ((64, 4, True), (64, 8, False), (256, 1, True), (128, 3, True)):
        shape = Fp8Shape(16, columns, 128, num_parts, 2, 4, rounds_in_place=in_place)
        found = launch_product(hidden, form, shape, has_parts=True)
        assert len(found) == num_parts
        assert_rows_close(found.sum(0).to(DTYPE), wanted, DTYPE)


def test_a_row_that_is_not_finite_does_not_change_others() -> None:
    hidden, form = normal(5, 256, dtype=DTYPE), weight(64, 256, (128, 128))
    wanted = fp8_product(hidden, form)
    hidden[2, 7] = torch.nan
    found = fp8_product(hidden, form)
    assert torch.equal(found[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


def test_no_rows() -> None:
    form = weight(64, 256, (128, 128))
    assert fp8_product(normal(0, 256, dtype=DTYPE), form).shape == (0, 64)
    assert fp8_gated_product(normal(0, 256, dtype=DTYPE), form).shape == (0, 32)


def test_arguments_that_do_not_fit_are_refused() -> None:
    form = weight(63, 256, (128, 128))
    with pytest.raises(ValueError, match="as many columns"):
        fp8_product(normal(2, 128, dtype=DTYPE), form)
    with pytest.raises(ValueError, match="gate rows"):
        fp8_gated_product(normal(2, 256, dtype=DTYPE), form)
    with pytest.raises(ValueError, match="rounded"):
        round_rows(normal(2, 256, dtype=DTYPE), weight(64, 256, (1, 4096), NONE))


def experts(count: int, width: int, inner: int, block: tuple[int, int], rounding: str) -> tuple[Fp8Weight, Fp8Weight]:
    """Stacks of gate and up, and of down."""
    stacks = []
    for height, depth in ((2 * inner, width), (width, inner)):
        each = [weight(height, depth, block, rounding) for _ in range(count)]
        values = torch.stack([(item.values.view(torch.uint8)).roll(index, 0) for index, item in enumerate(each)])
        scales = torch.stack([item.scales * (1 + index) for index, item in enumerate(each)])
        stacks.append(Fp8Weight(values.view(FP8), scales, each[0].input_scale))
    return stacks[0], stacks[1]


EXPERTS = [
    (1, 4, 2, 64, 32, (16, 16), DYNAMIC),
    (5, 4, 2, 256, 128, (128, 128), DYNAMIC),
    (3, 4, 2, 256, 96, (128, 128), DYNAMIC),  # blocks of gate and up are cut
    (20, 6, 3, 64, 32, (1, 4096), DYNAMIC),
    (3, 4, 2, 64, 32, (1, 4096), STATIC),
    (3, 4, 2, 64, 32, (16, 16), NONE),
]
"""Rows, experts, chosen ones, width, inner width, block, and rounding."""


@pytest.mark.parametrize(("rows", "count", "chosen", "width", "inner", "block", "rounding"), EXPERTS)
def test_experts(
    rows: int, count: int, chosen: int, width: int, inner: int, block: tuple[int, int], rounding: str
) -> None:
    """In float32 a product may differ by one rounding, which may change the rounding of an activation after it."""
    hidden, stacks = normal(rows, width, dtype=DTYPE), experts(count, width, inner, block, rounding)
    ids = torch.stack([normal(count, seed=row).argsort()[:chosen] for row in range(rows)])
    scores = normal(rows, chosen, dtype=DTYPE, seed=2).abs()
    # In bfloat16 the reference rounds the gated numbers too, so that both round the same numbers to FP8.
    given = (hidden, scores) if torch.bfloat16 == DTYPE else (hidden.double(), scores.double())
    wanted = fp8_experts_ref(given[0], *stacks, ids, given[1])[0].double()
    found = fp8_experts(hidden, *stacks, ids, scores)
    assert len(found) == chosen
    error = (found.double().sum(0) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert bool((error <= (2e-2 if torch.bfloat16 == DTYPE else 2e-3)).all())
    assert error.median() <= (1e-2 if torch.bfloat16 == DTYPE else 2e-6)


def test_many_rows_of_experts_are_computed_in_several_calls() -> None:
    count = MAX_EXPERT_ROWS + 3
    stacks = experts(2, 32, 16, (16, 16), DYNAMIC)
    hidden, ids = normal(count, 32, dtype=DTYPE), torch.zeros(count, 1, dtype=torch.int64, device=DEVICE)
    scores = torch.ones(count, 1, dtype=DTYPE, device=DEVICE)
    found = fp8_experts(hidden, *stacks, ids, scores)
    last = fp8_experts(hidden[-3:], *stacks, ids[-3:], scores[-3:])
    assert found.shape == (1, count, 32)
    assert torch.equal(found[:, -3:], last)


@pytest.mark.gpu
def test_a_gpu_multiplies_in_fp8_without_dequantised_weights() -> None:
    """Tensor cores read e4m3, and a product allocates no copy of its weight."""
    form = weight(4096, 4096, (128, 128))
    if not has_fp8(DEVICE):
        pytest.skip("the GPU has no products in FP8")
    assert module.uses_fp8(form)
    hidden = normal(16, 4096, dtype=DTYPE)
    fp8_product_parts(hidden, form)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fp8_product_parts(hidden, form)
    assert torch.cuda.max_memory_allocated() - before < 4096 * 4096


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 33, 50, 64, 100, 128, 512, 2048])
@pytest.mark.parametrize("block", [(128, 128), (1, 1 << 20)], ids=["blocks", "rows"])
def test_at_the_size_of_a_model(num_rows: int, block: tuple[int, int]) -> None:
    """The shapes of Qwen3-8B."""
    for num_columns, depth in ((6144, 4096), (24576, 4096), (4096, 12288)):
        hidden, form = normal(num_rows, depth, dtype=DTYPE), weight(num_columns, depth, block)
        assert_rows_close(fp8_product_parts(hidden, form).sum(0).to(DTYPE), exact(hidden, form), DTYPE)
        wanted = fp8_gated_product_ref(hidden.float(), form).double()
        assert_rows_close(fp8_gated_product(hidden, form), wanted, DTYPE)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (1, 1 << 20)], ids=["blocks", "rows"])
def test_a_library_multiplies_many_rows_on_hopper(block: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a GPU of the Hopper kind")
    hidden, form = normal(64, 4096, dtype=DTYPE), weight(6144, 4096, block)
    assert library_multiplies(hidden, form)
    assert not library_multiplies(hidden[:32], form)
    found = library_product(module.round_rows(hidden, form), form)
    kernel = module.launch_product(hidden, form, module._shape_of(hidden, form))[0]
    assert_rows_close(found, kernel.double(), DTYPE)
