"""The gated delta rule in chunks, for training: transformers' PyTorch code of some releases loops over every row.

Axis letters: B sequences, T positions, N chunks, C rows of a chunk, K key heads, V value heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor | None]:
    """`_gated_delta_rule` in fp32: states add up over a text, and autocast would round them at each chunk."""
    with torch.autocast(query.device.type, enabled=False):
        return _gated_delta_rule(query, key, value, **named)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Query and key [B, T, K, D], value [B, T, V, D], log decays and strengths [B, T, V] -> [B, T, V, D] and the state.

    Queries and keys are normalised here. The arguments have the names of transformers' function of the same purpose.
    Source: Gated Delta Networks, arXiv 2412.06464, section 3.3.
    """
    length, groups = query.shape[1], value.shape[2] // query.shape[2]
    kind, missing = query.dtype, -length % CHUNK

    def chunks(rows: Tensor) -> Tensor:
        parts: Tensor = F.pad(rows.float(), (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, CHUNK))
        return parts.permute(0, 3, 1, 2, 4)

    query, key = (F.normalize(chunks(rows.repeat_interleave(groups, 2)), dim=-1, eps=1e-6) for rows in (query, key))
    query, value, strength = query * query.shape[-1] ** -0.5, chunks(value), chunks(beta[..., None])
    decay = chunks(g[..., None])[..., 0].cumsum(-1)  # [B, V, N, C]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    mixing = (strength * key @ key.transpose(-1, -2)) * between
    written = torch.cat((strength * value, strength * key * decay.exp()[..., None]), -1)
    # The diagonal is taken as one. Each row's write is corrected for the writes of the rows before it.
    written = torch.linalg.solve_triangular(mixing, written, upper=False, unitriangular=True)
    fresh, read = written.split((value.shape[-1], key.shape[-1]), -1)
    inside = (query @ key.transpose(-1, -2)) * between
    asking, keeping = query * decay.exp()[..., None], key * (decay[..., -1:] - decay).exp()[..., None]
    state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for index in range(query.shape[2]):
        added = fresh[:, :, index] - read[:, :, index] @ state
        outputs.append(asking[:, :, index] @ state + inside[:, :, index] @ added)
        state = state * decay[:, :, index, -1, None, None].exp() + keeping[:, :, index].transpose(-1, -2) @ added
    result = torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]
    return result.to(kind), state if output_final_state else None


def use_chunks() -> None:
    """Let Qwen3.5 models that are built from now on train with this function."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    vars(modeling_qwen3_5)["torch_chunk_gated_delta_rule"] = gated_delta_rule
