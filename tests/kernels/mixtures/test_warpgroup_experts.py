"""Packed experts of dozens of rows on tensor cores: whole on a GPU, and on the CPU with the assembly simulated."""

from dataclasses import replace

import pytest
import torch

from dflash_kernels.mixtures import warpgroup_experts as module
from dflash_kernels.mixtures.experts import experts
from dflash_kernels.mixtures.mixture_config import WARPGROUP_ROWS
from dflash_kernels.products.activation import GELU, SILU, Gate
from dflash_testing.interpreted_assembly import interpret_assembly
from dflash_testing.packed_experts import expected_parts, packed
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

CLAMPED = Gate("clamped", alpha=1.702, limit=0.5)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "hidden_width", "inner_width", "gate", "has_biases"),
    [
        (33, 4, 1, 64, 32, SILU, False),
        (40, 3, 2, 160, 96, CLAMPED, True),
        pytest.param(35, 3, 2, 288, 160, GELU, True, marks=pytest.mark.slow),
        pytest.param(128, 5, 3, 96, 352, SILU, False, marks=pytest.mark.slow),
    ],
)
def test_simulated_kernels_give_equal_parts(
    num_rows: int, num_experts: int, num_chosen: int, hidden_width: int, inner_width: int, gate: Gate,
    has_biases: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Cut tiles and pieces, experts with no rows and with several tiles of rows, and rows that do not lie together."""
    interpret_assembly(monkeypatch)
    hidden = normal(num_rows, hidden_width + 2, dtype=torch.bfloat16, seed=1)[:, :hidden_width]
    gate_up, down = packed(num_experts, 2 * inner_width, hidden_width), packed(num_experts, hidden_width, inner_width)
    biases = normal(num_experts, 2 * inner_width, seed=2).bfloat16(), normal(num_experts, hidden_width).bfloat16()
    chosen = (normal(num_rows, num_experts, seed=4) + 3 * torch.eye(num_experts)[0]).topk(num_chosen).indices
    scores = normal(num_rows, num_chosen, seed=5).abs()
    given = (hidden, gate_up, down, chosen, scores, gate, biases if has_biases else None)
    assert torch.equal(module.warpgroup_experts(*given), expected_parts(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("is_skewed", [False, True], ids=["any experts", "mostly two experts"])
@pytest.mark.parametrize(
    ("num_rows", "hidden_width", "inner_width", "gate", "has_biases"),
    [
        (WARPGROUP_ROWS[0], 96, 160, SILU, True),
        (64, 2880, 1440, CLAMPED, True),
        (77, 672, 32, GELU, False),
        (WARPGROUP_ROWS[-1], 320, 288, CLAMPED, False),
    ],
)
def test_rows_of_warpgroups_equal_unpacked_ones(
    num_rows: int, hidden_width: int, inner_width: int, gate: Gate, has_biases: bool, is_skewed: bool
) -> None:
    """Cut tiles and pieces, experts without rows and with many tiles, scores in float32, and a second launch."""
    count, num_chosen = 16, 3
    hidden = normal(num_rows, hidden_width + 2, dtype=torch.bfloat16, seed=1)[:, :hidden_width]
    gate_up, down = packed(count, 2 * inner_width, hidden_width), packed(count, hidden_width, inner_width, seed=1)
    biases = normal(count, 2 * inner_width, seed=2).bfloat16(), normal(count, hidden_width, seed=3).bfloat16()
    liked = torch.arange(count, device=DEVICE) % 8 < 2
    chosen = (normal(num_rows, count, seed=4) + (6 if is_skewed else 0) * liked).topk(num_chosen).indices
    scores = normal(num_rows, num_chosen, seed=5).abs()
    assert torch.cuda.get_device_capability() != (9, 0) or module.has_warpgroup_rows(hidden, gate_up, down)
    given = (hidden, gate_up, down, chosen, scores, gate, biases if has_biases else None)
    found = [experts(*given) for _ in range(2)]
    assert_rows_close(found[0], expected_parts(*given).double(), torch.bfloat16)
    assert torch.equal(*found)


def test_which_experts_warpgroups_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of rows in bfloat16 with small scales, which begin at whole words."""
    monkeypatch.setattr(module, "IS_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    weight = packed(2, 32, 32)
    large = replace(weight, has_small_scales=False)
    rows = {count: normal(count, 32, dtype=torch.bfloat16) for count in (32, 33, 128, 129)}
    taken = [count for count, hidden in rows.items() if module.has_warpgroup_rows(hidden, weight, weight)]
    assert taken == [33, 128]
    odd = normal(33, 35, dtype=torch.bfloat16)
    refused = [
        (odd[:, :32], weight, weight),
        (normal(40, 34, dtype=torch.bfloat16)[:, 1:33], weight, weight),
        (rows[33].float(), weight, weight),
        (rows[33], weight, large),
        (rows[33], large, weight),
    ]
    assert not any(module.has_warpgroup_rows(*case) for case in refused)
