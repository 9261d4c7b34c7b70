"""Chunks of prompts equal the gated delta rule row by row, from zeros or from the state of their text."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment
from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.recurrent.delta_prompts import PromptChunks, chunk_ints, delta_prompts, delta_prompts_ref, even
from dflash_kernels.recurrent.delta_rule import Gates, empty_states, gate_values, state_tiles, whole_states
from dflash_testing.tensors import DEVICE, DTYPES, assert_rows_close, normal

IMPLEMENTATIONS = [
    pytest.param(delta_prompts_ref, marks=pytest.mark.reference),
    pytest.param(delta_prompts, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]
SMALL, WHOLE = (4, 2, 24, 16), (2, 1, 128, 128)
"""Value heads, key heads, and sizes of a value and a key."""

Sizes = tuple[int, int, int, int]


def inputs(count: int, sizes: Sizes, dtype: torch.dtype, rate: float = -2.0) -> tuple[Tensor, Gates]:
    heads, groups, value, key = sizes
    rows = normal(count, 2 * groups * key + heads * value, dtype=dtype)
    gates = Gates(
        normal(count, heads, dtype=dtype, seed=1), normal(count, heads, dtype=dtype, seed=2),
        normal(heads, seed=3) + rate, normal(heads, seed=4),
    )  # fmt: skip
    return rows, gates


def definition(rows: Tensor, gates: Gates, state: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The rule row by row in float64, from a state [H, K, V] -> [T, H, V] and the state after it."""
    heads, key, value = state.shape
    query, keys, values = rows.double().split((groups * key, groups * key, heads * value), -1)
    query, keys = (torch.nn.functional.normalize(item.view(-1, groups, key), dim=-1) for item in (query, keys))
    query, keys = (item.repeat_interleave(heads // groups, 1) for item in (query * key**-0.5, keys))
    decays, betas = gate_values(gates, torch.float64)
    state, outs = state.double(), []
    for row in range(len(rows)):
        state = state * decays[row].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, keys[row])
        delta = betas[row][:, None] * (values[row].view(heads, value) - read)
        state = state + torch.einsum("hk,hv->hkv", keys[row], delta)
        outs.append(torch.einsum("hkv,hk->hv", state, query[row]))
    return torch.stack(outs), state


def cut(
    segments: list[Segment], num_chunks: int | None = None, num_pieces: int | None = None, padding_text: int = 0
) -> PromptChunks:
    ints = chunk_ints(segments, num_chunks, num_pieces, padding_text)
    return PromptChunks.cut(torch.tensor(ints, device=DEVICE), num_chunks or len(segments))


def rows_of(gates: Gates, begin: int, end: int) -> Gates:
    return Gates(gates.decay[begin:end], gates.beta[begin:end], gates.log_rate, gates.bias)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "lens"),
    [(SMALL, [1, 65, 64, 130]), pytest.param(WHOLE, [63, 129], marks=pytest.mark.slow)],
    ids=["small", "whole"],
)
def test_chunks_equal_the_rule(run: Any, dtype: torch.dtype, sizes: Sizes, lens: list[int]) -> None:
    """Every other chunk continues its text. Padding after the last chunk, and padding chunks, change nothing."""
    heads, groups, value, key = sizes
    rows, gates = inputs(sum(lens) + 7, sizes, dtype)
    states = state_tiles(normal(6, heads, key, value, seed=5) / 4).contiguous()
    kept, firsts = states.clone(), [sum(lens[:index]) for index in range(len(lens))]
    segments = [
        Segment(first, count, 9 * (index % 2), 4 - index)
        for index, (first, count) in enumerate(zip(firsts, lens, strict=True))
    ]
    out = torch.full((len(rows), heads, value), 7.0, dtype=dtype, device=DEVICE)
    assert run(rows, gates, states, groups, cut(segments, even(len(lens)) + 2, 12, 5), out) is out
    for segment in segments:
        begin, end = segment.first_row, segment.first_row + segment.num_rows
        before = whole_states(kept[segment.table_row], value) * (segment.context_len > 0)
        expected, state = definition(rows[begin:end], rows_of(gates, begin, end), before, groups)
        assert_rows_close(out[begin:end].flatten(1), expected.flatten(1), dtype)
        found = whole_states(states[segment.table_row], value).double()
        assert (found - state).norm() <= (1e-5 if dtype == torch.float32 else 1e-3) * state.norm()
    assert bool((out[sum(lens) :] == 7.0).all())
    untouched = [text for text in range(6) if text not in {segment.table_row for segment in segments}]
    assert torch.equal(states[untouched], kept[untouched])


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("rate", [-9.0, 3.0], ids=["states that last", "states that decay at once"])
def test_equal_keys_do_not_spoil_the_inverse(run: Any, rate: float) -> None:
    """With one repeated token all keys are equal, which is the hardest system of a piece."""
    rows, gates = inputs(100, SMALL, torch.float32, rate)
    heads, groups, value, key = SMALL
    rows[:, : 2 * groups * key] = rows[:1, : 2 * groups * key]
    gates = gates._replace(beta=gates.beta.abs() + 6.0)
    states = empty_states(1, heads, key, value, torch.float32, DEVICE)
    found = run(rows, gates, states, groups, cut([Segment(0, 100, 0, 0)]))
    expected, _ = definition(rows, gates, torch.zeros((heads, key, value), device=DEVICE), groups)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 1e-5


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_a_prompt_in_chunks_equals_the_whole_prompt(run: Any) -> None:
    heads, groups, value, key = SMALL
    rows, gates = inputs(150, SMALL, torch.float32)
    whole, parts = (empty_states(1, heads, key, value, torch.float32, DEVICE) for _ in range(2))
    expected = run(rows, gates, whole, groups, cut([Segment(0, 150, 0, 0)]))
    for begin, end in ((0, 70), (70, 71), (71, 150)):
        chunk = cut([Segment(0, end - begin, begin, 0)])
        found = run(rows[begin:end], rows_of(gates, begin, end), parts, groups, chunk)
        assert_rows_close(found.flatten(1), expected[begin:end].double().flatten(1), torch.float32)
    found, expected = (whole_states(item, value).flatten(2) for item in (parts, whole.double()))
    assert_rows_close(found, expected, torch.float32)
