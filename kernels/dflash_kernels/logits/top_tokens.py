"""The best tokens of each row of logits, in two launches: candidates for a walk over a block, and for a tree.

The first launch reads the logits once and finds the highest logit of each small group of tokens. The k-th highest of
these is a lower bound of the k-th highest logit. So the best tokens are in few groups: the groups above the bound,
fewer than k, and the first k groups at the bound. The second launch reads only these groups. For log-probabilities, the
first launch also adds up the weights of each tile of tokens.

Axis letters: T rows, V vocabulary, G groups.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, power_of_2, require, tl
from dflash_kernels.launch_config import VOCAB_GROUP, argmax_shape
from dflash_kernels.logits.candidates import KEY_BITS, kth_key, score_keys
from dflash_kernels.logits.largest_probability import largest_probability_ref, tile_weights, weight_of_tiles
from dflash_kernels.logits.logit_tiles import check_logits, load_raw, without_nans

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


def likely_tokens_ref(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens with the `count` highest logits of each row in descending order, and their log-probabilities.

    logits  [T, V]
    Equal logits rank by id, as in `argmax`. If a logit of a row is NaN or +inf, all its log-probabilities are NaN.
    Returns [T, count] int64, and [T, count] float32, or float64 for such logits.
    """
    token_ids, values = top_tokens_ref(logits, count)
    values = values.to(torch.promote_types(logits.dtype, torch.float32))
    # Ids ascend, so a stable order ranks equal logits by id.
    values, order = values.sort(dim=1, descending=True, stable=True)
    best = largest_probability_ref(logits).probabilities.log()
    return token_ids.gather(1, order), values - values[:, :1] + best[:, None]


@jit
def _group_keys_kernel(
    logits, group_keys, tile_maxes, tile_sums, vocab_size, row_stride, num_groups,
    KEY_BITS: tl.constexpr, TILE_V: tl.constexpr, GROUP: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    raw = load_raw(logits + row * row_stride, tile * TILE_V + tl.arange(0, TILE_V), vocab_size)
    maxes = tl.max(tl.reshape(without_nans(raw), (TILE_V // GROUP, GROUP)), 1)
    group = tile * (TILE_V // GROUP) + tl.arange(0, TILE_V // GROUP)
    tl.store(group_keys + row * num_groups + group, score_keys(maxes, KEY_BITS), mask=group < num_groups)
    if tile_sums is not None:
        place = row * tl.num_programs(1) + tile
        highest = tl.max(maxes, 0)
        tl.store(tile_maxes + place, highest)
        tl.store(tile_sums + place, tile_weights(raw, highest))


@jit
def _best_groups(keys, is_group, count, low, KEY_BITS: tl.constexpr):
    """Return which groups may have one of the `count` best tokens, and a lower bound of these tokens' keys."""
    bound = kth_key(keys, count, low, tl.max(keys, 0).to(tl.int64) + 1)
    is_tied = is_group & (keys == bound.to(tl.int32))
    # Each group at the bound has a token at the bound, so later groups at the bound are not needed.
    is_first = tl.cumsum(is_tied.to(tl.int32), 0) <= count
    return is_group & ((keys > bound.to(tl.int32)) | (is_tied & is_first)), bound


@jit
def _rank(
    token_ids, values, tile_maxes, tile_sums, num_tiles,
    COUNT: tl.constexpr, TILE_C: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """Order one row's tokens by descending logits, and replace the logits by log-probabilities."""
    highest, weight, is_finite = weight_of_tiles(tile_maxes, tile_sums, num_tiles, TILE_T)
    place = tl.arange(0, TILE_C)
    tl.debug_barrier()  # each thread reads entries that other threads have written
    token = tl.load(token_ids + place, mask=place < COUNT, other=0)
    score = tl.load(values + place, mask=place < COUNT, other=float("-inf"))
    others = tl.reshape(score, (1, TILE_C))
    # Ids ascend, so of equal logits the earlier ones rank first.
    is_before = (others > score[:, None]) | ((others == score[:, None]) & (place[None, :] < place[:, None]))
    rank = tl.sum(is_before.to(tl.int32), 1)
    tl.debug_barrier()  # no thread writes entries that others have not read
    log_prob = tl.where(is_finite, score - highest - tl.log(weight), float("nan"))
    tl.store(token_ids + rank, token, mask=place < COUNT)
    tl.store(values + rank, log_prob, mask=place < COUNT)


@jit
def _top_tokens_kernel(
    logits, group_keys, tile_maxes, tile_sums, lists, token_ids, values, vocab_size, row_stride, num_groups, num_tiles,
    COUNT: tl.constexpr, KEY_BITS: tl.constexpr, GROUP: tl.constexpr, TILE_G: tl.constexpr, TILE_L: tl.constexpr,
    TILE_C: tl.constexpr, TILE_T: tl.constexpr, IS_EARLY: tl.constexpr,
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
    if tile_sums is not None:
        _rank(
            token_ids + row * COUNT, values + row * COUNT, tile_maxes + row * num_tiles, tile_sums + row * num_tiles,
            num_tiles, COUNT, TILE_C, TILE_T,
        )  # fmt: skip


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `top_tokens_ref` in two launches, or by a library for more than MOST_TOP_TOKENS tokens."""
    _check(logits, count)
    return top_tokens_ref(logits, count) if count > MOST_TOP_TOKENS else _launch(logits, count, logits.dtype)


def likely_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `likely_tokens_ref` in two launches, or by a library for more than MOST_TOP_TOKENS tokens."""
    _check(logits, count)
    return likely_tokens_ref(logits, count) if count > MOST_TOP_TOKENS else _launch(logits, count, torch.float32, True)


def _check(logits: Tensor, count: int) -> None:
    check_logits(logits)
    require(0 < count <= logits.shape[1], "count", "from 1 to the size of the vocabulary")


def _launch(logits: Tensor, count: int, dtype: torch.dtype, is_ranked: bool = False) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty((num_rows, count), dtype=torch.int64, device=logits.device)
    values = torch.empty((num_rows, count), dtype=dtype, device=logits.device)
    if num_rows:
        num_groups, shape = ceil_div(vocab_size, VOCAB_GROUP), argmax_shape(num_rows)
        tile_g, options = power_of_2(num_groups), early(logits.device)
        tile, listed = min(shape.tile, tile_g * VOCAB_GROUP), min(power_of_2(2 * count), tile_g)
        num_tiles = ceil_div(vocab_size, tile)
        group_keys = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
        lists = torch.empty((num_rows, listed), dtype=torch.int32, device=logits.device)
        # Of a tile's logits: the highest one, and the sum of weights relative to it.
        size = num_rows, num_tiles
        parts = [torch.empty(size, dtype=torch.float32, device=logits.device) if is_ranked else None for _ in range(2)]
        _group_keys_kernel[(num_rows, num_tiles)](
            logits, group_keys, *parts, vocab_size, logits.stride(0), num_groups,
            KEY_BITS=KEY_BITS[logits.dtype], TILE_V=tile, GROUP=VOCAB_GROUP, num_warps=shape.num_warps, **options,
        )  # fmt: skip
        _top_tokens_kernel[(num_rows,)](
            logits, group_keys, *parts, lists, token_ids, values, vocab_size, logits.stride(0), num_groups, num_tiles,
            COUNT=count, KEY_BITS=KEY_BITS[logits.dtype], GROUP=VOCAB_GROUP, TILE_G=tile_g, TILE_L=listed,
            TILE_C=power_of_2(count), TILE_T=power_of_2(num_tiles), num_warps=8, **options,
        )  # fmt: skip
    return token_ids, values
