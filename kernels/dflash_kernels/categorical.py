"""Sample a token from a distribution by inverting its cumulative sum in vocabulary order.

The kernels cut the vocabulary into tiles: one launch sums each tile, a second finds the tile in which the running sum
passes the level, and the token within it. Sums are in float64 and in a fixed order, so a sample repeats exactly.

Axis letters: T rows, R requests, N block rows, K drafted tokens, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import VOCAB_TILE, ceil_div, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.uniform import RESIDUAL, TARGET, stream, uniform_ref, uniform_tile


def categorical_ref(probs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: [T, V] probabilities and [T] numbers in [0, 1) -> [T] int64 tokens.

    A row that is no distribution, NaN or zero throughout, gives some token of the vocabulary.
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    level = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def sample_probs_ref(probs: Tensor, seeds: Tensor, positions: Tensor, purpose: int = TARGET) -> Tensor:
    """`categorical_ref` with the numbers that belong to these positions.

    probs      [T, V] float64   not necessarily normalised
    seeds      [T] int64
    positions  [T] int64        position of the sampled token
    Returns [T] int64.
    """
    return categorical_ref(probs, uniform_ref(seeds, positions, purpose))


@jit
def first_above(weights, before, level, TILE: tl.constexpr):
    """Index of the weight at which the running sum, begun at `before`, passes `level`.

    A parallel sum is not monotone in its last bit: weights of zero are passed over, and where none passes the last
    weight above zero is taken.
    """
    index = tl.arange(0, TILE)
    is_passed = (tl.cumsum(weights, 0) + before > level) & (weights > 0)
    passed = tl.min(tl.where(is_passed, index, TILE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(passed < TILE, passed, last)


@jit
def _residual_tile(target_probs, draft_probs, target_row, draft_row, token, vocab_size):
    """A tile of max(p - q, 0)."""
    is_token = token < vocab_size
    target = tl.load(target_probs + target_row * vocab_size + token, mask=is_token, other=0.0).to(tl.float64)
    draft = tl.load(draft_probs + draft_row * vocab_size + token, mask=is_token, other=0.0).to(tl.float64)
    return tl.maximum(target - draft, 0.0)


@jit
def _tile_sums_kernel(
    target_probs, draft_probs, columns, is_residual, tile_sums,
    num_rows, vocab_size, num_tiles, HAS_DRAFT: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """Sums of a row's tiles; with a draft, of the row at `columns`, and of its residual in a second plane."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile.to(tl.int64) * TILE_V + tl.arange(0, TILE_V)
    column = request * 0
    if HAS_DRAFT:
        column = tl.load(columns + request)
    probs = tl.load(
        target_probs + (request * num_rows + column) * vocab_size + token, mask=token < vocab_size, other=0.0
    ).to(tl.float64)  # fmt: skip
    tl.store(tile_sums + request * num_tiles + tile, tl.sum(probs, 0))
    if HAS_DRAFT:
        residual_sum = tl.sum(probs, 0) * 0
        if tl.load(is_residual + request) != 0:
            draft_row = request * (num_rows - 1) + column
            residual_sum = tl.sum(
                _residual_tile(
                    target_probs, draft_probs, request * num_rows + column, draft_row, token, vocab_size
                ), 0
            )  # fmt: skip
        tl.store(tile_sums + (tl.num_programs(0) + request) * num_tiles + tile, residual_sum)


@jit
def _sample_probs_kernel(
    target_probs, draft_probs, columns, seeds, positions, salt, residual_salt, tile_sums, token_ids,
    num_rows, vocab_size, num_tiles,
    HAS_DRAFT: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILE_T)
    is_tile = tiles < num_tiles
    sums = tl.load(tile_sums + request * num_tiles + tiles, mask=is_tile, other=0.0)
    column = request * 0
    is_residual = column > 0
    if HAS_DRAFT:
        column = tl.load(columns + request)
        residual_sums = tl.load(
            tile_sums + (tl.num_programs(0) + request) * num_tiles + tiles, mask=is_tile, other=0.0
        )  # fmt: skip
        is_residual = tl.sum(residual_sums, 0) > 0
        sums = tl.where(is_residual, residual_sums, sums)
        salt = tl.where(is_residual, residual_salt, salt)
    number = uniform_tile(tl.load(seeds + request), tl.load(positions + request) + column, salt)
    level = number * tl.sum(sums, 0)
    tile = first_above(sums, 0.0, level, TILE_T)
    before = tl.sum(tl.where(tiles < tile, sums, 0.0), 0)
    token = tile.to(tl.int64) * TILE_V + tl.arange(0, TILE_V)
    target_row = request * num_rows + column
    weights = tl.load(target_probs + target_row * vocab_size + token, mask=token < vocab_size, other=0.0)
    weights = weights.to(tl.float64)
    if HAS_DRAFT:  # noqa: SIM102, decided when the kernel is compiled
        if is_residual:
            draft_row = request * (num_rows - 1) + column
            weights = _residual_tile(target_probs, draft_probs, target_row, draft_row, token, vocab_size)
    chosen = tile.to(tl.int64) * TILE_V + first_above(weights, before, level, TILE_V)
    tl.store(token_ids + request * num_rows + column, chosen)


def launch_sample_probs(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    columns: Tensor,
    is_residual: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: int,
    token_ids: Tensor,
) -> None:
    """Sample one token a request into `token_ids` [R, N], at column `columns` (column 0 without a draft).

    target_probs  [R, N, V]   the row at `columns` is sampled
    draft_probs   [R, K, V]   where `is_residual`, the sample is from max(p - q, 0) and the stream of rejections; from p
                              and that of `purpose` where the difference is nowhere above 0
    """
    num_requests, num_rows, vocab_size = target_probs.shape
    num_tiles = ceil_div(vocab_size, VOCAB_TILE)
    has_draft = draft_probs is not None
    tile_sums = torch.empty((2 if has_draft else 1, num_requests, num_tiles), dtype=torch.float64, device=seeds.device)
    drafts = target_probs if draft_probs is None else draft_probs
    tile = min(VOCAB_TILE, power_of_2(vocab_size))
    _tile_sums_kernel[(num_requests, num_tiles)](
        target_probs, drafts, columns, is_residual, tile_sums,
        num_rows, vocab_size, num_tiles, HAS_DRAFT=has_draft, TILE_V=tile,
    )  # fmt: skip
    _sample_probs_kernel[(num_requests,)](
        target_probs, drafts, columns, seeds, positions, stream(purpose), stream(RESIDUAL), tile_sums, token_ids,
        num_rows, vocab_size, num_tiles, HAS_DRAFT=has_draft, TILE_V=tile, TILE_T=power_of_2(num_tiles),
    )  # fmt: skip


def sample_probs(probs: Tensor, seeds: Tensor, positions: Tensor, purpose: int = TARGET) -> Tensor:
    """`sample_probs_ref` in two launches."""
    check_tensors(probs, seeds, positions)
    require(len(probs) == len(seeds) == len(positions), "a seed and a position for each row")
    require(seeds.dtype == positions.dtype == torch.int64, "int64 seeds and positions")
    token_ids = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    if len(probs):
        launch_sample_probs(
            probs.contiguous()[:, None], None, token_ids, token_ids, seeds.contiguous(), positions.contiguous(),
            purpose, token_ids,
        )  # fmt: skip
    return token_ids
