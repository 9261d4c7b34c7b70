"""Roundings: values of a format stay, other values become the nearest value of the format."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_cli.tuning.roundings import (
    GROUP,
    KV,
    WEIGHTS,
    round_weights,
    to_bfloat16,
    to_fp8,
    to_int4,
    to_int8,
    to_scaled_fp8,
)

VALUES = torch.randn(6, 4 * GROUP, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 6)[:, None]


@pytest.mark.parametrize("rounding", dict.fromkeys((*WEIGHTS.values(), *KV.values())), ids=lambda item: item.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rounded_values_keep_their_dtype_and_a_second_rounding_keeps_them(
    rounding: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The second rounding changes at most the last bit of a scale."""
    once = rounding(VALUES.to(dtype))
    assert (once.dtype, once.shape) == (dtype, VALUES.shape)
    torch.testing.assert_close(rounding(once), once, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)


def test_fp8_has_the_values_of_its_format() -> None:
    """Three bits after the leading one, steps of 2^-9 below 2^-6, and 448 as the largest."""
    values = torch.tensor([1.0, 1.06, 1.07, 448.0, 1e6, -1e6, 2**-9, 0.4 * 2**-9, 0.0])
    expected = torch.tensor([1.0, 1.0, 1.125, 448.0, 448.0, -448.0, 2**-9, 0.0, 0.0])
    assert torch.equal(to_fp8(values), expected)


def test_a_scale_keeps_values_outside_the_range_of_fp8() -> None:
    rows = torch.tensor([[1000.0, 900.0], [1e-4, 0.9e-4], [0.0, 0.0]])
    relative = (to_scaled_fp8(rows) / rows - 1).abs()[:2]
    assert relative.max() < 2**-4
    assert torch.equal(to_fp8(rows)[1], torch.zeros(2))
    assert torch.equal(to_scaled_fp8(rows)[2], torch.zeros(2))


def test_the_largest_error_of_whole_numbers_is_half_a_step() -> None:
    for rounding, step, width in ((to_int8, 127, VALUES.shape[1]), (to_int4, 7, GROUP)):
        groups = VALUES.unflatten(-1, (-1, width))
        steps = groups.abs().amax(-1, keepdim=True) / step
        errors = (rounding(VALUES).unflatten(-1, (-1, width)) - groups).abs()
        assert (errors <= steps / 2 * 1.0001).all()
        assert (errors > steps / 4).any()
        assert len(torch.unique((rounding(VALUES[:1]) / steps[:1, 0]).round()[0, :width])) <= 2 * step + 1


def test_bfloat16_has_eight_bits() -> None:
    assert torch.equal(to_bfloat16(torch.tensor([1.0, 1 + 2**-9, 1 + 2**-7])), torch.tensor([1.0, 1.0, 1 + 2**-7]))


def test_only_matrices_are_rounded() -> None:
    matrix, vector, ids = VALUES.clone(), VALUES[0].clone(), torch.arange(4).view(2, 2)
    weights = {"layers.0.qkv_proj.weight": matrix, "experts.down_proj.weight": matrix[None], "norm.weight": vector,
               "model.embed_tokens.weight": matrix, "lm_head.weight": matrix, "d2t": ids,
               "markov_head.markov_w1.weight": matrix, "markov_head.markov_w2.weight": matrix,
               "layers.0.linear_attn.conv1d.weight": matrix[:, None], "layers.0.mlp.gate.weight": matrix,
               "layers.0.linear_attn.in_proj_qkv.weight": matrix, "layers.0.linear_attn.in_proj_b.weight": matrix,
               "layers.0.mlp.shared_expert_gate.weight": matrix[:1], "layers.0.mlp.gate_proj.weight": matrix,
               "candidate_selector.successor_codebook": matrix, "confidence_head.proj.weight": matrix[:1]}  # fmt: skip
    found = round_weights(weights, "int8")
    changed = {name for name, tensor in weights.items() if not torch.equal(found[name], tensor)}
    assert changed == {
        "layers.0.qkv_proj.weight", "experts.down_proj.weight", "markov_head.markov_w2.weight",
        "layers.0.linear_attn.in_proj_qkv.weight", "layers.0.mlp.gate_proj.weight",
    }  # fmt: skip
