"""The best tokens of each row of logits, in two launches: candidates for a walk over a block.

The first launch reads the logits once and finds the highest logit of each small group of tokens. The k-th highest of
these is a lower bound of the k-th highest logit. So the best tokens are in few groups: those above the bound, of which
there are fewer than k, and the first k at the bound. The second launch reads only these groups.

Axis letters: T rows, V vocabulary, G groups.
"""

import torch
from torch import Tensor

from dflash_kernels.candidates import KEY_BITS, kth_key, score_keys
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch_config import VOCAB_GROUP, argmax_shape, ceil_div, jit, power_of_2, require, tl
from dflash_kernels.logit_tiles import check_logits, load_raw, without_nans

MOST_TOP_TOKENS = 64
"""Most tokens per row that the kernels find. A library finds more."""


def top_tokens_ref(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens with the `count` highest logits of each row in ascending order, and their logits.

    logits  [T, V]
    Among equal logits the lowest ids are chosen. NaN counts as -inf. Returns [T, count] int64 and [T, count].
    """
    clean = torch.where(logits.isnan(), -torch.inf, logits)
    least = clean.topk(count, dim=-1).values[:, -1:]
    is_above, is_tied = clean > least, clean == least
    needed = count - is_above.sum(-1, keepdim=True)
    is_kept = is_above | (is_tied & (is_tied.cumsum(-1) <= needed))
    vocab_size = logits.shape[-1]
    ids = torch.arange(vocab_size, device=logits.device)
    # Exactly `count` tokens are kept, so these are the kept ids in order, without waiting for the device.
    token_ids = torch.where(is_kept, ids, vocab_size).topk(count, dim=-1, largest=False, sorted=True).values
    return token_ids, clean.gather(-1, token_ids)


@jit
def _group_keys_kernel(
    logits, group_keys, vocab_size, row_stride, num_groups,
    KEY_BITS: tl.constexpr, TILE_V: tl.constexpr, GROUP: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores = without_nans(load_raw(logits + row * row_stride, tile * TILE_V + tl.arange(0, TILE_V), vocab_size))
    maxes = tl.max(tl.reshape(scores, (TILE_V // GROUP, GROUP)), 1)
    group = tile * (TILE_V // GROUP) + tl.arange(0, TILE_V // GROUP)
    tl.store(group_keys + row * num_groups + group, score_keys(maxes, KEY_BITS), mask=group < num_groups)


@jit
def _best_groups(keys, is_group, count, low, KEY_BITS: tl.constexpr):
    """Return which groups may have one of the `count` best tokens, and a lower bound of these tokens' keys."""
    bound = kth_key(keys, count, low, tl.max(keys, 0).to(tl.int64) + 1)
    is_tied = is_group & (keys == bound.to(tl.int32))
    # Each group at the bound has a token at the bound, so later groups at the bound are not needed.
    is_first = tl.cumsum(is_tied.to(tl.int32), 0) <= count
    return is_group & ((keys > bound.to(tl.int32)) | (is_tied & is_first)), bound


@jit
def _top_tokens_kernel(
    logits, group_keys, lists, token_ids, values, vocab_size, row_stride, num_groups,
    COUNT: tl.constexpr, KEY_BITS: tl.constexpr, GROUP: tl.constexpr, TILE_G: tl.constexpr, TILE_L: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, TILE_G)
    is_group = group < num_groups
    lowest = tl.full((), -(1 << (KEY_BITS - 1)), tl.int64)
    keys = tl.load(group_keys + row * num_groups + group, mask=is_group, other=0)
    is_listed, bound = _best_groups(tl.where(is_group, keys, lowest.to(tl.int32)), is_group, COUNT, lowest, KEY_BITS)
    rank = tl.cumsum(is_listed.to(tl.int32), 0)
    row_list = lists + row * TILE_L
    tl.store(row_list + rank - 1, group, mask=is_listed)
    num_listed = tl.max(rank, 0)
    tl.debug_barrier()  # each thread reads entries that other threads have written
    index = tl.arange(0, TILE_L * GROUP)
    is_read = index // GROUP < num_listed
    token = tl.load(row_list + index // GROUP, mask=is_read, other=0) * GROUP + index % GROUP
    is_token = is_read & (token < vocab_size)
    scores = without_nans(load_raw(logits + row * row_stride, tl.where(is_token, token, vocab_size), vocab_size))
    keys = tl.where(is_token, score_keys(scores, KEY_BITS), lowest.to(tl.int32))
    least = kth_key(keys, COUNT, bound, tl.max(keys, 0).to(tl.int64) + 1).to(tl.int32)
    is_above, is_tied = keys > least, is_token & (keys == least)
    needed = COUNT - tl.sum(is_above.to(tl.int32), 0)
    is_kept = is_above | (is_tied & (tl.cumsum(is_tied.to(tl.int32), 0) <= needed))
    place = row * COUNT + tl.cumsum(is_kept.to(tl.int32), 0) - 1
    tl.store(token_ids + place, token.to(tl.int64), mask=is_kept)
    tl.store(values + place, scores.to(values.dtype.element_ty), mask=is_kept)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `top_tokens_ref` in two launches, or by a library for more than MOST_TOP_TOKENS tokens."""
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    require(0 < count <= vocab_size, "count", "from 1 to the size of the vocabulary")
    if count > MOST_TOP_TOKENS:
        return top_tokens_ref(logits, count)
    token_ids = torch.empty((num_rows, count), dtype=torch.int64, device=logits.device)
    values = torch.empty((num_rows, count), dtype=logits.dtype, device=logits.device)
    if num_rows:
        num_groups, shape = ceil_div(vocab_size, VOCAB_GROUP), argmax_shape(num_rows)
        tile_g, options = power_of_2(num_groups), early(logits.device)
        tile, listed = min(shape.tile, tile_g * VOCAB_GROUP), min(power_of_2(2 * count), tile_g)
        group_keys = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
        lists = torch.empty((num_rows, listed), dtype=torch.int32, device=logits.device)
        _group_keys_kernel[(num_rows, ceil_div(vocab_size, tile))](
            logits, group_keys, vocab_size, logits.stride(0), num_groups,
            KEY_BITS=KEY_BITS[logits.dtype], TILE_V=tile, GROUP=VOCAB_GROUP, num_warps=shape.num_warps, **options,
        )  # fmt: skip
        _top_tokens_kernel[(num_rows,)](
            logits, group_keys, lists, token_ids, values, vocab_size, logits.stride(0), num_groups,
            COUNT=count, KEY_BITS=KEY_BITS[logits.dtype], GROUP=VOCAB_GROUP, TILE_G=tile_g, TILE_L=listed,
            num_warps=8, **options,
        )  # fmt: skip
    return token_ids, values
