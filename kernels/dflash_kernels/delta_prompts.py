"""The gated delta rule over chunks of prompts, many rows at a time.

Within a piece of 64 rows the corrections solve a triangular system, so that a piece needs products of matrices and only
the pieces run one after another. The sums have another order than row by row, so results differ in the last bits.
Sources: arXiv 2412.06464; huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

Axis letters: T rows, H value heads, G key heads, V and K sizes of a value and a key, B texts, N rows of a piece,
C = 2 * G * K + H * V channels: queries, keys, values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_kernels.delta_rule import EPSILON, Gates, gate_values
from dflash_kernels.ragged_attention import Segment

PIECE = 64


def delta_prompts_ref(
    rows: Tensor, gates: Gates, states: Tensor, num_key_heads: int, chunks: Sequence[Segment]
) -> Tensor:
    """Run chunks of prompts from the states of their texts, and store the states after them.

    rows    [T, C]
    states  [B, H, V, K]   written; a chunk that begins its text starts from zeros
    Returns [T, H, V] in the dtype of `rows`.
    """
    wide = states.dtype
    _, num_heads, value_size, key_size = states.shape
    keys_width = num_key_heads * key_size
    query, keys, values = rows.to(wide).split((keys_width, keys_width, num_heads * value_size), -1)
    query, keys = (_unit(item.view(len(rows), -1, key_size), num_heads) for item in (query, keys))
    values = values.view(len(rows), num_heads, value_size)
    decays, betas = gate_values(gates, wide)
    parts = [query * key_size**-0.5, keys, values, decays, betas]
    out = torch.empty((len(rows), num_heads, value_size), dtype=rows.dtype, device=rows.device)
    for chunk in chunks:
        state = states[chunk.table_row] if chunk.context_len else torch.zeros_like(states[chunk.table_row])
        end = chunk.first_row + chunk.num_rows
        for begin in range(chunk.first_row, end, PIECE):
            piece = slice(begin, min(begin + PIECE, end))
            found, state = _piece(state, *(item[piece].transpose(0, 1) for item in parts))
            out[piece] = found.transpose(0, 1).to(rows.dtype)
        states[chunk.table_row] = state
    return out


def _unit(heads: Tensor, num_heads: int) -> Tensor:
    unit = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON)
    return unit.repeat_interleave(num_heads // heads.shape[1], 1)


def _piece(
    state: Tensor, query: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor
) -> tuple[Tensor, Tensor]:
    """One piece of rows from a state [H, V, K] -> outputs [H, N, V] and the state after it.

    query, keys [H, N, K], values [H, N, V], decays and betas [H, N].
    """
    total = decays.cumsum(-1)
    since = total[:, :, None] - total[:, None, :]  # the decay of row j until row i
    num_rows = since.shape[-1]
    is_before = torch.ones((num_rows, num_rows), dtype=torch.bool, device=state.device).tril()
    since = torch.where(is_before, since, -torch.inf).exp()
    pairs = (betas[:, :, None] * since * (keys @ keys.mT)).tril(-1)
    pairs = pairs + torch.eye(num_rows, dtype=state.dtype, device=state.device)
    decayed = total.exp()[:, :, None]
    wanted = betas[:, :, None] * (values - decayed * (keys @ state.mT))
    deltas = torch.linalg.solve_triangular(pairs, wanted, upper=False, unitriangular=True)
    outs = decayed * (query @ state.mT) + (since * (query @ keys.mT)) @ deltas
    left = (total[:, -1:] - total).exp()[:, :, None]
    return outs, total[:, -1, None, None].exp() * state + (left * deltas).mT @ keys
