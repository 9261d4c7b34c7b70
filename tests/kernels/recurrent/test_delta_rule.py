"""Blocks of the gated delta rule equal the rule row by row, however many rows of each block are kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.drafts.draft_tree import TreeRows, is_ancestor
from dflash_kernels.drafts.tree_path import PathRecords, move_records_ref
from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.recurrent.delta_blocks import delta_blocks, delta_blocks_ref
from dflash_kernels.recurrent.delta_rule import (
    BlockTexts,
    DeltaMemory,
    Gates,
    delta_rule,
    delta_rule_ref,
    empty_states,
    gate_values,
)
from dflash_testing.random_trees import random_tree_rows
from dflash_testing.tensors import assert_rows_close, normal

Run = Callable[..., Tensor]
FLOAT64 = torch.float64
HEADS, KEYS, VALUE, KEY = 4, 2, 24, 16
WIDTH = 2 * KEYS * KEY + HEADS * VALUE

IMPLEMENTATIONS = [
    pytest.param(delta_rule_ref, marks=pytest.mark.reference),
    pytest.param(delta_rule, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]


def memory(num_texts: int, size: int, dtype: torch.dtype = torch.float32) -> DeltaMemory:
    """An empty memory whose records are poisoned, except the states."""
    device = normal(1).device
    shapes = ((num_texts, size, KEYS, KEY), (num_texts, size, HEADS, VALUE), (num_texts, size, HEADS))
    records = (torch.full(shape, torch.nan, dtype=dtype, device=device) for shape in shapes)
    return DeltaMemory(empty_states(num_texts, HEADS, KEY, VALUE, dtype, device), *records)


def inputs(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Gates]:
    rows = normal(count, WIDTH, dtype=dtype)
    gates = Gates(
        normal(count, HEADS, dtype=dtype, seed=1), normal(count, HEADS, dtype=dtype, seed=2),
        normal(HEADS, seed=3).sub(2.0), normal(HEADS, seed=4),
    )  # fmt: skip
    return rows, gates


def definition(rows: Tensor, gates: Gates) -> Tensor:
    """The rule on one text in float64, [T, H, V]."""
    wide = rows.double()
    query, keys, values = wide.split((KEYS * KEY, KEYS * KEY, HEADS * VALUE), -1)
    decays, betas = gate_values(gates, torch.float64)
    outs = []
    state = torch.zeros((HEADS, VALUE, KEY), dtype=torch.float64, device=rows.device)
    for index in range(len(rows)):
        unit = [item[index].view(KEYS, KEY) for item in (query, keys)]
        ask, key = (item / (item.square().sum(-1, keepdim=True) + 1e-6).sqrt() for item in unit)
        ask, key = (item.repeat_interleave(HEADS // KEYS, 0) for item in (ask, key))
        state = state * decays[index].exp()[:, None, None]
        read = torch.einsum("hvk,hk->hv", state, key)
        delta = betas[index][:, None] * (values[index].view(HEADS, VALUE) - read)
        state = state + torch.einsum("hv,hk->hvk", delta, key)
        outs.append(torch.einsum("hvk,hk->hv", state, ask) * KEY**-0.5)
    return torch.stack(outs)


def part(gates: Gates, index: Tensor) -> Gates:
    return Gates(gates.decay[index], gates.beta[index], gates.log_rate, gates.bias)


def run_blocks(run: Any, rows: Tensor, gates: Gates, kept: list[int], num_rows: int, most: int) -> Tensor:
    """Decode one text in text 1 of 3, with `kept[i]` rows of block i accepted, and wrong rows after them."""
    store = memory(3, most + 2 * num_rows)
    device, outs, state_len, length = rows.device, [], 0, 0
    for count in kept:
        index = torch.arange(length, length + num_rows, device=device)
        wrong = torch.arange(num_rows, device=device) >= count
        # Rows that will be rejected hold other values.
        block = torch.where(wrong[:, None], -7.0 * rows[index % len(rows)].flip(0), rows[index % len(rows)])
        lens = torch.tensor([[1], [state_len], [length]], device=device)
        outs.append(run(block, part(gates, index % len(rows)), store, BlockTexts(*lens), most)[:count])
        state_len = length if length - state_len > most else state_len
        length += count
    assert store.states[0].abs().max() == store.states[2].abs().max() == 0
    return torch.cat(outs)


AT_ONCE = pytest.param(delta_blocks, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"))


@pytest.mark.parametrize("run", [*IMPLEMENTATIONS, AT_ONCE])
@pytest.mark.parametrize(
    ("kept", "most"),
    [
        ([1, 5, 2, 3, 1, 4, 5, 1], 3),
        ([5] * 4, 0),
        ([1] * 12, 9),
        *(
            pytest.param(kept, most, marks=pytest.mark.slow)
            for kept, others in (([1, 5, 2, 3, 1, 4, 5, 1], (0, 9)), ([5] * 4, (3, 9)), ([1] * 12, (0, 3)))
            for most in others
        ),
    ],
)
def test_blocks_equal_the_rule_whatever_is_rejected(run: Any, kept: list[int], most: int) -> None:
    rows, gates = inputs(sum(kept) + 5)
    found = run_blocks(run, rows, gates, kept, 5, most)
    assert_rows_close(found, definition(rows[: sum(kept)], part(gates, torch.arange(sum(kept)))), torch.float32)


TREES = [pytest.param(delta_blocks_ref, marks=pytest.mark.reference), AT_ONCE]


@pytest.mark.parametrize("run", TREES)
@pytest.mark.parametrize("num_nodes", [6, 20])
def test_rows_of_a_tree_equal_the_rule_along_their_paths(run: Any, num_nodes: int) -> None:
    """Two steps of one text beside another: the second tree replays the moved records of the first tree's path."""
    num_rows, tree = num_nodes + 1, random_tree_rows(2, num_nodes, seed=num_nodes)
    rows, gates = inputs(4 * num_rows)
    store, texts, seen = memory(3, 3 + 2 * num_rows), [2, 0], is_ancestor(tree.words)
    lens, paths = [0, 0], [torch.zeros(0, dtype=torch.int64, device=rows.device)] * 2
    for step in range(2):
        own = torch.arange(2 * num_rows * step, 2 * num_rows * (step + 1), device=rows.device)
        ints = torch.tensor([texts, [0, 0], lens], device=rows.device)
        found = run(rows[own], part(gates, own), store, BlockTexts(*ints), 3, tree=tree)
        for request in range(2):
            first = 2 * num_rows * step + request * num_rows
            for row in range(num_rows):
                path = torch.cat((paths[request], first + seen[request, row].nonzero()[:, 0]))
                expected = definition(rows[path], part(gates, path))[-1]
                assert_rows_close(found[request * num_rows + row], expected, torch.float32)
        if step == 0:
            taken = [seen[request, num_rows - 1 - request].nonzero()[:3, 0] for request in range(2)]
            paths, lens = [request * num_rows + taken[request] for request in range(2)], [3, 3]
            moved = PathRecords(ints[0], ints[2], torch.stack(taken), torch.stack(taken))
            for records in store[1:]:
                move_records_ref(records[None], moved)


PRODUCT_BITS = 21
"""Bits of a float32 number that three tf32 products keep."""

MOST_ROUNDINGS = 16
"""The reference in float32 has up to 1.3, the kernel on an H200 up to 7.4."""


def two_blocks(run: Any, rows: Tensor, gates: Gates, tree: TreeRows) -> Tensor:
    """The results of two equal trees. The second tree replays the first six rows of the first tree."""
    num_requests, num_rows = tree.depths.shape
    store = memory(num_requests, 4 + 2 * num_rows, FLOAT64 if rows.dtype == FLOAT64 else torch.float32)
    texts, zeros = torch.arange(num_requests, device=rows.device), torch.zeros_like(tree.depths[:, 0])
    return torch.stack(
        [run(rows, gates, store, BlockTexts(texts, zeros, lens), 4, tree=tree) for lens in (zeros, zeros + 6)]
    )


def nudged(item: Tensor, seed: int) -> Tensor:
    """In float64, each number changed by up to one unit in the last of PRODUCT_BITS bits."""
    generator = torch.Generator().manual_seed(seed)
    noise = 2 * torch.rand(item.shape, generator=generator, dtype=FLOAT64) - 1
    return item.double() * (1 + 2.0**-PRODUCT_BITS * noise.to(item.device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_requests", "num_nodes"), [(1, 8), (4, 16), (4, 32), (1, 63)])
def test_trees_of_real_sizes_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, num_nodes: int, dtype: torch.dtype
) -> None:
    """Heads as in Qwen3.5-4B. The second block replays the first rows of the first tree.

    In float32, summands of some rows cancel. A row's error is at most MOST_ROUNDINGS times the change of the exact row
    when each input is rounded to PRODUCT_BITS bits.
    """
    for name, value in (("HEADS", 32), ("KEYS", 16), ("VALUE", 128), ("KEY", 128), ("WIDTH", 64 * 128)):
        monkeypatch.setitem(globals(), name, value)
    tree = random_tree_rows(num_requests, num_nodes, seed=num_nodes)
    rows, gates = inputs(num_requests * (num_nodes + 1), dtype)
    found = two_blocks(delta_blocks, rows, gates, tree)
    if dtype == torch.bfloat16:
        assert_rows_close(found, two_blocks(delta_blocks_ref, rows, gates, tree), dtype)
        return
    exact = two_blocks(delta_blocks_ref, rows.double(), Gates(*(item.double() for item in gates)), tree)
    changes = []
    for seed in range(3):
        near = Gates(*(nudged(item, seed) for item in gates))
        changes.append((two_blocks(delta_blocks_ref, nudged(rows, seed), near, tree) - exact).norm(dim=-1))
    errors = (found - exact).norm(dim=-1) / torch.stack(changes).amax(0)
    assert errors.max() <= MOST_ROUNDINGS, errors.max()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_blocks_are_bitwise_equal_to_one_row_at_a_time(run: Any) -> None:
    rows, gates = inputs(24)
    alone = run_blocks(run, rows, gates, [1] * 16, 1, 0)
    for most, kept in ((0, [4] * 4), (6, [1, 3, 4, 2, 4, 2])):
        assert torch.equal(run_blocks(run, rows, gates, kept, 4, most), alone)


@pytest.mark.parametrize("run", [*IMPLEMENTATIONS, AT_ONCE])
@pytest.mark.parametrize(("heads", "keys"), [(2, 2), (3, 1)])
def test_value_heads_per_key_head(run: Any, heads: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value head of each key head stores the key, also if every key head has one value head."""
    for name, value in (("HEADS", heads), ("KEYS", keys), ("WIDTH", 2 * keys * KEY + heads * VALUE)):
        monkeypatch.setitem(globals(), name, value)
    rows, gates = inputs(12)
    found = run_blocks(run, rows, gates, [2, 1, 3], 3, 0)
    assert_rows_close(found, definition(rows[:6], part(gates, torch.arange(6))), torch.float32)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_decays_of_every_size(run: Any) -> None:
    """Softplus has three cases: near zero, above 20, and between. Each counts in a head whose rate fits it."""
    rows, gates = inputs(16)
    steps = torch.linspace(-1.0, 1.0, 16, device=rows.device)
    decay = steps[:, None] * torch.tensor([60.0, 25.0, 8.0, 8.0], device=rows.device)
    rate = torch.tensor([-5.0, -4.0, 4.6, 0.0], device=rows.device)
    gates = gates._replace(decay=decay, log_rate=rate, bias=torch.zeros_like(rate))
    found = run_blocks(run, rows, gates, [4, 1, 3, 4], 4, 0)
    assert_rows_close(found, definition(rows[:12], part(gates, torch.arange(12))), torch.float32)
