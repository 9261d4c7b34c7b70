"""Acceptance of a block: the number of accepted draft tokens, and the number of tokens to commit.

The kernels that commit tokens call `decide`: `step_rows.py`, and `row_changes.py` for first tokens.

Axis letters: R requests, N block rows, K draft tokens (N - 1), S stop ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import jit, tl


class Acceptance(NamedTuple):
    """The outcome of a step for each request."""

    num_accepted: Tensor
    """[R] int64, accepted draft tokens, without the bonus token."""
    num_committed: Tensor
    """[R] int64, committed tokens, after stop ids and limits."""
    last_ids: Tensor
    """[R] int64, the last committed token. -1 if the step commits no token."""
    is_stopped: Tensor
    """[R] bool, whether the last committed token is a stop id."""


def accept_block_ref(
    draft_ids: Tensor, target_ids: Tensor, max_accepted: Tensor, stop_ids: Tensor, remaining: Tensor
) -> Acceptance:
    """Return the acceptance of each request's block.

    A request commits its accepted draft tokens and the bonus token, up to its first stop id and its limit.

    draft_ids     [R, K] int64   negative ids are padding and never accepted
    target_ids    [R, N] int64   row i: the target's token after row i; the step has the first `num_accepted + 1`
    max_accepted  [R] int64      limit of accepted tokens, for requests that verify fewer draft tokens than the batch
    stop_ids      [R, S] int64   padded with -1
    remaining     [R] int64      tokens that the request may still commit
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
    """Compute `accept_block_ref` for one request.

    drafted, chosen  [TILE_N]   padded with -1
    stops            [TILE_S]   padded with -1
    Returns the number of accepted tokens, the number of committed tokens, the last committed token, and whether that
    token is a stop id.
    """
    position = tl.arange(0, TILE_N)
    is_match = (drafted == chosen) & (drafted >= 0)
    # The first position without a match. It exists: TILE_N is larger than the number of draft tokens.
    accepted = tl.min(tl.where(is_match, TILE_N, position), 0).to(tl.int64)
    accepted = tl.minimum(accepted, tl.maximum(max_accepted, 0))
    hits = (chosen[:, None] == stops[None, :]) & (stops >= 0)[None, :]
    is_stop = tl.max(hits.to(tl.int32), 1) > 0
    past_stop = tl.min(tl.where(is_stop, position + 1, TILE_N), 0)
    committed = tl.minimum(tl.minimum(accepted + 1, tl.maximum(remaining, 0)), past_stop)
    is_last = position == committed - 1
    last_id = tl.max(tl.where(is_last, chosen, -1), 0)
    return accepted, committed, last_id, tl.max((is_last & is_stop).to(tl.int32), 0) > 0
