"""Weights in FP8, their parts, and the rounding of activations: PyTorch only."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_product import fp8_product_ref
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight, join_rows, round_rows_ref, rounded_ref, to_fp8
from dflash_testing.tensors import normal

pytestmark = pytest.mark.reference

HALF_STEP, LEAST_HALF_STEP = 2.0**-4, 2.0**-10
"""The largest error of rounding to e4m3: of a number that is not subnormal, relative to it; of others, absolute."""

BLOCKS = [(128, 128), (64, 16), (1, 4096), (16, 32)]


def weight(num_rows: int, depth: int, block: tuple[int, int], input_scale: Tensor | None = None) -> Fp8Weight:
    made = to_fp8(normal(num_rows, depth, seed=num_rows).cpu(), block)
    return Fp8Weight(made.values, made.scales, input_scale)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_weight_is_within_the_rounding_of_its_format(block: tuple[int, int]) -> None:
    plain = normal(576, 200).cpu()
    made = to_fp8(plain, block)
    factors = made.dequantised() / made.values.float()
    limit = (plain.abs() * HALF_STEP).maximum(factors.nan_to_num(0) * LEAST_HALF_STEP)
    assert bool(((made.dequantised() - plain).abs() <= limit * (1 + 1e-6)).all())
    assert made.block == (min(block[0], 576), min(block[1], 200))
    if block == (128, 128):  # the rows of a latent attention: four blocks, and one of 64 rows
        assert made.scales.shape == (5, 2)
        assert made.values[512:].float().abs().max() == 448


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("input_scale", [None, torch.tensor([0.02]), torch.zeros(0)], ids=["dynamic", "static", "none"])
def test_a_product_is_within_the_rounding_of_its_activations(
    block: tuple[int, int], input_scale: Tensor | None
) -> None:
    """Regret: the sum of |weight| times the largest error of each activation, and float32's own rounding."""
    form, hidden = weight(40, 300, block, input_scale), normal(7, 300, seed=3).cpu()
    wanted = hidden.double() @ form.dequantised(torch.float64).T
    scales = _scale_of_each(hidden, form)
    limit = (hidden.abs() * HALF_STEP).maximum(scales * LEAST_HALF_STEP) if form.rounding != "none" else hidden * 0
    slack = 1e-5 * (hidden.double().abs() @ form.dequantised(torch.float64).abs().T)
    bound = limit.double() @ form.dequantised(torch.float64).abs().T + slack
    error = (fp8_product_ref(hidden, form).double() - wanted).abs()
    assert bool((error <= bound).all())
    if form.rounding != "none":
        assert error.max() > 100 * slack.max()  # the activations are rounded


def _scale_of_each(hidden: Tensor, form: Fp8Weight) -> Tensor:
    if form.rounding == "none":
        return torch.zeros(())
    scales = round_rows_ref(hidden, form).scales
    length = form.block[1] if form.has_groups else hidden.shape[1]
    return scales.T.repeat_interleave(length, 1)[:, : hidden.shape[1]] if len(scales) > 1 else scales.T


def test_activations_above_a_fixed_scale_become_the_largest_number() -> None:
    form = weight(2, 3, (1, 4096), torch.tensor([0.5]))
    assert rounded_ref(torch.tensor([[1000.0, -1000.0, 1.0625]]), form).tolist() == [[224.0, -224.0, 1.0]]


def test_a_row_of_zeros_stays_zero() -> None:
    assert not rounded_ref(torch.zeros(2, 300), weight(4, 300, (128, 128))).any()
    assert not to_fp8(torch.zeros(4, 300), (128, 128)).dequantised().any()


def test_each_group_of_a_row_has_its_own_scale() -> None:
    hidden = torch.cat((torch.full((1, 128), 1e-4), torch.full((1, 72), 3.0)), 1)
    rounded = round_rows_ref(hidden, weight(4, 200, (128, 128)))
    torch.testing.assert_close(rounded.scales, torch.tensor([[1e-4], [3.0]]) / 448)
    assert rounded.rows.float().unique().tolist() == [448.0]


@pytest.mark.parametrize(
    ("heights", "has_blocks"), [((256, 128, 128), True), ((256, 128, 64), True), ((64, 128), False)]
)
def test_joined_parts_keep_their_scales(heights: tuple[int, ...], has_blocks: bool) -> None:
    """Blocks stay if every part but the last has whole ones. Otherwise each row gets the scale of its block."""
    parts = [weight(height, 256, (128, 128)) for height in heights]
    joined = join_rows(parts)
    assert torch.equal(joined.dequantised(), torch.cat([part.dequantised() for part in parts]))
    assert joined.block == (128 if has_blocks else 1, 128)


def test_joined_parts_share_the_largest_fixed_scale() -> None:
    parts = [weight(4, 8, (1, 8), torch.tensor([scale])) for scale in (0.5, 2.0, 1.0)]
    assert join_rows(parts).input_scale.tolist() == [2.0]  # type: ignore[union-attr]
    assert join_rows([weight(4, 8, (1, 8), torch.zeros(0))] * 2).rounding == "none"


@pytest.mark.parametrize(("begin", "end", "height"), [(128, 576, 128), (0, 256, 128), (512, 576, 64), (64, 576, 1)])
def test_rows_of_a_matrix(begin: int, end: int, height: int) -> None:
    whole = weight(576, 256, (128, 128))
    part = whole.rows(begin, end)
    assert torch.equal(part.dequantised(), whole.dequantised()[begin:end])
    assert part.block[0] == height


def test_rows_in_another_order() -> None:
    """Whole blocks keep one scale, and rows that leave their block get scales of their own."""
    whole = weight(512, 256, (128, 128))
    blocks = torch.arange(512).view(4, 128)[[2, 0, 3]].flatten()
    mixed = torch.arange(512).view(2, 256).T.flatten()
    for order, height in ((blocks, 128), (mixed, 1)):
        taken = whole.take(order)
        assert torch.equal(taken.dequantised(), whole.dequantised()[order])
        assert taken.block == (height, 128)


def test_tensors_of_a_module_read_back() -> None:
    for input_scale in (None, torch.tensor([0.5]), torch.zeros(0)):
        made = weight(4, 8, (1, 8), input_scale)
        found = Fp8Weight.find(made.tensors("model.fc"), "model.fc")
        assert found is not None
        assert (found.rounding, found.block) == (made.rounding, made.block)
    assert Fp8Weight.find({"fc.weight": torch.ones(2, 2)}, "fc") is None


def test_a_weight_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="values"):
        Fp8Weight(torch.ones(2, 2), torch.ones(1, 1))
    with pytest.raises(ValueError, match="scales"):
        Fp8Weight(torch.ones(2, 2).to(FP8), torch.ones(1, 1, dtype=torch.bfloat16))
