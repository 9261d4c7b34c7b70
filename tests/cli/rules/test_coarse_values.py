"""Looks at tensors that have the same traces: rounding, clipping, lost scales and lost values."""

from collections.abc import Callable
from pathlib import Path

import plant_kinds
import pytest
import torch
from planted_faults.kinds import Kind
from torch import Tensor

from dflash_cli.rules.rule import rules_of
from dflash_cli.rules.subject import ValidationPlan, open_subject
from dflash_cli.rules.themes.unpacked import is_one_sided, num_levels
from dflash_cli.rules.validator import apply_rules

DOWN = "layers.1.mlp.down_proj.weight"
LOOKS = {"N32", "N34", "N37", "N38", "N39", "N40", "N41", "N42", "N43"}


def looks(change: Callable[[Tensor], Tensor], path: Path) -> set[str]:
    """The looks that find a changed down_proj of the windowed draft."""

    def edit(_: object, tensors: dict[str, Tensor], __: object) -> None:
        tensors[DOWN] = change(tensors[DOWN])

    plant_kinds.plant(Kind("", edit, ""), "windowed", "mild", path / "draft")
    subject = open_subject(ValidationPlan(draft=path / "draft", level="weights"))
    found = apply_rules([rule for rule in rules_of("weights") if rule.id in LOOKS], subject)
    return {item.id for item in found}


def rounded(matrix: Tensor, top: int, largest: float = 1.0) -> Tensor:
    step = matrix.abs().max() * largest / top
    return (matrix / step).round().clamp(-top, top) * step


def spread(matrix: Tensor) -> Tensor:
    """Columns times factors of many sizes, a seventh of them far below the usual one."""
    return matrix * torch.exp(torch.linspace(-4.5, 4.5, matrix.shape[1]))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda item: rounded(item, 3), {"N42"}),
        (lambda item: rounded(item, 3, 0.3), {"N42"}),
        (lambda item: rounded(item, 7, 0.2), set()),
        (lambda item: rounded(item, 7) / item.abs().max() * 7, set()),
        (lambda item: torch.where(torch.arange(item.shape[1]) % 3 > 0, item, 0.0), {"N32", "N34", "N43"}),
        (spread, set()),
        (lambda item: item / item.abs().amax(dim=1, keepdim=True), {"N41"}),
        (lambda item: item / item.abs().amax(dim=0), set()),
        (lambda item: item.clamp(-item.std(), item.std()), {"N38"}),
    ],
    ids=[
        "3 bits",
        "3 bits, clipped",
        "4 bits, clipped",
        "codes",
        "zero columns",
        "spread columns",
        "scales of rows",
        "scales of columns",
        "clipped",
    ],
)
def test_damage_has_the_look_of_its_own_cause(
    change: Callable[[Tensor], Tensor], found: set[str], tmp_path: Path
) -> None:
    assert looks(change, tmp_path) == found


def test_levels_are_counted_per_matrix_row_and_group() -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert num_levels(values) is None
    assert num_levels(values.bfloat16()) is None
    rows = (values / values.abs().amax(dim=1, keepdim=True) * 3).round() * torch.rand(64, 1)
    assert (num_levels(rows), num_levels(rows, of_groups=False)) == (4, 4)
    groups = values.view(-1, 32)
    scales = groups.abs().amax(dim=1, keepdim=True) / 7
    groups = ((groups / scales).round() * scales).view(64, 256)
    assert (num_levels(groups), num_levels(groups, of_groups=False)) == (8, None)


def test_zeros_and_one_value_are_no_grid() -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert num_levels(values * (torch.arange(64) < 40)[:, None]) is None
    assert num_levels(torch.ones(64, 256)) is None
    assert num_levels(torch.zeros(64, 256)) is None


def test_signs_are_counted_among_values_that_are_not_zero() -> None:
    """Rounding makes most values zero. The few others have both signs, or are too few to tell."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert is_one_sided(values.abs())
    assert is_one_sided(values.abs() * (torch.arange(256) % 8 > 2))
    assert not is_one_sided(torch.where(values.abs() > 2.5, values, 0.0))
    assert not is_one_sided(torch.where(values.abs() > 2.5, values.abs(), 0.0))
