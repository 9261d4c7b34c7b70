"""Best-first trees of draft tokens: the nodes with the highest product of the draft's probabilities.

A draft that predicts all positions of a block in one pass gives a distribution for each position. A path of d tokens
has the product of d probabilities. The tree has the N paths with the highest products. A path is never more likely
than its beginning, so these paths form a tree. Source: arXiv 2604.12989 (DDTree). A draft with a selector gives a
distribution for each candidate of the position before; a path has the product along its own candidates.

Row 0 of a tree is the anchor. Row i is node i - 1, and the row of a parent is lower than the rows of its children.
The references are a fixed number of torch operations with shapes that depend only on sizes, so graphs capture them.

Axis letters: R requests, K positions of a block, B candidates of the position before, C candidates, N nodes, M rows
(N + 1), S words of 64 bits.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import check_tensors, constexpr, jit, power_of_2, require, tl

WORD_BITS = 64


class TreeRows(NamedTuple):
    """How the rows of verified trees depend on each other, int64."""

    depths: Tensor
    """[R, M] distance from the anchor, which is row 0"""
    words: Tensor
    """[R, M, S] bits of each row's ancestors; see `ancestor_words`"""
    parents: Tensor
    """[R, M] row of the parent; of the anchor 0"""


class Tree(NamedTuple):
    """Trees of R requests: the anchor, and the drafted nodes in descending order of probability. int64."""

    draft_ids: Tensor
    """[R, N] tokens of the nodes; negative if the draft has fewer than N paths"""
    token_ids: Tensor
    """[R, M] tokens that the target reads: 0 for nodes without a token"""
    positions: Tensor
    """[R, M] positions of the rows, which rows of one depth share"""
    rows: TreeRows
    """rows without a token have depth 1 and the anchor as their parent"""

    @property
    def parents(self) -> Tensor:
        """[R, N] row of each node's parent."""
        return self.rows.parents[:, 1:]

    @property
    def depths(self) -> Tensor:
        """[R, N] number of tokens from the anchor to each node: 1 to K."""
        return self.rows.depths[:, 1:]


def build_tree_ref(
    log_probs: Tensor, token_ids: Tensor, anchor_ids: Tensor, anchor_positions: Tensor, num_nodes: int
) -> Tree:
    """Return the `num_nodes` most likely paths of each request.

    log_probs         [R, K, B, C]; NaN counts as -inf, and a candidate of -inf is left out. With B = 1 every candidate
                      of the position before has the same distribution, and candidates are in descending order. The
                      first position reads the first row only.
    token_ids         [R, K, C] int64, the tokens of these candidates
    anchor_ids        [R] int64
    anchor_positions  [R] int64

    With B = 1, C = N candidates are enough for the exact tree, because a node's better siblings are nodes too. Equal
    products rank by depth, then by the parent's rank, then by the candidate's place.

    Levels are grown one after another. The N best paths of a level come from the N best paths of the level before.
    """
    num_requests, num_positions, num_before, num_candidates = log_probs.shape
    log_probs = log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    path, place = _pairs(num_nodes, num_candidates, num_before == 1, log_probs.device)
    scores = log_probs.new_full((num_requests, num_nodes), -torch.inf)
    scores[:, 0] = 0  # the anchor
    last = torch.zeros_like(scores, dtype=torch.int64)  # where each path's last candidate is in the axis B
    levels = []
    for position in range(num_positions):
        added = log_probs[:, position].flatten(1).gather(1, last[:, path] * num_candidates + place)
        grown, order = (scores[:, path] + added).sort(dim=1, descending=True, stable=True)
        scores, order = _padded(grown, num_nodes, -torch.inf), _padded(order, num_nodes, 0)
        chosen = place[order]
        last = chosen if num_before > 1 else last
        levels.append((scores, token_ids[:, position].gather(1, chosen), path[order]))
    all_scores, ids, paths = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    best, order = all_scores.sort(dim=1, descending=True, stable=True)
    rows = torch.arange(1, all_scores.shape[1] + 1, device=order.device).expand_as(order)
    row_of = torch.zeros_like(order).scatter(1, order, rows)
    # A path of the first level continues the anchor. A later one continues a path of the level before.
    before = torch.cat((row_of.new_zeros((num_requests, num_nodes)), row_of[:, :-num_nodes]), dim=1)
    column = torch.arange(all_scores.shape[1], device=order.device)
    parents = before.gather(1, paths + column // num_nodes * num_nodes)
    order, is_node = order[:, :num_nodes], best[:, :num_nodes] > -torch.inf
    draft_ids = torch.where(is_node, ids.gather(1, order), -1)
    parents = torch.where(is_node, parents.gather(1, order), 0)
    depths = F.pad(torch.where(is_node, order // num_nodes + 1, 1), (1, 0))
    return Tree(
        draft_ids=draft_ids,
        token_ids=torch.cat((anchor_ids[:, None], draft_ids.clamp(min=0)), dim=1),
        positions=anchor_positions[:, None] + depths,
        rows=TreeRows(depths, ancestor_words(parents, num_positions), F.pad(parents, (1, 0))),
    )


def _padded(values: Tensor, count: int, fill: float) -> Tensor:
    """Return the first `count` columns, filled up if there are fewer."""
    return F.pad(values, (0, count - values.shape[1]), value=fill)


@cache
def _pairs(num_nodes: int, num_candidates: int, is_sorted: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pairs of a path of a level and a candidate of the next position that may be among the N best.

    If candidates are sorted alike for all paths, path j with candidate c, both counted from 0, has at least
    (j + 1) * (c + 1) - 1 better pairs.
    """
    pairs = [
        (path, place)
        for path in range(num_nodes)
        for place in range(min(num_nodes // (path + 1) if is_sorted else num_candidates, num_candidates))
    ]
    path, place = torch.tensor(pairs, dtype=torch.int64).t().contiguous().to(device, non_blocking=True)
    return path, place


def ancestor_words(parents: Tensor, num_positions: int) -> Tensor:
    """Return the set of each row's ancestors, the row itself included, as bits: [R, N] parents -> [R, M, S] int64.

    Bit `j % 64` of word `j // 64` stands for row j. `num_positions` is the greatest depth of a node.
    """
    num_rows = parents.shape[1] + 1
    row = torch.arange(num_rows, device=parents.device)
    word = torch.arange(-(-num_rows // WORD_BITS), device=parents.device)
    own = torch.where(row[:, None] // WORD_BITS == word, torch.ones_like(row)[:, None] << row[:, None] % WORD_BITS, 0)
    words = own.expand(len(parents), -1, -1)
    above = F.pad(parents, (1, 0))
    for _ in range(num_positions.bit_length()):  # each round doubles the number of known ancestors
        words = words | words.gather(1, above[:, :, None].expand_as(words))
        above = above.gather(1, above)
    return words


PLACE_BITS, ROW_BITS, DEPTH_BITS = 12, 9, 10
"""Bits of a candidate's place, of a parent's row and of a depth in the mark of a node. Together they are 31 bits."""

LANES = 32
"""Least number of rows and candidates in a tile: one warp finds the least of 32 integers in one instruction."""

_TL_ROW_SHIFT, _TL_DEPTH_SHIFT = constexpr(PLACE_BITS), constexpr(PLACE_BITS + ROW_BITS)
_TL_PLACE_MASK, _TL_ROW_MASK = constexpr((1 << PLACE_BITS) - 1), constexpr((1 << ROW_BITS) - 1)
_TL_NONE = constexpr(2**31 - 1)  # after the ranks of all scores, and after all marks


@jit
def _rank_of(score):
    """Return an integer that is lower for a higher score. NaN and -inf have the rank of no node."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(score > float("-inf"), tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits), _TL_NONE)


@jit
def _score_of(rank):
    """Return the score of a rank."""
    return tl.where(rank < 0, ~rank, rank | -0x80000000).to(tl.float32, bitcast=True)


@jit
def _first_child(
    log_probs, candidate, depth, before, score, after_rank, after_place,
    NUM_POSITIONS: tl.constexpr, NUM_BEFORE: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return rank and place of a row's first child after the given rank and place, or the rank of no node.

    depth   of the child
    before  place of the row's own token
    score   of the row
    """
    first = ((depth - 1) * NUM_BEFORE + before) * NUM_CANDIDATES
    is_candidate = (candidate < NUM_CANDIDATES) & (depth <= NUM_POSITIONS)
    ranks = _rank_of(score + tl.load(log_probs + first + candidate, mask=is_candidate, other=float("-inf")))
    is_later = (ranks > after_rank) | ((ranks == after_rank) & (candidate > after_place))
    ranks = tl.where(is_later, ranks, _TL_NONE)
    rank = tl.min(ranks, 0)
    return rank, tl.min(tl.where(ranks == rank, candidate, _TL_PLACE_MASK), 0)


@jit
def _grow(
    log_probs, row, num_nodes,
    NUM_POSITIONS: tl.constexpr, NUM_BEFORE: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return the mark of each row's node, [TILE_M]: depth, parent's row and place. It is 0 for rows without a node.

    Each row has one child in the frontier: the first one that is not a node yet. The next node is the child with the
    lowest rank; equal ranks are ordered by mark. Then its parent's next child and its own first child join.
    """
    candidate = tl.arange(0, TILE_C)
    zero = tl.zeros((), tl.int32)
    rank, place = _first_child(
        log_probs, candidate, zero + 1, zero, 0.0, zero - 0x7FFFFFFF, zero, NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES
    )
    if NUM_BEFORE == 1:
        # Read most log-probabilities that the loop will read, all at once, so that it finds them in the nearest cache.
        position, first = tl.arange(0, TILE_K)[:, None], tl.arange(0, 8)[None, :]
        is_read = (position < NUM_POSITIONS) & (first < NUM_CANDIDATES)
        read = tl.load(log_probs + position * NUM_CANDIDATES + first, mask=is_read, other=float("-inf"))
        rank = tl.where(tl.max(tl.max(read, 1), 0) > float("-inf"), rank, _TL_NONE)
    ranks = tl.where(row == 0, rank, _TL_NONE)  # of the frontier
    marks = ((zero + 1) << _TL_DEPTH_SHIFT) | (row << _TL_ROW_SHIFT) | place
    scores = tl.zeros((TILE_M,), tl.float32)
    nodes = tl.zeros((TILE_M,), tl.int32)
    for node in range(num_nodes):
        rank = tl.min(ranks, 0)
        mark = tl.min(tl.where(ranks == rank, marks, _TL_NONE), 0)
        depth, place = mark >> _TL_DEPTH_SHIFT, mark & _TL_PLACE_MASK
        is_node = rank != _TL_NONE
        is_own = (row == node + 1) & is_node
        is_parent = (row == ((mark >> _TL_ROW_SHIFT) & _TL_ROW_MASK)) & is_node
        nodes = tl.where(is_own, mark, nodes)
        scores = tl.where(is_own, _score_of(rank), scores)
        new_depths = tl.where(is_own, depth + 1, depth)
        if NUM_BEFORE == 1:
            # Candidates are in descending order: the next child is the next candidate.
            new_places = tl.where(is_own, 0, place + 1)
            has_next = (is_own & (depth < NUM_POSITIONS)) | (is_parent & (place + 1 < NUM_CANDIDATES))
            source = log_probs + (new_depths - 1) * NUM_CANDIDATES + new_places
            new_ranks = _rank_of(scores + tl.load(source, mask=has_next, other=float("-inf")))
        else:
            parent_bits = tl.where(is_parent, scores.to(tl.int32, bitcast=True), 0)
            parent_score = tl.sum(parent_bits, 0).to(tl.float32, bitcast=True)
            before = tl.sum(tl.where(is_parent, nodes & _TL_PLACE_MASK, 0), 0)
            next_rank, next_place = _first_child(
                log_probs, candidate, depth, before, parent_score, rank, place,
                NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES,
            )  # fmt: skip
            first_rank, first_place = _first_child(
                log_probs, candidate, depth + 1, place, _score_of(rank), zero - 0x7FFFFFFF, zero,
                NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES,
            )  # fmt: skip
            new_ranks = tl.where(is_own, first_rank, next_rank)
            new_places = tl.where(is_own, first_place, next_place)
        joins = is_own | is_parent
        ranks = tl.where(joins, new_ranks, ranks)
        new_marks = (new_depths << _TL_DEPTH_SHIFT) | (row << _TL_ROW_SHIFT) | new_places
        marks = tl.where(joins, new_marks, marks)
    return nodes


@jit(do_not_specialize=["num_nodes"])
def _build_tree_kernel(
    log_probs, candidate_ids, anchor_ids, anchor_positions, draft_ids, token_ids, positions, depths, words, parents,
    num_nodes, ids_stride, positions_stride,
    NUM_POSITIONS: tl.constexpr, NUM_BEFORE: tl.constexpr, NUM_CANDIDATES: tl.constexpr, NUM_WORDS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TILE_M)
    anchor_id = tl.load(anchor_ids + request * ids_stride)
    anchor_position = tl.load(anchor_positions + request * positions_stride)
    log_probs += request * (NUM_POSITIONS * NUM_BEFORE * NUM_CANDIDATES)
    nodes = _grow(log_probs, row, num_nodes, NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES, TILE_M, TILE_C, TILE_K)
    is_node, is_row = nodes > 0, row <= num_nodes
    depth, parent = nodes >> _TL_DEPTH_SHIFT, (nodes >> _TL_ROW_SHIFT) & _TL_ROW_MASK
    source = (request * NUM_POSITIONS + depth - 1) * NUM_CANDIDATES + (nodes & _TL_PLACE_MASK)
    draft_id = tl.load(candidate_ids + source, mask=is_node, other=-1)
    depth = tl.where(is_node | (row == 0), depth, 1)
    target = request * (num_nodes + 1) + row
    tl.store(draft_ids + request * num_nodes + row - 1, draft_id, mask=is_row & (row > 0))
    tl.store(token_ids + target, tl.where(row == 0, anchor_id, tl.maximum(draft_id, 0)), mask=is_row)
    tl.store(positions + target, anchor_position + depth, mask=is_row)
    tl.store(depths + target, depth.to(tl.int64), mask=is_row)
    tl.store(parents + target, parent.to(tl.int64), mask=is_row)
    deepest = tl.max(depth, 0)
    for word in range(NUM_WORDS):
        found, current = tl.zeros((TILE_M,), tl.int64), row
        for _ in range(deepest + 1):
            bit = tl.full((TILE_M,), 1, tl.int64) << (current & 63)
            found |= tl.where(current >> 6 == word, bit, 0)
            current = tl.gather(parent, current, 0)
        tl.store(words + target * NUM_WORDS + word, found, mask=is_row)


def build_tree(
    log_probs: Tensor, token_ids: Tensor, anchor_ids: Tensor, anchor_positions: Tensor, num_nodes: int
) -> Tree:
    """Compute `build_tree_ref` in one launch, one program per request.

    A program adds one node after another: the most likely child that any row has left. This gives the same order as
    growing levels, because a parent and better siblings always come first. It needs log-probabilities of at most 0.
    One warp does this in registers, where the least of 32 values takes one instruction.
    """
    check_tensors(log_probs, token_ids, anchor_ids, anchor_positions)
    num_requests, num_positions, num_before, num_candidates = log_probs.shape
    require(log_probs.dtype == torch.float32, "log_probs", "float32")
    require(token_ids.shape == (num_requests, num_positions, num_candidates), "token_ids", "one per candidate")
    require(anchor_ids.shape == anchor_positions.shape == (num_requests,), "anchor_ids, anchor_positions", "one each")
    require(num_candidates <= 1 << PLACE_BITS, "log_probs", f"at most {1 << PLACE_BITS} candidates")
    require(num_positions < (1 << DEPTH_BITS) - 1, "log_probs", "fewer positions")
    require(0 < num_nodes < 1 << ROW_BITS, "num_nodes", f"1 to {(1 << ROW_BITS) - 1}")
    num_rows, num_words = num_nodes + 1, -(-(num_nodes + 1) // WORD_BITS)

    def room(*shape: int) -> Tensor:
        return token_ids.new_empty((num_requests, *shape))

    rows = TreeRows(room(num_rows), room(num_rows, num_words), room(num_rows))
    tree = Tree(room(num_nodes), room(num_rows), room(num_rows), rows)
    if num_requests:
        _build_tree_kernel[(num_requests,)](
            log_probs.contiguous(), token_ids.contiguous(), anchor_ids, anchor_positions, *tree[:3], *rows, num_nodes,
            anchor_ids.stride(0), anchor_positions.stride(0), NUM_POSITIONS=num_positions, NUM_BEFORE=num_before,
            NUM_CANDIDATES=num_candidates, NUM_WORDS=num_words, TILE_M=max(power_of_2(num_rows), LANES),
            TILE_C=max(power_of_2(num_candidates), LANES), TILE_K=power_of_2(num_positions), num_warps=1,
            **early(log_probs.device),
        )  # fmt: skip
    return tree


def is_ancestor(words: Tensor) -> Tensor:
    """Return whether row j is row i or one of its ancestors: [R, M, S] words -> [R, M, M] bool."""
    row = torch.arange(words.shape[1], device=words.device)
    return (words[:, :, row // WORD_BITS] >> row % WORD_BITS & 1).bool()


def ranks_of_text(tree: Tree, text: Tensor) -> Tensor:
    """Return the node, counted from 0, that each token of a text [R, K] has in its tree: [R, K] int64.

    N stands for a token without a node. The first n nodes of a tree are the tree of n nodes, so the tokens with ranks
    below n are the tokens that this smaller tree accepts.
    """
    num_nodes = tree.draft_ids.shape[1]
    row, ranks = torch.zeros_like(text[:, :1]), []
    for place in range(text.shape[1]):
        token = text[:, place : place + 1]
        is_next = (tree.draft_ids >= 0) & (tree.draft_ids == token) & (tree.parents == row)
        rank = torch.where(is_next.any(1), is_next.long().argmax(1), num_nodes)
        row = torch.where(rank < num_nodes, rank + 1, -1)[:, None]  # no node has this parent
        ranks.append(rank)
    return torch.stack(ranks, dim=1)
