"""How many drafted tokens the target agrees with, and how many tokens of the step are committed.

The decision is part of the launches that commit tokens: `step_rows.py`, and for first tokens `row_changes.py`.

Axis letters: R requests, N block rows, K drafted tokens (N - 1), S stop ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch_config import jit, tl


class Acceptance(NamedTuple):
    """What a step decided for each request."""

    num_accepted: Tensor
    """[R] int64, drafted tokens the target agrees with; the bonus is not counted."""
    num_committed: Tensor
    """[R] int64, tokens of the step that are committed, after stops and limits."""
    last_ids: Tensor
    """[R] int64, the last committed token, -1 where there is none."""
    is_stopped: Tensor
    """[R] bool, whether that token is a stop id."""


def accept_block_ref(
    draft_ids: Tensor, target_ids: Tensor, max_accepted: Tensor, stop_ids: Tensor, remaining: Tensor
) -> Acceptance:
    """Accept drafted tokens, add the bonus, then cut the step at its first stop id and at the number of tokens
    that remain.

    draft_ids     [R, K] int64   negative where nothing was drafted; such an id is never accepted
    target_ids    [R, N] int64   row i is the target's choice for the token after row i; the step's tokens are the first
                                 `num_accepted + 1` of them
    max_accepted  [R] int64      drafts that may count, for rows that drafted less than the batch
    stop_ids      [R, S] int64   padded with -1
    remaining     [R] int64      tokens the request may still take; 0 commits none
    """
    is_match = (draft_ids == target_ids[:, :-1]) & (draft_ids >= 0)
    num_accepted = is_match.to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_accepted = torch.minimum(num_accepted, max_accepted.clamp(min=0))
    position = torch.arange(target_ids.shape[1], device=target_ids.device)
    is_stop = ((target_ids[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :]).any(2)
    past_stop = torch.where(is_stop, position + 1, target_ids.shape[1]).amin(1)
    num_committed = torch.minimum(torch.minimum(num_accepted + 1, remaining.clamp(min=0)), past_stop)
    last = (num_committed - 1).clamp(min=0)[:, None]
    is_some = num_committed > 0
    last_ids = torch.where(is_some, target_ids.gather(1, last)[:, 0], -1)
    return Acceptance(num_accepted, num_committed, last_ids, is_some & is_stop.gather(1, last)[:, 0])


@jit
def decide(drafted, chosen, stops, max_accepted, remaining, TILE_N: tl.constexpr):
    """`accept_block_ref` for one request: drafted and chosen ids [TILE_N], -1 where there are none; stop ids [TILE_S].

    Returns how many drafts are accepted and tokens committed, the last of these, and whether it is a stop id.
    """
    position = tl.arange(0, TILE_N)
    is_match = (drafted == chosen) & (drafted >= 0)
    # The first position that does not match; there is one, since TILE_N exceeds the number of drafts.
    accepted = tl.min(tl.where(is_match, TILE_N, position), 0).to(tl.int64)
    accepted = tl.minimum(accepted, tl.maximum(max_accepted, 0))
    hits = (chosen[:, None] == stops[None, :]) & (stops >= 0)[None, :]
    is_stop = tl.max(hits.to(tl.int32), 1) > 0
    past_stop = tl.min(tl.where(is_stop, position + 1, TILE_N), 0)
    committed = tl.minimum(tl.minimum(accepted + 1, tl.maximum(remaining, 0)), past_stop)
    is_last = position == committed - 1
    last_id = tl.max(tl.where(is_last, chosen, -1), 0)
    return accepted, committed, last_id, tl.max((is_last & is_stop).to(tl.int32), 0) > 0
