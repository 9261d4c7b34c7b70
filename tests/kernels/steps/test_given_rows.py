"""Rows given by survivals. `test_row_budget.py` compares small batches with the host's choice."""

import pytest
import torch

from dflash_kernels.steps.given_rows import COMPARED, give_rows, give_rows_ref
from dflash_testing.tensors import DEVICE


@pytest.mark.parametrize("num_given", [0, 100, 600])
def test_rows_of_a_large_batch_equal_the_references(num_given: int) -> None:
    """600 survivals, more than a program compares at once. Half of the requests have the survivals of another one."""
    generator = torch.Generator().manual_seed(0)
    likely = torch.rand(20, 15, generator=generator, dtype=torch.float64)
    survivals = torch.cat((likely, likely)).cumprod(1).to(DEVICE)
    assert survivals.numel() > COMPARED
    found, expected = give_rows(survivals, 40 + num_given), give_rows_ref(survivals, 40 + num_given)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
