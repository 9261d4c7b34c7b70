"""Statistics of logits: the argmax for any tile size, and whether a row is finite."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.launch_config import VOCAB_TILE, VocabShape
from dflash_kernels.logits import logit_tiles
from dflash_kernels.logits.sampling import argmax, argmax_ref, sample, sample_ref
from dflash_testing.tensors import DEVICE, DTYPES, normal, real, whole

MODES: list[dict[str, Any]] = [{"is_greedy": True}, {"has_filters": False}, {}]


def kinds_of_rows(dtype: torch.dtype) -> Tensor:
    """Return rows that are not finite and similar finite rows. The special logit is in the first or a later tile."""
    nan, inf = torch.nan, torch.inf
    logits = normal(12, 2 * VOCAB_TILE + 15, dtype=dtype) * 3
    logits[1, 5] = logits[2, VOCAB_TILE + 5] = logits[3, -1] = logits[4, 6] = nan
    logits[3, 7] = logits[5, 7] = logits[6, -1] = inf
    logits[4] = nan
    logits[7] = -inf
    logits[8], logits[8, VOCAB_TILE + 9] = -inf, 0.5
    logits[9, 3:] = -inf
    logits[10], logits[10, 2] = -inf, nan
    logits[11, 40] = torch.finfo(dtype).max
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", range(len(MODES)))
def test_a_row_is_finite_if_its_highest_logit_is(mode: int, dtype: torch.dtype) -> None:
    logits = kinds_of_rows(dtype)
    num_rows = len(logits)
    rows = torch.arange(num_rows, device=DEVICE)
    temperatures = real(*[0.0 if "is_greedy" in MODES[mode] else (i // 3 % 2) * 0.8 for i in range(num_rows)])
    top_ps = real(*[(1.0, 0.9)[i % 2] for i in range(num_rows)])
    top_ks = whole(*[(0, 7, 0)[i % 3] for i in range(num_rows)])
    expected = logits.amax(-1).isfinite()
    assert 0 < int(expected.sum()) < num_rows
    for choose in (sample, sample_ref):
        for temperature in (temperatures, temperatures.flip(0)):
            chosen = choose(logits, temperature, top_ks, top_ps, rows, rows, **MODES[mode])
            assert torch.equal(chosen.is_finite, expected)
            assert bool(((chosen.token_ids >= 0) & (chosen.token_ids < logits.shape[1])).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [VocabShape(64, 1), VocabShape(VOCAB_TILE, 4), VocabShape(16_384, 16)])
def test_the_argmax_equals_the_reference_for_any_tile_size(
    shape: VocabShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few distinct values: many tiles have the highest one. NaN counts as -inf, so there is always a valid id."""
    monkeypatch.setattr(logit_tiles, "argmax_shape", lambda _: shape)
    logits = (normal(5, VOCAB_TILE + 77, dtype=dtype) * 2).round()
    logits[3, :-1] = float("-inf")
    logits[4] = -0.0
    logits[4, VOCAB_TILE:] = 0.0
    assert torch.equal(argmax(logits), argmax_ref(logits))
    broken = logits.clone()
    broken[0, 0], broken[1] = torch.nan, torch.nan
    ids = argmax(broken)
    assert torch.equal(ids[2:], argmax_ref(logits[2:]))
    assert ids[0] == argmax_ref(logits[:1, 1:])[0] + 1
    assert 0 <= int(ids[1]) < logits.shape[1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [16, 480])
def test_the_argmax_of_a_whole_vocabulary(num_rows: int) -> None:
    logits = normal(num_rows, 151_936, dtype=torch.bfloat16)
    assert torch.equal(argmax(logits), argmax_ref(logits))
