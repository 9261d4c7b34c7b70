"""Experts of few rows: each expert computes its own rows."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.launch_config import has_tile_loads
from dflash_kernels.mixtures import experts as module
from dflash_kernels.mixtures.expert_choice import choose_experts
from dflash_kernels.mixtures.experts import experts, experts_ref
from dflash_kernels.mixtures.mixture_config import MAX_EXPERT_ROWS, experts_shape, takes_row
from dflash_testing.tensors import DEVICE, assert_mostly_equal, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The kernels are made for bfloat16, which the interpreter cannot multiply."""

ALL = -1
"""Seed for rows that all choose the same experts."""


def weights(num_experts: int, width: int, hidden: int) -> tuple[Tensor, Tensor]:
    gate_up = normal(num_experts, 2 * width, hidden, dtype=DTYPE, seed=1) * hidden**-0.5
    return gate_up, normal(num_experts, hidden, width, dtype=DTYPE, seed=2) * width**-0.5


def choices(num_rows: int, num_experts: int, num_chosen: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return different random ids for each row, and scores. With the seed ALL, all rows have the same ids."""
    generator = torch.Generator().manual_seed(max(seed, 0))
    rows = [torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_rows)]
    chosen = torch.stack(rows[:1] * num_rows if seed == ALL else rows)
    return chosen.to(DEVICE), normal(num_rows, num_chosen, dtype=DTYPE, seed=4).abs()


def assert_parts_right(
    found: Tensor, hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, scores: Tensor
) -> None:
    """Compare each part of each row with float64 that is rounded where a model rounds."""
    wanted, dtype = torch.empty(chosen.shape[1], *hidden.shape, dtype=found.dtype, device=DEVICE), found.dtype
    for row, place in torch.cartesian_prod(*(torch.arange(size) for size in chosen.shape)).view(-1, 2).tolist():
        expert, wide = chosen[row, place], hidden[row].double()
        gate, up = (wide @ gate_up[expert].double().T).to(dtype).double().chunk(2)
        inner = functional.silu(gate).to(dtype).double() * up
        output = inner.to(dtype).double() @ down[expert].double().T
        wanted[place, row] = output.to(dtype).double() * scores[row, place].double()
    assert_rows_close(found, wanted.double(), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(found, wanted)


SIZES = [
    (1, 8, 2, 32, 64),  # one row
    (1, 6, 3, 72, 296),  # one row, tiles beyond columns and depth
    (1, 4, 2, 8, 4112),  # one row, a sum too long for the kernel of one row
    (4, 32, 2, 32, 64),  # the most routes for one program per route; some experts are not chosen
    (5, 11, 3, 24, 72),  # one program per expert; partly filled tiles
    (7, 9, 1, 40, 16),
    (20, 3, 2, 8, 136),  # experts with more rows than one tile
    (70, 4, 2, 8, 16),
]
"""Rows, experts, chosen, inner width and hidden size."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [3, ALL])
def test_each_expert_computes_its_rows(size: tuple[int, ...], seed: int) -> None:
    num_rows, num_experts, num_chosen, width, hidden_size = size
    hidden, factors = normal(num_rows, hidden_size, dtype=DTYPE), weights(num_experts, width, hidden_size)
    chosen, scores = choices(num_rows, num_experts, num_chosen, seed)
    found = experts(hidden, *factors, chosen, scores)
    assert_parts_right(found, hidden, *factors, chosen, scores)
    in_half = hidden.half(), factors[0].half(), factors[1].half(), chosen, scores.half()
    assert_parts_right(experts(*in_half), *in_half)
    wanted = experts_ref(hidden, *factors, chosen, scores)
    assert_rows_close(found.sum(0), wanted.sum(0).double(), DTYPE)


@pytest.mark.reference
def test_both_kinds_of_programs_are_tested() -> None:
    kinds = {experts_shape(rows, chosen, count, 2, DEVICE).is_by_route for rows, count, chosen, *_ in SIZES}
    assert kinds == {True, False}


def test_the_most_rows_may_choose_the_same_experts() -> None:
    hidden, factors = normal(MAX_EXPERT_ROWS, 16, dtype=DTYPE), weights(5, 8, 16)
    chosen, scores = choices(MAX_EXPERT_ROWS, 5, 2, ALL)
    found = experts(hidden, *factors, chosen, scores)
    assert_rows_close(found.sum(0), experts_ref(hidden, *factors, chosen, scores)[0].double(), DTYPE)


@pytest.mark.parametrize("num_experts", [4, 64])
def test_a_row_that_is_not_finite_does_not_change_others(num_experts: int) -> None:
    hidden, factors = normal(6, 32, dtype=DTYPE), weights(num_experts, 16, 32)
    chosen, scores = choices(6, num_experts, 2, ALL)
    clean = experts(hidden, *factors, chosen, scores)
    hidden[2, 1] = torch.nan
    found = experts(hidden, *factors, chosen, scores)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[:, others], clean[:, others])
    assert found[:, 2].isnan().all()


@pytest.mark.reference
def test_one_row_with_short_sums_has_a_kernel_of_its_own() -> None:
    can = has_tile_loads(DEVICE)
    for num_rows, *_, width, hidden_size in SIZES:
        assert takes_row(num_rows, (hidden_size, width), DEVICE) == (can and num_rows == 1 and hidden_size <= 4096)


def test_rows_may_be_views_of_a_wider_tensor() -> None:
    wide, factors = normal(3, 2, 64, dtype=DTYPE), weights(8, 16, 64)
    chosen, scores = choices(3, 8, 2)
    assert_parts_right(experts(wide[:, 1], *factors, chosen, scores), wide[:, 1], *factors, chosen, scores)


@pytest.mark.parametrize("num_rows", [8, 9])
def test_many_rows_use_the_reference(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXPERT_ROWS", 8)
    chosen, scores = choices(num_rows, 4, 2)
    parts = experts(normal(num_rows, 16, dtype=DTYPE), *weights(4, 8, 16), chosen, scores)
    assert len(parts) == (2 if num_rows == 8 else 1)


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    hidden, factors = normal(3, 16), weights(4, 8, 16)
    chosen, scores = choices(3, 4, 2)
    with pytest.raises(ValueError, match=r"^hidden: "):
        experts(hidden[:2].to(DTYPE), *factors, chosen, scores)
    with pytest.raises(ValueError, match=r"^gate_up: "):
        experts(hidden.to(DTYPE), factors[0][:, :8], factors[1], chosen, scores)
    with pytest.raises(TypeError, match="float16"):
        experts(hidden.half(), *factors, chosen, scores)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64, 128, 256])
def test_at_the_size_of_a_model(num_rows: int) -> None:
    """The sizes of Qwen3-30B-A3B in bfloat16. Rows differ from the reference by rounding only."""
    hidden, factors = normal(num_rows, 2048, dtype=DTYPE), weights(128, 768, 2048)
    chosen, scores = choose_experts(hidden, normal(128, 2048, dtype=DTYPE, seed=5) * 0.02, 8, True)
    found = experts(hidden, *factors, chosen, scores)
    wanted = experts_ref(hidden, *factors, chosen, scores)
    assert_rows_close(found.float().sum(0).to(DTYPE), wanted[0].double(), DTYPE)
    assert torch.equal(found, experts(hidden, *factors, chosen, scores))
