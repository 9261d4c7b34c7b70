"""Verify sampled drafts by rejection, so that what is kept follows the target's distribution.

Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1.

Axis letters: R requests, N block rows, K drafted tokens (N - 1), V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.categorical import categorical_ref, launch_sample_probs
from dflash_kernels.launch_config import check_tensors, jit, power_of_2, require, tl
from dflash_kernels.uniform import ACCEPT, RESIDUAL, TARGET, stream, uniform_ref, uniform_tile


def reject_ref(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept each drafted token with probability min(1, p / q); sample what follows the accepted ones.

    draft_ids     [R, K] int64    sampled from `draft_probs`; negative where nothing was drafted
    target_probs  [R, N, V]       p; row i is the distribution of the token after row i of the block
    draft_probs   [R, K, V]       q, with its temperature and filters: the distribution the draft really sampled from
    seeds         [R] int64
    positions     [R] int64       position of the first drafted token
    max_accepted  [R] int64       drafts that may count
    Returns num_accepted [R] int64 and target_ids [R, N] int64: the accepted drafts, then one sample, then any
    valid ids.

    After a rejection the sample is from max(p - q, 0), renormalised, or from p where that is 0 everywhere. Where all
    drafts that may count are accepted it is from p itself: to stop at a limit is no rejection. The coin, the
    sample after a rejection and the bonus each have their own stream of random numbers.
    """
    num_requests, num_drafts = draft_ids.shape
    column = torch.arange(num_drafts, device=draft_ids.device)
    is_drafted = (draft_ids >= 0) & (column < max_accepted[:, None])
    limit = is_drafted.to(torch.int64).cumprod(1).sum(1)
    ids = draft_ids.clamp(min=0)[:, :, None]
    target = target_probs[:, :-1].gather(2, ids)[:, :, 0].double()
    draft = draft_probs.gather(2, ids)[:, :, 0].double()
    coins = uniform_ref(seeds[:, None].expand_as(draft_ids), positions[:, None] + column, ACCEPT)
    num_accepted = (is_drafted & (coins * draft < target)).to(torch.int64).cumprod(1).sum(1)

    request = torch.arange(num_requests, device=draft_ids.device)
    probs = target_probs[request, num_accepted].double()
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    residual = (probs - padded[request, num_accepted].double()).clamp(min=0)
    is_residual = (num_accepted < limit) & (residual.sum(1) > 0)
    last = positions + num_accepted
    numbers = torch.where(is_residual, uniform_ref(seeds, last, RESIDUAL), uniform_ref(seeds, last, TARGET))
    sampled = categorical_ref(torch.where(is_residual[:, None], residual, probs), numbers)
    ids = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)
    is_accepted = torch.arange(num_drafts + 1, device=ids.device) < num_accepted[:, None]
    return num_accepted, torch.where(is_accepted, ids, sampled[:, None])


@jit
def _coins_kernel(
    draft_ids, target_probs, draft_probs, seeds, positions, max_accepted, salt, num_accepted, is_residual, target_ids,
    num_drafts, vocab_size, TILE_N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE_N)
    drafted = tl.load(draft_ids + request * num_drafts + column, mask=column < num_drafts, other=-1)
    is_drafted = (drafted >= 0) & (column < tl.load(max_accepted + request))
    draft_row = request * num_drafts + column
    target_row = request * (num_drafts + 1) + column
    target = tl.load(target_probs + target_row * vocab_size + drafted, mask=is_drafted, other=0.0).to(tl.float64)
    draft = tl.load(draft_probs + draft_row * vocab_size + drafted, mask=is_drafted, other=0.0).to(tl.float64)
    coins = uniform_tile(tl.load(seeds + request), tl.load(positions + request) + column, salt)
    # There is a first column that fails, since TILE_N exceeds the number of drafts.
    limit = tl.min(tl.where(is_drafted, TILE_N, column), 0)
    accepted = tl.min(tl.where(is_drafted & (coins * draft < target), TILE_N, column), 0)
    tl.store(num_accepted + request, accepted.to(tl.int64))
    tl.store(is_residual + request, (accepted < limit).to(tl.int32))
    accepted_ids = tl.where(column < accepted, drafted, 0)
    tl.store(target_ids + target_row, accepted_ids, mask=column <= num_drafts)


def reject(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    """`reject_ref` in three launches: the coins, the sums of the distribution that decides, the sample."""
    check_tensors(draft_ids, target_probs, draft_probs, seeds, positions, max_accepted)
    num_requests, num_drafts = draft_ids.shape
    vocab_size = target_probs.shape[2]
    require(
        target_probs.shape == (num_requests, num_drafts + 1, vocab_size), "a target row for each draft and one more"
    )
    require(draft_probs.shape == (num_requests, num_drafts, vocab_size), "a draft row for each draft")
    rows = (seeds, positions, max_accepted)
    require(all(row.shape == (num_requests,) for row in rows), "one value a request")
    require(all(ids.dtype == torch.int64 for ids in (draft_ids, *rows)), "int64 ids, seeds, positions and limits")
    draft_ids, target_probs, draft_probs = draft_ids.contiguous(), target_probs.contiguous(), draft_probs.contiguous()
    seeds, positions, max_accepted = (row.contiguous() for row in rows)
    num_accepted = torch.empty(num_requests, dtype=torch.int64, device=draft_ids.device)
    is_residual = torch.empty(num_requests, dtype=torch.int32, device=draft_ids.device)
    target_ids = torch.empty((num_requests, num_drafts + 1), dtype=torch.int64, device=draft_ids.device)
    if num_requests:
        _coins_kernel[(num_requests,)](
            draft_ids, target_probs, draft_probs, seeds, positions, max_accepted, stream(ACCEPT),
            num_accepted, is_residual, target_ids, num_drafts, vocab_size,
            TILE_N=power_of_2(num_drafts + 1), num_warps=1,
        )  # fmt: skip
        launch_sample_probs(target_probs, draft_probs, num_accepted, is_residual, seeds, positions, TARGET, target_ids)
    return num_accepted, target_ids
