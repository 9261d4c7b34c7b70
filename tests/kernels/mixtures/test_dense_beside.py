"""The choice of experts beside a dense feed-forward equals both alone."""

import pytest
import torch

from dflash_kernels.mixtures import dense_beside as module
from dflash_kernels.mixtures.dense_beside import Dense, choose_beside, choose_beside_ref
from dflash_kernels.products.activation import GELU
from dflash_kernels.products.row_product import cut_of_row
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The kernels are made for bfloat16, which the interpreter cannot multiply."""


def distinct_rows(num_rows: int, num_experts: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and a router with exact products, and different logits within a row."""
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randperm(num_experts, generator=generator) / 8 for _ in range(width)]
    return torch.eye(width)[:num_rows].to(DEVICE, DTYPE), torch.stack(columns, 1).to(DEVICE, DTYPE)


@pytest.mark.parametrize("has_factors", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_choice_and_the_dense_output_equal_the_reference(num_rows: int, has_factors: bool) -> None:
    hidden, router = distinct_rows(num_rows, 24, 72)
    gate_up, down = normal(2 * 40, 72, dtype=DTYPE, seed=1) / 8, normal(72, 40, dtype=DTYPE, seed=2) / 6
    factors = normal(24, dtype=DTYPE, seed=3).abs() if has_factors else None
    dense = Dense(normal(num_rows, 72, dtype=DTYPE, seed=4), gate_up, down, GELU)
    chosen, scores, parts = choose_beside(hidden, router, 3, True, factors, dense)
    wanted = choose_beside_ref(hidden, router, 3, True, factors, dense)
    assert torch.equal(chosen, wanted[0])
    assert_rows_close(scores, wanted[1].double(), DTYPE)
    assert_rows_close(parts.sum(0).to(DTYPE), wanted[2].sum(0).double(), DTYPE)


def test_a_long_sum_of_the_dense_output_is_left_to_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate, up and the router are products of one row, but not `down`."""
    monkeypatch.setattr(module, "cut_of_row", lambda rows, *rest, **options: (
        None if rows.shape[1] == 40 else cut_of_row(rows, *rest, **options)
    ))  # fmt: skip
    hidden, router = distinct_rows(1, 24, 72)
    dense = Dense(hidden, normal(2 * 40, 72, dtype=DTYPE, seed=1), normal(72, 40, dtype=DTYPE, seed=2), GELU)
    found = choose_beside(hidden, router, 3, True, None, dense)
    wanted = choose_beside_ref(hidden, router, 3, True, None, dense)
    assert torch.equal(found[0], wanted[0])
    assert_rows_close(found[2].sum(0).to(DTYPE), wanted[2].sum(0).double(), DTYPE)
