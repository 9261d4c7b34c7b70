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

from dflash_kernels.launch_config import check_tensors, constexpr, jit, power_of_2, require, tl, warps_for

WORD_BITS = 64


class Tree(NamedTuple):
    """Drafted nodes of R requests in descending order of probability, [R, N] int64 each."""

    token_ids: Tensor
    """negative if the draft has fewer than N paths"""
    parents: Tensor
    """row of the parent; 0 is the anchor"""
    depths: Tensor
    """number of tokens from the anchor to the node: 1 to K"""


class TreeRows(NamedTuple):
    """How the rows of verified trees depend on each other, int64."""

    depths: Tensor
    """[R, M] distance from the anchor, which is row 0"""
    words: Tensor
    """[R, M, S] bits of each row's ancestors; see `ancestor_words`"""
    parents: Tensor
    """[R, M] row of the parent; of the anchor 0"""


def build_tree_ref(log_probs: Tensor, token_ids: Tensor, num_nodes: int) -> Tree:
    """Return the `num_nodes` most likely paths of each request.

    log_probs  [R, K, B, C]; NaN counts as -inf, and a candidate of -inf is left out. With B = 1 every candidate of the
               position before has the same distribution, and candidates are in descending order. The first position
               reads the first row only.
    token_ids  [R, K, C] int64, the tokens of these candidates

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
    return Tree(
        token_ids=torch.where(is_node, ids.gather(1, order), -1),
        parents=torch.where(is_node, parents.gather(1, order), 0),
        depths=torch.where(is_node, order // num_nodes + 1, 1),
    )


def _padded(values: Tensor, count: int, fill: float) -> Tensor:
    """Return the first `count` columns, filled up if there are fewer."""
    return torch.nn.functional.pad(values, (0, count - values.shape[1]), value=fill)


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


def ancestor_words_ref(parents: Tensor, num_positions: int) -> Tensor:
    """Return the set of each row's ancestors, the row itself included, as bits: [R, N] parents -> [R, M, S] int64.

    Bit `j % 64` of word `j // 64` stands for row j. `num_positions` is the greatest depth of a node.
    """
    num_rows = parents.shape[1] + 1
    row = torch.arange(num_rows, device=parents.device)
    word = torch.arange(-(-num_rows // WORD_BITS), device=parents.device)
    own = torch.where(row[:, None] // WORD_BITS == word, torch.ones_like(row)[:, None] << row[:, None] % WORD_BITS, 0)
    words = own.expand(len(parents), -1, -1)
    above = torch.nn.functional.pad(parents, (1, 0))
    for _ in range(num_positions.bit_length()):  # each round doubles the number of known ancestors
        words = words | words.gather(1, above[:, :, None].expand_as(words))
        above = above.gather(1, above)
    return words


PLACE_BITS, ROW_BITS, DEPTH_BITS = 12, 9, 10
"""Bits of a candidate's place, of a parent's row and of a depth in a key. Together they are 31 bits."""

_TL_ROW_SHIFT, _TL_DEPTH_SHIFT = constexpr(PLACE_BITS), constexpr(PLACE_BITS + ROW_BITS)
_TL_PLACE_MASK, _TL_ROW_MASK = constexpr((1 << PLACE_BITS) - 1), constexpr((1 << ROW_BITS) - 1)
_TL_DEPTH_MASK = constexpr((1 << DEPTH_BITS) - 1)
_TL_NO_CHILD = constexpr(2**63 - 1)  # the key after the keys of all nodes


@jit
def _first_child(
    log_probs, place, row, depth, score, before, after,
    NUM_POSITIONS: tl.constexpr, NUM_BEFORE: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the key of the first child of a row after the key `after`, or the key of no node.

    A lower key has a higher score. Equal scores rank by the lower half of the key: depth, parent's row, place.
    """
    first = (depth - 1) * (NUM_BEFORE * NUM_CANDIDATES)
    if NUM_BEFORE > 1:
        first += before * NUM_CANDIDATES
    is_candidate = (place < NUM_CANDIDATES) & (depth <= NUM_POSITIONS)
    total = score + tl.load(log_probs + first + place, mask=is_candidate, other=float("-inf"))
    bits = total.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits)
    lower = (depth << _TL_DEPTH_SHIFT) | (row << _TL_ROW_SHIFT) | place
    key = (ordered.to(tl.int64) << 32) | lower
    return tl.min(tl.where((total > float("-inf")) & (key > after), key, _TL_NO_CHILD), 0)


@jit(do_not_specialize=["num_nodes"])
def _build_tree_kernel(
    log_probs, token_ids, ids, parents, depths, num_nodes,
    NUM_POSITIONS: tl.constexpr, NUM_BEFORE: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    log_probs += request * (NUM_POSITIONS * NUM_BEFORE * NUM_CANDIDATES)
    token_ids += request * (NUM_POSITIONS * NUM_CANDIDATES)
    place, row = tl.arange(0, TILE_C).to(tl.int64), tl.arange(0, TILE_M)
    zero = tl.zeros((), tl.int64)
    least = tl.full((), -(2**63), tl.int64)
    score = tl.zeros((), tl.float32)
    child = _first_child(
        log_probs, place, zero, zero + 1, score, zero, least, NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES
    )
    keys = tl.where(row == 0, child, _TL_NO_CHILD)  # each row's first child that is not a node yet
    scores = tl.zeros((TILE_M,), tl.float32)
    places = tl.zeros((TILE_M,), tl.int64)
    for node in range(num_nodes):
        key = tl.min(keys, 0)
        is_node = key != _TL_NO_CHILD
        depth = (key >> _TL_DEPTH_SHIFT) & _TL_DEPTH_MASK
        parent = (key >> _TL_ROW_SHIFT) & _TL_ROW_MASK
        chosen = key & _TL_PLACE_MASK
        token = tl.load(token_ids + (depth - 1) * NUM_CANDIDATES + chosen, mask=is_node, other=-1)
        tl.store(ids + request * num_nodes + node, token)
        tl.store(parents + request * num_nodes + node, tl.where(is_node, parent, 0))
        tl.store(depths + request * num_nodes + node, tl.where(is_node, depth, 1))
        parent_score = tl.sum(tl.where(row == parent, scores, 0.0), 0)
        parent_place = tl.sum(tl.where(row == parent, places, 0), 0)
        sibling = _first_child(
            log_probs, place, parent, depth, parent_score, parent_place, key, NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES
        )
        ordered = (key >> 32).to(tl.int32)
        score = tl.where(ordered < 0, ~ordered, ordered | -0x80000000).to(tl.float32, bitcast=True)
        own = zero + node + 1
        child = _first_child(
            log_probs, place, own, depth + 1, score, chosen, least, NUM_POSITIONS, NUM_BEFORE, NUM_CANDIDATES
        )
        keys = tl.where(is_node & (row == parent), sibling, tl.where(row == own, child, keys))
        scores = tl.where(row == own, score, scores)
        places = tl.where(row == own, chosen, places)


def build_tree(log_probs: Tensor, token_ids: Tensor, num_nodes: int) -> Tree:
    """Compute `build_tree_ref` in one launch, one program per request.

    A program adds one node after another: the most likely child that any row has left. This gives the same order as
    growing levels, because a parent and better siblings always come first. It needs log-probabilities of at most 0.
    """
    check_tensors(log_probs, token_ids)
    num_requests, num_positions, num_before, num_candidates = log_probs.shape
    require(log_probs.dtype == torch.float32, "log_probs", "float32")
    require(token_ids.shape == (num_requests, num_positions, num_candidates), "token_ids", "one per candidate")
    require(num_candidates <= 1 << PLACE_BITS, "log_probs", f"at most {1 << PLACE_BITS} candidates")
    require(num_positions < (1 << DEPTH_BITS) - 1, "log_probs", "fewer positions")
    require(0 < num_nodes < 1 << ROW_BITS, "num_nodes", f"1 to {(1 << ROW_BITS) - 1}")
    tree = Tree(*(token_ids.new_empty((num_requests, num_nodes)) for _ in Tree._fields))
    if num_requests:
        _build_tree_kernel[(num_requests,)](
            log_probs.contiguous(), token_ids.contiguous(), *tree, num_nodes, NUM_POSITIONS=num_positions,
            NUM_BEFORE=num_before, NUM_CANDIDATES=num_candidates, TILE_M=power_of_2(num_nodes + 1),
            TILE_C=power_of_2(num_candidates), num_warps=1,
        )  # fmt: skip
    return tree


@jit(do_not_specialize=["num_nodes"])
def _ancestor_words_kernel(
    parents, words, num_nodes, num_positions, NUM_WORDS: tl.constexpr, TILE_M: tl.constexpr, TILE_S: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row, word = tl.arange(0, TILE_M).to(tl.int64), tl.arange(0, TILE_S)
    current = row
    found = tl.zeros((TILE_M, TILE_S), tl.int64)
    for _ in range(num_positions + 1):
        bit = tl.full((TILE_M,), 1, tl.int64) << current % 64
        found |= tl.where((current // 64)[:, None] == word[None, :], bit[:, None], 0)
        is_above = (current > 0) & (current <= num_nodes)
        current = tl.load(parents + request * num_nodes + current - 1, mask=is_above, other=0)
    target = (request * (num_nodes + 1) + row)[:, None] * NUM_WORDS + word[None, :]
    tl.store(words + target, found, mask=(row <= num_nodes)[:, None] & (word < NUM_WORDS)[None, :])


def ancestor_words(parents: Tensor, num_positions: int) -> Tensor:
    """Compute `ancestor_words_ref` in one launch, one program per request. Each row walks up to the anchor."""
    check_tensors(parents)
    num_requests, num_nodes = parents.shape
    num_words = -(-(num_nodes + 1) // WORD_BITS)
    words = parents.new_empty((num_requests, num_nodes + 1, num_words))
    if num_requests:
        tile_m, tile_s = power_of_2(num_nodes + 1), power_of_2(num_words)
        _ancestor_words_kernel[(num_requests,)](
            parents.contiguous(), words, num_nodes, num_positions, NUM_WORDS=num_words, TILE_M=tile_m, TILE_S=tile_s,
            num_warps=warps_for(tile_m * tile_s),
        )  # fmt: skip
    return words


def is_ancestor(words: Tensor) -> Tensor:
    """Return whether row j is row i or one of its ancestors: [R, M, S] words -> [R, M, M] bool."""
    row = torch.arange(words.shape[1], device=words.device)
    return (words[:, :, row // WORD_BITS] >> row % WORD_BITS & 1).bool()


def ranks_of_text(tree: Tree, text: Tensor) -> Tensor:
    """Return the node, counted from 0, that each token of a text [R, K] has in its tree: [R, K] int64.

    N stands for a token without a node. The first n nodes of a tree are the tree of n nodes, so the tokens with ranks
    below n are the tokens that this smaller tree accepts.
    """
    num_nodes = tree.token_ids.shape[1]
    row, ranks = torch.zeros_like(text[:, :1]), []
    for place in range(text.shape[1]):
        token = text[:, place : place + 1]
        is_next = (tree.token_ids >= 0) & (tree.token_ids == token) & (tree.parents == row)
        rank = torch.where(is_next.any(1), is_next.long().argmax(1), num_nodes)
        row = torch.where(rank < num_nodes, rank + 1, -1)[:, None]  # no node has this parent
        ranks.append(rank)
    return torch.stack(ranks, dim=1)
