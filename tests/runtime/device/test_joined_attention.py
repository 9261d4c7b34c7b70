"""Blocks and prompts in one forward have the same attention and stored KV as in separate forwards."""

from dataclasses import replace

import pytest
import torch

from dflash_kernels.attention.ragged_attention import Segment, plan_ragged
from dflash_kernels.attention.ragged_config import ragged_shape
from dflash_kernels.suite import KernelChoice, Kernels, pick_kernels
from dflash_runtime.device.joined_attention import JoinedAttention
from dflash_runtime.device.prefill import RaggedAttention
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_testing.pairs import placement, random_target
from dflash_testing.tensors import normal

PAGE_SIZE, WIDTH = 16, 3
CONFIG = random_target(num_layers=2, windows=(None, 20)).config
HEADS, SIZE = CONFIG.num_kv_heads, CONFIG.head_dim
CONTEXTS = (21, 5)
"""Contexts of two decoding requests, in pages 1 to 4. Two prompts have pages 5 to 8; the first has a context of 16."""
SEGMENTS = (Segment(0, 7, 16, 2), Segment(7, 18, 0, 3))
TABLE = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
POSITIONS = ((0, (21, 22, 23)), (1, (5, 6, 7)), (2, tuple(range(16, 23))), (3, tuple(range(18))))
SLOTS = torch.tensor(
    [int(TABLE[row, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for row, ats in POSITIONS for at in ats]
)
NUM_BLOCK_ROWS = len(CONTEXTS) * WIDTH


def attend(kernels: Kernels) -> JoinedAttention:
    """Attention over a cache of random numbers."""
    cache = KVCache(CONFIG, 9, PAGE_SIZE, replace(placement(), kernels=kernels))
    cache.pages.copy_(normal(*cache.pages.shape, seed=7))
    blocks = PagedAttention(
        kernels, cache, TABLE[:2], torch.tensor(CONTEXTS), (True, True), CONFIG.windows,
        SLOTS[:NUM_BLOCK_ROWS].view(len(CONTEXTS), WIDTH),
    )  # fmt: skip
    plan = plan_ragged(SEGMENTS, CONFIG.num_heads, HEADS, ragged_shape(SIZE, 4, 16, TABLE.device), TABLE.device)
    plans = {(HEADS, SIZE): (plan, torch.tensor(plan.ints))}
    prompts = RaggedAttention(kernels, cache, TABLE, plans, CONFIG.windows, SLOTS[NUM_BLOCK_ROWS:])
    return JoinedAttention.join(blocks, prompts)


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("layer", [0, 1])
def test_joined_attention_equals_separate_attention(name: KernelChoice, layer: int) -> None:
    kernels = pick_kernels(name, "cpu")
    joined, apart = attend(kernels), attend(kernels)
    query = normal(len(SLOTS), CONFIG.num_heads, SIZE, seed=1)
    keys, values = (normal(len(SLOTS), HEADS, SIZE, seed=seed) for seed in (2, 3))
    found = joined(layer, query, keys, values)
    blocks, rest = slice(NUM_BLOCK_ROWS), slice(NUM_BLOCK_ROWS, None)
    expected = [
        apart.blocks(layer, query[blocks], keys[blocks], values[blocks]),
        apart.prompts(layer, query[rest], keys[rest], values[rest]),
    ]
    assert torch.equal(found, torch.cat(expected))
    assert torch.equal(joined.prompts.cache.pages, apart.prompts.cache.pages)
    assert isinstance(joined.blocks, PagedAttention)
    assert torch.equal(joined.blocks.cache.keys[layer].flatten(0, 1)[SLOTS], keys)
