"""The convolution along texts equals one over the whole text, whatever rows are rejected or come in chunks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.drafts.draft_tree import is_ancestor
from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.recurrent.recent_conv import RowRuns, recent_conv, recent_conv_ref
from dflash_kernels.recurrent.tree_conv import tree_conv, tree_conv_ref
from dflash_testing.random_trees import random_tree_rows
from dflash_testing.tensors import DEVICE, DTYPES, assert_rows_close, normal, whole

WIDTH, TAPS, BLOCK, TEXTS = 40, 4, 5, 3
IMPLEMENTATIONS = [
    pytest.param(recent_conv_ref, marks=pytest.mark.reference),
    pytest.param(recent_conv, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]


def definition(rows: Tensor, weight: Tensor) -> Tensor:
    """The convolution of one text [T, C] in float64."""
    padded = functional.pad(rows.double().T, (TAPS - 1, 0))
    return functional.silu(functional.conv1d(padded[None], weight.double().T[:, None], groups=WIDTH)[0].T)


def poisoned(dtype: torch.dtype) -> Tensor:
    return torch.full((TEXTS, BLOCK + TAPS - 1, WIDTH), torch.nan, dtype=dtype, device=DEVICE)


def wider(rows: Tensor) -> Tensor:
    """The same rows as a view of wider rows, as in a joined product."""
    return torch.cat((rows, torch.full_like(rows[:, :8], torch.nan)), 1)[:, : rows.shape[1]]


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [[5] * 5, [1] * 9, [2, 5, 1, 3, 1, 4]], ids=str)
def test_blocks_of_which_some_rows_are_kept(run: Any, dtype: torch.dtype, kept: list[int]) -> None:
    """Two texts at once. The second one is two rows ahead."""
    texts, weight = normal(2, 50, WIDTH, dtype=dtype), normal(TAPS, WIDTH, dtype=dtype, seed=1)
    ring, lens = poisoned(dtype), [0, 2]
    run(texts[1, :2], weight, ring, RowRuns(whole(2), whole(0), whole(0), whole(2), whole(0, 0)))
    expected = [definition(text, weight) for text in texts]
    for count in kept:
        rows = torch.cat([text[begin : begin + BLOCK] for text, begin in zip(texts, lens, strict=True)])
        is_wrong = torch.arange(len(rows), device=DEVICE) % BLOCK >= count
        rows = torch.where(is_wrong[:, None], -7 * rows.flip(0), rows)
        out = run(wider(rows), weight, ring, RowRuns(whole(0, 2), whole(*lens)))
        for text, begin in enumerate(lens):
            found = out[text * BLOCK : text * BLOCK + count]
            assert_rows_close(found, expected[text][begin : begin + count], dtype)
        lens = [begin + count for begin in lens]


TREE_IMPLEMENTATIONS = [
    pytest.param(tree_conv_ref, marks=pytest.mark.reference),
    pytest.param(tree_conv, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]


@pytest.mark.parametrize("run", TREE_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_tree_are_convolved_along_their_paths(run: Any, dtype: torch.dtype) -> None:
    """Two trees of 21 rows: after no row of the text, and after 30 rows, where the ring of 24 wraps around."""
    lens, num_rows = [0, 30], 21
    weight, tree = normal(TAPS, WIDTH, dtype=dtype, seed=1), random_tree_rows(2, num_rows - 1, seed=2)
    ring = torch.full((TEXTS, num_rows + TAPS - 1, WIDTH), torch.nan, dtype=dtype, device=DEVICE)
    texts, rows = normal(2, 30, WIDTH, dtype=dtype), normal(2, num_rows, WIDTH, dtype=dtype, seed=3)
    for position in range(lens[1] - TAPS + 1, lens[1]):
        ring[2, position % ring.shape[1]] = texts[1, position]
    out = run(wider(rows.flatten(0, 1)), weight, ring, RowRuns(whole(0, 2), whole(*lens)), tree)
    seen = is_ancestor(tree.words)
    for request, length in enumerate(lens):
        for row in range(num_rows):
            path = torch.cat((texts[request, :length], rows[request, seen[request, row]]))
            one = out[request * num_rows + row]
            assert_rows_close(one[None], definition(path, weight)[-1:], dtype)
            assert torch.equal(ring[(0, 2)[request], (length + row) % ring.shape[1]], rows[request, row])


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("lens", [[3, 1, 20], [265]], ids=str)
def test_chunks_of_prompts(run: Any, lens: list[int]) -> None:
    """Every text comes in two chunks, and more rows of padding follow than a ring has. A block continues the last."""
    num_padding = BLOCK + TAPS
    weight = normal(TAPS, WIDTH, seed=1)
    texts = [normal(2 * count + BLOCK, WIDTH, seed=count) for count in lens]
    expected, ring = [definition(text, weight) for text in texts], poisoned(torch.float32)
    starts = [0] * len(lens)
    for extra in (0, 1):
        counts = [count + extra for count in lens]
        firsts = [sum(counts[:index]) for index in range(len(lens))]
        chunks = [text[begin : begin + count] for text, begin, count in zip(texts, starts, counts, strict=True)]
        rows = torch.cat((*chunks, normal(num_padding, WIDTH, seed=9)))
        of_rows = [index for index, count in enumerate(counts) for _ in range(count)] + [len(lens) - 1] * num_padding
        runs = RowRuns(whole(*range(len(lens))), *(whole(*item) for item in (starts, firsts, counts, of_rows)))
        out = run(wider(rows), weight, ring, runs)
        for index, (first, count, begin) in enumerate(zip(firsts, counts, starts, strict=True)):
            assert_rows_close(out[first : first + count], expected[index][begin : begin + count], torch.float32)
        starts = counts if not extra else [one + two for one, two in zip(starts, counts, strict=True)]
    last, begin = len(lens) - 1, starts[-1]
    rows = torch.cat((texts[last][begin:], texts[last][:BLOCK]))[:BLOCK]
    out = run(rows, weight, ring, RowRuns(whole(last), whole(begin)))
    count = len(texts[last]) - begin
    assert_rows_close(out[:count], expected[last][begin:], torch.float32)
    assert bool(ring[len(lens) :].isnan().all())
