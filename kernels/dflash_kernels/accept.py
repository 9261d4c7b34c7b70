"""How many drafted tokens the target agrees with.

Axis letters: R requests, N block rows, K drafted tokens (N - 1).
"""

import torch
from torch import Tensor


def accept_ref(draft_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the longest prefix of drafted tokens that equals the target's own choices.

    draft_ids   [R, K] int64
    target_ids  [R, N] int64   row i is the target's choice for the token after row i of the block
    Returns num_accepted [R] int64 (bonus excluded) and bonus_ids [R] int64, the target's token after them.

    With greedy choices this is greedy verification. With `target_ids` sampled from the target it is rejection sampling
    of a one-hot draft: P(accept d) = p(d), and given rejection the kept token follows p without d, renormalised.
    Source: Leviathan et al. 2023, algorithm 1, with q one-hot.
    """
    is_match = draft_ids == target_ids[:, :-1]
    num_accepted = is_match.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return num_accepted, target_ids.gather(1, num_accepted[:, None])[:, 0]
