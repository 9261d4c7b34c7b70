"""A target computes hidden states only for wanted rows, and keys and values for all rows."""

import pytest
import torch
from torch import Tensor

from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.models.families.qwen3 import Qwen3Target
from dflash_runtime.models.layers import MLP
from dflash_testing.pairs import placement, random_target

NUM_ROWS, PAGE_SIZE = 9, 16
TAPS = [(), (1,), (1, 3), (3,)]
"""Layer 3 is the last."""


def forward(target: Qwen3Target, taps: tuple[int, ...], wanted: Tensor | None) -> tuple[Tensor, Tensor | None, KVCache]:
    """Run nine rows of one prompt -> hidden states, features, and the cache with their KV."""
    cache = KVCache(target.config, 3, PAGE_SIZE, placement(torch.float64))
    table, slots = torch.tensor([[1]]), torch.arange(PAGE_SIZE, PAGE_SIZE + NUM_ROWS)[None]
    causal, windows = (True,) * target.config.num_layers, target.config.windows
    attend = PagedAttention(
        placement(torch.float64).kernels, cache, table, torch.zeros(1, dtype=torch.int64), causal, windows, slots
    )
    return *target(torch.arange(NUM_ROWS), torch.arange(NUM_ROWS), attend, taps, wanted), cache


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("wanted", [[8], [0, 3, 8], [5, 2]])
def test_wanted_rows_equal_rows_of_the_whole_forward(taps: tuple[int, ...], wanted: list[int]) -> None:
    """Features and KV cover all rows."""
    target = random_target(torch.float64)
    hidden, features, cache = forward(target, taps, None)
    some, same_features, same_cache = forward(target, taps, torch.tensor(wanted))
    torch.testing.assert_close(some, hidden[wanted])
    torch.testing.assert_close(same_features, features)
    torch.testing.assert_close(same_cache.keys, cache.keys)
    torch.testing.assert_close(same_cache.values, cache.values)


@pytest.mark.parametrize("taps", TAPS)
def test_the_last_layer_runs_wanted_rows_unless_it_is_tapped(
    taps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    run = MLP.__call__

    def watched(self: MLP, hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return run(self, hidden)

    monkeypatch.setattr(MLP, "__call__", watched)
    forward(random_target(torch.float64), taps, torch.tensor([8]))
    assert seen == [9, 9, 9, 9 if 3 in taps else 1]
