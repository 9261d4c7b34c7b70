"""Verification of sampled draft tokens by rejection: committed tokens follow the target's distribution.

Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1.

The kernels compute probabilities from logits only where needed: at the draft tokens, and for the row of the first
rejection of each request. They never write a distribution.

Axis letters: R requests, N block rows, K draft tokens (N - 1), V vocabulary of the target, V' of the draft.
"""

import torch
from torch import Tensor

from dflash_kernels.launch import ceil_div, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.launch_config import VOCAB_TILE
from dflash_kernels.logits.candidates import KEY_BITS
from dflash_kernels.logits.categorical import categorical_ref, first_above
from dflash_kernels.logits.filters import probs_of
from dflash_kernels.logits.sampling import Distribution
from dflash_kernels.logits.uniform import ACCEPT, RESIDUAL, stream, uniform_ref, uniform_tile


def reject_ref(
    draft_ids: Tensor,
    sampled_ids: Tensor,
    target: Distribution | Tensor,
    draft: Distribution | Tensor,
    draft_places: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    max_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept each draft token with probability min(1, p / q), and sample the token after the accepted ones.

    draft_ids     [R, K] int64  samples of `draft` as target ids; negative ids are padding
    sampled_ids   [R, N] int64  the target's sample after each row, from `target`
    target        R * N rows    p; row i is the distribution of the token after row i of the block
    draft         R * K rows    q, the distribution that the draft sampled from, after temperature and filters
    draft_places  [V] int64     draft id of each target id, or -1; None if the vocabularies are equal
    seeds         [R] int64
    positions     [R] int64     position of the first draft token
    max_accepted  [R] int64     limit of accepted tokens
    Distributions have the form of `Chosen.distribution`.
    Returns num_accepted [R] int64 and target_ids [R, N] int64: the accepted tokens, one sample, then arbitrary ids.

    After a rejection, the sample comes from max(p - q, 0), renormalised, or from p if this residual is 0 everywhere. If
    all tokens up to the limit are accepted, the sample comes from p, because a limit is not a rejection. The accept
    decisions, the samples after a rejection and the target's samples use separate random streams.
    """
    assert isinstance(target, Tensor)
    assert isinstance(draft, Tensor)
    num_requests, num_drafts = draft_ids.shape
    p = target.view(num_requests, num_drafts + 1, -1).double()
    q = _over_target_ids(draft, draft_places).view(num_requests, num_drafts, -1).double()
    column = torch.arange(num_drafts, device=draft_ids.device)
    is_drafted = (draft_ids >= 0) & (column < max_accepted[:, None])
    limit = is_drafted.to(torch.int64).cumprod(1).sum(1)
    ids = draft_ids.clamp(min=0)[:, :, None]
    coins = uniform_ref(seeds[:, None].expand_as(draft_ids), positions[:, None] + column, ACCEPT)
    is_taken = coins * q.gather(2, ids)[:, :, 0] < p[:, :-1].gather(2, ids)[:, :, 0]
    num_accepted = (is_drafted & is_taken).to(torch.int64).cumprod(1).sum(1)

    request = torch.arange(num_requests, device=draft_ids.device)
    padded = torch.nn.functional.pad(q, (0, 0, 0, 1))
    residual = (p[request, num_accepted] - padded[request, num_accepted]).clamp(min=0)
    is_residual = (num_accepted < limit) & (residual.sum(1) > 0)
    after = categorical_ref(residual, uniform_ref(seeds, positions + num_accepted, RESIDUAL))
    column = torch.arange(num_drafts + 1, device=draft_ids.device)
    is_replaced = is_residual[:, None] & (column == num_accepted[:, None])
    ids = torch.where(is_replaced, after[:, None], sampled_ids)
    is_accepted = column < num_accepted[:, None]
    return num_accepted, torch.where(is_accepted, torch.nn.functional.pad(draft_ids, (0, 1)), ids)


def _over_target_ids(probs: Tensor, draft_places: Tensor | None) -> Tensor:
    """Map probabilities from draft ids to target ids: [R * K, V'] -> [R * K, V]."""
    if draft_places is None:
        return probs
    return torch.where(draft_places >= 0, probs[:, draft_places.clamp(min=0)], 0.0)


@jit
def _places_of(draft_places, token, vocab_size, draft_vocab_size, HAS_PLACES: tl.constexpr):
    """Return the draft ids of target ids. A target id without a draft id gives `draft_vocab_size`."""
    if HAS_PLACES:
        token = tl.load(draft_places + token, mask=token < vocab_size, other=-1)
        token = tl.where(token >= 0, token, draft_vocab_size)
    return token


@jit(do_not_specialize=["num_drafts"])
def _coins_kernel(
    draft_ids, sampled_ids, draft_places, seeds, positions, max_accepted, salt,
    target, target_temperatures, target_maxes, target_keys, target_last_ids, target_masses,
    draft, draft_temperatures, draft_maxes, draft_keys, draft_last_ids, draft_masses,
    num_accepted, is_rejected, target_ids, num_drafts, vocab_size, draft_vocab_size, target_stride, draft_stride,
    HAS_PLACES: tl.constexpr, TARGET_BITS: tl.constexpr, DRAFT_BITS: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE_N)
    drafted = tl.load(draft_ids + request * num_drafts + column, mask=column < num_drafts, other=-1)
    is_drafted = (drafted >= 0) & (column < tl.load(max_accepted + request))
    token = tl.where(is_drafted, drafted, vocab_size)
    # Columns without a draft token read any row of the request. Their token is after the vocabulary: probability 0.
    row = request * (num_drafts + 1) + tl.minimum(column, num_drafts)
    p = probs_of(
        target, row, token, tl.load(target_temperatures + request), target_maxes, target_keys, target_last_ids,
        target_masses, vocab_size, target_stride, TARGET_BITS,
    )  # fmt: skip
    row = request * num_drafts + tl.minimum(column, num_drafts - 1)
    place = _places_of(draft_places, token, vocab_size, draft_vocab_size, HAS_PLACES)
    q = probs_of(
        draft, row, place, tl.load(draft_temperatures + request), draft_maxes, draft_keys, draft_last_ids,
        draft_masses, draft_vocab_size, draft_stride, DRAFT_BITS,
    )  # fmt: skip
    coins = uniform_tile(tl.load(seeds + request), tl.load(positions + request) + column, salt)
    # A column that fails exists: TILE_N is larger than the number of draft tokens.
    limit = tl.min(tl.where(is_drafted, TILE_N, column), 0)
    accepted = tl.min(tl.where(is_drafted & (coins * q < p), TILE_N, column), 0)
    tl.store(num_accepted + request, accepted.to(tl.int64))
    tl.store(is_rejected + request, (accepted < limit).to(tl.int32))
    cell = request * (num_drafts + 1) + column
    sampled = tl.load(sampled_ids + cell, mask=column <= num_drafts, other=0)
    tl.store(target_ids + cell, tl.where(column < accepted, drafted, sampled), mask=column <= num_drafts)


@jit
def _residual_tile(
    request, column, num_drafts, token, draft_places,
    target, target_temperatures, target_maxes, target_keys, target_last_ids, target_masses,
    draft, draft_temperatures, draft_maxes, draft_keys, draft_last_ids, draft_masses,
    vocab_size, draft_vocab_size, target_stride, draft_stride,
    HAS_PLACES: tl.constexpr, TARGET_BITS: tl.constexpr, DRAFT_BITS: tl.constexpr,
):  # fmt: skip
    """Return a tile of the residual max(p - q, 0) of a request's row."""
    p = probs_of(
        target, request * (num_drafts + 1) + column, token, tl.load(target_temperatures + request), target_maxes,
        target_keys, target_last_ids, target_masses, vocab_size, target_stride, TARGET_BITS,
    )  # fmt: skip
    place = _places_of(draft_places, token, vocab_size, draft_vocab_size, HAS_PLACES)
    q = probs_of(
        draft, request * num_drafts + column, place, tl.load(draft_temperatures + request), draft_maxes, draft_keys,
        draft_last_ids, draft_masses, draft_vocab_size, draft_stride, DRAFT_BITS,
    )  # fmt: skip
    return tl.maximum(p - q, 0.0)


@jit(do_not_specialize=["num_drafts"])
def _residual_sums_kernel(
    num_accepted, is_rejected, tile_sums, num_tiles, num_drafts, draft_places,
    target, target_temperatures, target_maxes, target_keys, target_last_ids, target_masses,
    draft, draft_temperatures, draft_maxes, draft_keys, draft_last_ids, draft_masses,
    vocab_size, draft_vocab_size, target_stride, draft_stride,
    HAS_PLACES: tl.constexpr, TARGET_BITS: tl.constexpr, DRAFT_BITS: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """Store the sum of each tile of the residual after a rejection."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tl.load(is_rejected + request) == 0:
        return
    residual = _residual_tile(
        request, tl.load(num_accepted + request), num_drafts, tile * TILE_V + tl.arange(0, TILE_V), draft_places,
        target, target_temperatures, target_maxes, target_keys, target_last_ids, target_masses,
        draft, draft_temperatures, draft_maxes, draft_keys, draft_last_ids, draft_masses,
        vocab_size, draft_vocab_size, target_stride, draft_stride, HAS_PLACES, TARGET_BITS, DRAFT_BITS,
    )  # fmt: skip
    tl.store(tile_sums + request * num_tiles + tile, tl.sum(residual, 0))


@jit(do_not_specialize=["num_drafts"])
def _sample_residual_kernel(
    num_accepted, is_rejected, tile_sums, num_tiles, num_drafts, draft_places,
    target, target_temperatures, target_maxes, target_keys, target_last_ids, target_masses,
    draft, draft_temperatures, draft_maxes, draft_keys, draft_last_ids, draft_masses,
    vocab_size, draft_vocab_size, target_stride, draft_stride, seeds, positions, salt, target_ids,
    HAS_PLACES: tl.constexpr, TARGET_BITS: tl.constexpr, DRAFT_BITS: tl.constexpr,
    TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    if tl.load(is_rejected + request) == 0:
        return
    tiles = tl.arange(0, TILE_T)
    sums = tl.load(tile_sums + request * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    total = tl.sum(sums, 0)
    column = tl.load(num_accepted + request)
    # The residual is empty if p equals q. Then the target's sample stays.
    if total > 0:
        number = uniform_tile(tl.load(seeds + request), tl.load(positions + request) + column, salt)
        tile = first_above(sums, 0.0, number * total, TILE_T)
        before = tl.sum(tl.where(tiles < tile, sums, 0.0), 0)
        residual = _residual_tile(
            request, column, num_drafts, tile * TILE_V + tl.arange(0, TILE_V), draft_places,
            target, target_temperatures, target_maxes, target_keys, target_last_ids, target_masses,
            draft, draft_temperatures, draft_maxes, draft_keys, draft_last_ids, draft_masses,
            vocab_size, draft_vocab_size, target_stride, draft_stride, HAS_PLACES, TARGET_BITS, DRAFT_BITS,
        )  # fmt: skip
        chosen = tile * TILE_V + first_above(residual, before, number * total, TILE_V)
        tl.store(target_ids + request * (num_drafts + 1) + column, chosen.to(tl.int64))


def reject(
    draft_ids: Tensor,
    sampled_ids: Tensor,
    target: Distribution | Tensor,
    draft: Distribution | Tensor,
    draft_places: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    max_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `reject_ref` in three launches: accept decisions, sums of the residual, sample of the residual."""
    is_own = isinstance(target, Distribution) and isinstance(draft, Distribution)
    require(is_own, "target, draft", "distributions of the Triton kernels")
    assert isinstance(target, Distribution)
    assert isinstance(draft, Distribution)
    num_requests, num_drafts = draft_ids.shape
    values = seeds, positions, max_accepted
    _check(draft_ids, sampled_ids, target, draft, draft_places, values)
    draft_ids, sampled_ids = draft_ids.contiguous(), sampled_ids.contiguous()
    seeds, positions, max_accepted = (value.contiguous() for value in values)
    num_accepted = torch.empty(num_requests, dtype=torch.int64, device=draft_ids.device)
    is_rejected = torch.empty(num_requests, dtype=torch.int32, device=draft_ids.device)
    target_ids = torch.empty_like(sampled_ids)
    if not num_requests:
        return num_accepted, target_ids
    vocab_size, draft_vocab_size = target.logits.shape[1], draft.logits.shape[1]
    tile = min(VOCAB_TILE, power_of_2(vocab_size))
    num_tiles = ceil_div(vocab_size, tile)
    tile_sums = torch.empty((num_requests, num_tiles), dtype=torch.float64, device=draft_ids.device)
    places = draft_ids if draft_places is None else draft_places
    sizes = vocab_size, draft_vocab_size, target.logits.stride(0), draft.logits.stride(0)
    bits = {"TARGET_BITS": KEY_BITS[target.logits.dtype], "DRAFT_BITS": KEY_BITS[draft.logits.dtype]}
    bits["HAS_PLACES"] = draft_places is not None
    _coins_kernel[(num_requests,)](
        draft_ids, sampled_ids, places, seeds, positions, max_accepted, stream(ACCEPT), *target, *draft,
        num_accepted, is_rejected, target_ids, num_drafts, *sizes, **bits, TILE_N=power_of_2(num_drafts + 1),
        num_warps=1,
    )  # fmt: skip
    where = num_accepted, is_rejected, tile_sums, num_tiles, num_drafts, places, *target, *draft, *sizes
    _residual_sums_kernel[(num_requests, num_tiles)](*where, **bits, TILE_V=tile, num_warps=8)
    _sample_residual_kernel[(num_requests,)](
        *where, seeds, positions, stream(RESIDUAL), target_ids, **bits, TILE_V=tile, TILE_T=power_of_2(num_tiles),
        num_warps=8,
    )  # fmt: skip
    return num_accepted, target_ids


def _check(
    draft_ids: Tensor, sampled_ids: Tensor, target: Distribution, draft: Distribution, draft_places: Tensor | None,
    values: tuple[Tensor, ...],
) -> None:  # fmt: skip
    check_tensors(draft_ids, sampled_ids, *target, *draft, *values)
    num_requests, num_drafts = draft_ids.shape
    require(num_drafts > 0, "draft_ids", "at least one draft token per request")
    require(sampled_ids.shape == (num_requests, num_drafts + 1), "sampled_ids", "one more id than draft tokens")
    require(len(target.logits) == sampled_ids.numel(), "target", "one row per sampled id")
    require(len(draft.logits) == draft_ids.numel(), "draft", "one row per draft token")
    require(len(target.temperatures) == num_requests, "target", "one temperature per request")
    require(len(draft.temperatures) == num_requests, "draft", "one temperature per request")
    require(all(value.shape == (num_requests,) for value in values), "seeds, positions, limits", "one per request")
    require(all(ids.dtype == torch.int64 for ids in (draft_ids, sampled_ids, *values)), "ids, seeds, limits", "int64")
    if draft_places is None:
        require(target.logits.shape[1] == draft.logits.shape[1], "draft_places", "a map between two vocabularies")
    else:
        require(draft_places.shape == (target.logits.shape[1],), "draft_places", "one entry per target id")
