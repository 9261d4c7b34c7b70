"""Trees of draft tokens: the most likely paths, the accepted path, and attention of rows to their ancestors."""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention import tree_attention as module
from dflash_kernels.attention.attention_config import AttentionShape
from dflash_kernels.attention.block_attention import block_attention_ref
from dflash_kernels.attention.key_parts import combine_parts
from dflash_kernels.attention.softmax import PLAIN
from dflash_kernels.attention.tree_attention import tree_attention, tree_attention_ref
from dflash_kernels.drafts.draft_tree import (
    Tree,
    TreeRows,
    build_tree,
    build_tree_ref,
    is_ancestor,
)
from dflash_kernels.drafts.tree_path import (
    PathRecords,
    follow_tree,
    follow_tree_ref,
    move_records,
    move_records_ref,
    move_rows,
    move_rows_ref,
)
from dflash_kernels.kv.slot_mapping import PAD
from dflash_testing.tensors import DEVICE, SAMPLED_DTYPES, assert_rows_close, normal, random_pages, random_softmax

VOCAB = 70


def random_candidates(num_requests: int, num_positions: int, num_candidates: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the best tokens of random positions, some of them nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_requests, num_positions, VOCAB, generator=generator, dtype=torch.float64)
    logits = logits * torch.rand(num_requests, num_positions, 1, generator=generator, dtype=torch.float64) * 6
    log_probs, token_ids = logits.log_softmax(-1).sort(dim=-1, descending=True)
    return log_probs[:, :, None, :num_candidates].to(DEVICE), token_ids[..., :num_candidates].to(DEVICE)


def built(
    log_probs: Tensor, ids: Tensor, num_nodes: int, build: Callable[..., Tree] = build_tree_ref, stride: int = 1
) -> Tree:
    """Return trees of anchors 900, 901, ... at positions 50, 52, ..., which lie `stride` apart in memory."""
    place = torch.arange(len(ids), device=DEVICE)
    anchors, positions = (torch.empty(len(ids), stride, dtype=torch.int64, device=DEVICE)[:, 0] for _ in range(2))
    return build(log_probs, ids, anchors.copy_(900 + place), positions.copy_(50 + 2 * place), num_nodes)


def random_tree(num_requests: int, num_positions: int, num_nodes: int, seed: int) -> Tree:
    return built(*random_candidates(num_requests, num_positions, num_nodes, seed), num_nodes)


def likeliest_paths(log_probs: list[list[float]], token_ids: list[list[int]], num_nodes: int) -> list[tuple[int, ...]]:
    """Return the most likely paths by a search over single nodes, without levels and without a limit of candidates."""
    found: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while heap and len(found) <= num_nodes:
        score, depth, path = heapq.heappop(heap)
        found.append(path)
        if depth < len(log_probs):
            for log_prob, token in zip(log_probs[depth], token_ids[depth], strict=True):
                heapq.heappush(heap, (score - log_prob, depth + 1, (*path, token)))
    return found[1:]


def paths_of(tree: Tree, request: int) -> list[tuple[int, ...]]:
    """Return the tokens from the anchor to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.draft_ids[request].tolist(), tree.parents[request].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.reference
@pytest.mark.parametrize("num_nodes", [1, 8, 16, 32, 64])
def test_a_tree_has_the_paths_of_a_search_over_all_nodes(num_nodes: int) -> None:
    every = random_candidates(3, 7, VOCAB, seed=num_nodes)
    tree = built(every[0][..., :num_nodes], every[1][..., :num_nodes], num_nodes)
    for request in range(3):
        paths = likeliest_paths(every[0][request, :, 0].tolist(), every[1][request].tolist(), num_nodes)
        assert paths_of(tree, request) == paths
        assert tree.depths[request].tolist() == [len(path) for path in paths]


@pytest.mark.reference
@pytest.mark.parametrize("num_nodes", [5, 40])
def test_a_tree_of_pairs_has_the_paths_of_a_search_over_all_nodes(num_nodes: int) -> None:
    """The distribution of a position depends on the candidate before. A level may have fewer paths than nodes."""
    generator = torch.Generator().manual_seed(num_nodes)
    log_probs = (3 * torch.randn(2, 4, 3, 3, generator=generator, dtype=torch.float64)).log_softmax(-1).to(DEVICE)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:3] for _ in range(8)]).view(2, 4, 3).to(DEVICE)
    tree = built(log_probs, ids, num_nodes)
    for request in range(2):
        found: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
        for path in (path for depth in range(1, 5) for path in itertools.product(range(3), repeat=depth)):
            pairs = zip((0, *path), path, strict=False)
            scores = [log_probs[request, place, before, own].item() for place, (before, own) in enumerate(pairs)]
            found.append((-sum(scores), len(path), path))
        best = [path for _, _, path in sorted(found)[1 : num_nodes + 1]]
        expected = [tuple(ids[request, place, own].item() for place, own in enumerate(path)) for path in best]
        assert paths_of(tree, request) == expected


@pytest.mark.reference
def test_candidates_of_a_row_after_the_n_best_change_no_tree() -> None:
    log_probs, ids = paired_candidates(3, 5, 12, seed=4)
    log_probs = log_probs + 1e-3 * normal(*log_probs.shape, dtype=torch.float32, seed=5).abs().neg()  # no equal values
    best = log_probs.nan_to_num(nan=-math.inf, neginf=-math.inf).topk(7, dim=-1)
    fewer = torch.full_like(log_probs, -math.inf).scatter(-1, best.indices, best.values)
    tree = built(log_probs, ids, 7)
    assert int(tree.draft_ids.min()) >= 0
    assert torch.equal(built(fewer, ids, 7).draft_ids, tree.draft_ids)


@pytest.mark.reference
def test_equal_probabilities_rank_by_depth_then_parent_then_candidate() -> None:
    ids = torch.arange(6, device=DEVICE).view(1, 3, 2)
    tree = built(torch.zeros(1, 3, 1, 2, device=DEVICE), ids, 7)
    assert paths_of(tree, 0) == [(0,), (1,), (0, 2), (0, 3), (1, 2), (1, 3), (0, 2, 4)]


@pytest.mark.reference
def test_one_candidate_per_position_gives_a_chain_and_then_no_nodes() -> None:
    log_probs, ids = random_candidates(2, 5, 1, seed=3)
    tree = built(log_probs, ids, 7)
    assert tree.draft_ids.tolist() == [[*row, -1, -1] for row in ids[..., 0].tolist()]
    assert tree.parents[:, :5].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert tree.depths[:, :5].tolist() == [[1, 2, 3, 4, 5]] * 2


@pytest.mark.reference
def test_candidates_without_a_probability_are_no_nodes() -> None:
    log_probs = torch.tensor([[[[-0.5, -math.inf]], [[math.nan, -math.inf]]]], device=DEVICE)
    tree = built(log_probs, torch.arange(4, device=DEVICE).view(1, 2, 2), 4)
    assert tree.draft_ids.tolist() == [[0, -1, -1, -1]]


def sorted_candidates(num_requests: int, num_positions: int, num_nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the float32 candidates of `num_nodes` nodes, with B = 1. The last request has many equal values."""
    log_probs, ids = random_candidates(num_requests, num_positions, num_nodes, seed)
    log_probs = log_probs.float()
    log_probs[-1] = (log_probs[-1] / 2).round() * 2
    log_probs[0, -1, 0, num_nodes // 2 :] = -math.inf
    return log_probs, ids


def paired_candidates(num_requests: int, num_positions: int, num_candidates: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return float32 candidates that depend on the candidate before. The last request has many equal values."""
    shape = (num_requests, num_positions, num_candidates, num_candidates)
    log_probs = (4 * normal(*shape, dtype=torch.float32, seed=seed)).log_softmax(-1)
    log_probs[-1] = (log_probs[-1] / 4).round() * 4
    log_probs[:, 1, 0, 1] = math.nan
    log_probs[0, :, :, num_candidates // 2] = -math.inf
    ids = torch.randperm(num_requests * num_positions * num_candidates).to(DEVICE)
    return log_probs, ids.view(num_requests, num_positions, num_candidates)


def assert_built_as_the_reference(log_probs: Tensor, ids: Tensor, num_nodes: int) -> None:
    found, expected = built(log_probs, ids, num_nodes, build_tree, stride=3), built(log_probs, ids, num_nodes)
    for name, own, reference in zip(
        (*Tree._fields[:3], *TreeRows._fields), (*found[:3], *found.rows), (*expected[:3], *expected.rows), strict=True
    ):
        assert torch.equal(own, reference), name


@pytest.mark.parametrize(("num_requests", "num_positions", "num_nodes"), [(2, 7, 16), (3, 3, 65), (1, 2, 1)])
def test_one_launch_builds_the_tree_of_the_reference(num_requests: int, num_positions: int, num_nodes: int) -> None:
    assert_built_as_the_reference(*sorted_candidates(num_requests, num_positions, num_nodes, seed=1), num_nodes)


@pytest.mark.parametrize("num_nodes", [12, 40])
def test_one_launch_builds_the_tree_of_pairs_of_the_reference(num_nodes: int) -> None:
    """With 3 positions of 3 candidates, 40 nodes are more than there are paths."""
    assert_built_as_the_reference(*paired_candidates(2, 3, 3, seed=2), num_nodes)


def test_one_launch_ranks_equal_probabilities_as_the_reference() -> None:
    log_probs = torch.zeros(1, 3, 1, 2, device=DEVICE)
    assert_built_as_the_reference(log_probs, torch.arange(6, device=DEVICE).view(1, 3, 2), 7)


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [8, 16, 32, 64, 256])
@pytest.mark.parametrize("num_positions", [7, 15])
@pytest.mark.parametrize("num_requests", range(1, 9))
def test_trees_of_real_sizes_equal_the_reference(num_requests: int, num_positions: int, num_nodes: int) -> None:
    for seed in range(5):
        own = sorted_candidates(num_requests, num_positions, min(num_nodes, VOCAB), seed)
        assert_built_as_the_reference(*own, num_nodes)
        assert_built_as_the_reference(*paired_candidates(num_requests, num_positions, 16, seed), num_nodes)


@pytest.mark.reference
@pytest.mark.parametrize("num_nodes", [5, 63, 64, 130])
def test_words_have_the_bits_of_a_row_and_its_ancestors(num_nodes: int) -> None:
    tree = random_tree(2, 15, num_nodes, seed=num_nodes)
    found = is_ancestor(tree.rows.words)
    for request, parents in enumerate(tree.parents.tolist()):
        expected = [{0}]
        for row, parent in enumerate(parents, start=1):
            expected.append({row} | expected[parent])
        assert [set(row.nonzero()[:, 0].tolist()) for row in found[request]] == expected


def test_the_path_follows_the_choices_of_the_target() -> None:
    """A path has the accepted nodes, then first children. Both kernels equal a walk over dictionaries."""
    tree = random_tree(40, 6, 12, seed=5)
    tree.draft_ids[3:6, 8:] = -1
    chosen = torch.randint(0, VOCAB, (40, 13), generator=torch.Generator().manual_seed(6)).to(DEVICE)
    is_easy = torch.rand(40, 12, generator=torch.Generator().manual_seed(7)).to(DEVICE) < 0.6
    easy = torch.where(is_easy, tree.draft_ids, chosen.gather(1, tree.parents))
    for node in range(11, -1, -1):  # lower nodes win
        chosen.scatter_(1, tree.parents[:, node : node + 1], easy[:, node : node + 1])
    path = follow_tree_ref(tree, chosen, 7)
    for request in range(40):
        children: dict[int, list[tuple[int, int]]] = {}
        for row, (token, parent) in enumerate(
            zip(tree.draft_ids[request].tolist(), tree.parents[request].tolist(), strict=True), start=1
        ):
            if token >= 0:
                children.setdefault(parent, []).append((row, token))
        row, rows, tokens = 0, [0], []
        for _ in range(6):
            own = children.get(row, [])
            taken = [item for item in own if item[1] == chosen[request, row]] or own[:1]
            if not taken:
                break
            row = taken[0][0]
            rows.append(row)
            tokens.append(taken[0][1])
        rest = 6 - len(tokens)
        assert path.rows[request].tolist() == rows + [0] * rest
        assert path.token_ids[request].tolist() == tokens + [-1] * rest
    assert all(map(torch.equal, follow_tree(tree, chosen, 7), path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_rows_of_a_path_move_to_its_positions_and_no_other_row_changes(dtype: torch.dtype) -> None:
    """In the first path, rows move to slots that other rows leave."""
    pages = normal(9, 2, 2, 4, 6, dtype=torch.float32, seed=1).to(dtype)
    row_slots = torch.randperm(32, generator=torch.Generator().manual_seed(2)).to(DEVICE).view(2, 16) + 4
    taken = torch.tensor([[0, 2, 1, 3, 9], [0, 2, 3, 11, 14]], device=DEVICE)
    sources, targets = row_slots.gather(1, taken), row_slots[:, :5].clone()
    targets[1, 3:] = PAD
    flat = pages.float().transpose(1, 3).flatten(0, 1)  # [slots, ...]
    expected = flat.clone()
    for request, count in ((0, 5), (1, 3)):
        expected[targets[request, :count]] = flat[sources[request, :count]]
    for move in (move_rows_ref, move_rows):
        own = pages.clone()
        move(own, row_slots, taken, targets)
        assert torch.equal(own.float().transpose(1, 3).flatten(0, 1), expected)


@pytest.mark.parametrize("move", [pytest.param(move_records_ref, marks=pytest.mark.reference), move_records])
def test_the_records_of_a_path_move_to_its_positions_and_no_other_record_changes(move: Any) -> None:
    """Rings of 16 records, which wrap around. Two rows of the second path are not committed."""
    records = normal(3, 4, 16, 2, 5, dtype=torch.float32, seed=1)
    taken = torch.tensor([[0, 1, 4, 5, 9], [0, 2, 3, 11, 14]], device=DEVICE)
    slots = torch.tensor([[70, 71, 72, 73, 74], [80, 81, 82, PAD, PAD]], device=DEVICE)
    texts, lens = torch.tensor([3, 0], device=DEVICE), torch.tensor([11, 5], device=DEVICE)
    expected = records.clone()
    for request, (text, begin, count) in enumerate(((3, 11, 5), (0, 5, 3))):
        for place in range(count):
            source = (begin + taken[request, place]) % 16
            expected[:, text, (begin + place) % 16] = records[:, text, source]
    move(records, PathRecords(texts, lens, taken, slots))
    assert torch.equal(records, expected)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
@pytest.mark.parametrize("kind", ["plain", "both"])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_a_row_attends_as_the_last_row_of_its_path_alone(window: int | None, kind: str, dtype: torch.dtype) -> None:
    """Each row of a tree equals the last row of a causal block that has only the row's path. The kernel equals both."""
    lens, num_nodes = [0, 5, 37], 20
    pages = random_pages(lens, 2, 16, 8, dtype, seed=3)
    softmax = random_softmax(kind, 4, dtype)
    tree = random_tree(3, 6, num_nodes, seed=8).rows
    query = normal(3, num_nodes + 1, 4, 16, dtype=dtype, seed=1)
    kv = normal(3, num_nodes + 1, 4, 16, dtype=dtype, seed=2)
    keys, values = kv[:, :, :2], kv[:, :, 2:]
    caches = pages.clean()
    found = tree_attention_ref(
        query.double(), keys.double(), values.double(), *caches, pages.page_table, pages.context_lens, tree,
        window=window, softmax=softmax,
    )  # fmt: skip
    seen = is_ancestor(tree.words)
    for request in range(3):
        one = slice(request, request + 1)
        for row in range(num_nodes + 1):
            path = seen[request, row].nonzero()[:, 0]
            alone = block_attention_ref(
                query[one, path].double(), keys[one, path].double(), values[one, path].double(), *caches,
                pages.page_table[one], pages.context_lens[one], is_causal=True, window=window, softmax=softmax,
            )  # fmt: skip
            torch.testing.assert_close(found[request, row], alone[0, -1])
    own = tree_attention(
        query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, pages.context_lens, tree,
        window=window, softmax=softmax,
    )  # fmt: skip
    assert_rows_close(own, found, dtype)


@pytest.mark.parametrize(("num_splits", "window", "kind"), [(5, None, "both"), (2, None, "plain"), (5, 40, "plain")])
def test_parts_of_the_keys_add_up_to_attention_in_one_part(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, window: int | None, kind: str
) -> None:
    """Three row tiles, up to 6 tiles of context and 2 of the tree. A request without context has fewer tiles."""
    lens = [90, 0, 33]
    pages, softmax = random_pages(lens, 2, 16, 8, torch.float32, seed=3), random_softmax(kind, 4, torch.float32)
    tree = random_tree(3, 6, 20, seed=8).rows
    query, keys, values = (normal(3, 21, heads, 16, dtype=torch.float32, seed=heads) for heads in (4, 2, 2))
    given = (query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, pages.context_lens, tree)
    lengths: list[int] = []

    def combine(parts: Tensor, *rest: Any) -> None:
        lengths.append(len(parts))
        combine_parts(parts, *rest)

    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 16, num_splits, 1))
    monkeypatch.setattr(module, "combine_parts", combine)
    found = tree_attention(*given, window=window, softmax=softmax)
    assert lengths == [num_splits]
    caches = pages.clean()
    expected = tree_attention_ref(
        query, keys, values, *caches, pages.page_table, pages.context_lens, tree, window=window, softmax=softmax
    )
    assert_rows_close(found, expected, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [500, 9000, 40_000])
@pytest.mark.parametrize(("num_requests", "num_nodes"), [(1, 8), (1, 64), (2, 32), (4, 16), (4, 64), (1, 256)])
def test_long_contexts_of_few_requests_equal_the_reference(num_requests: int, num_nodes: int, context: int) -> None:
    lens = [context - 7 * request for request in range(num_requests)]
    pages = random_pages(lens, 8, 128, 16, torch.bfloat16, seed=3)
    tree = random_tree(num_requests, 15, num_nodes, seed=8).rows
    query, keys, values = (
        normal(num_requests, num_nodes + 1, heads, 128, dtype=torch.bfloat16, seed=seed)
        for seed, heads in enumerate((32, 8, 8))
    )
    table, context_lens = pages.page_table, pages.context_lens
    found = tree_attention(
        query, keys, values, pages.key_cache, pages.value_cache, table, context_lens, tree, window=None
    )
    wide = [tensor.float() for tensor in (query, keys, values)]
    caches = [cache.float() for cache in pages.clean()]
    expected = tree_attention_ref(*wide, *caches, table, context_lens, tree, window=None)  # type: ignore[misc, arg-type]
    assert_rows_close(found, expected, torch.bfloat16)


@pytest.mark.reference
def test_a_chain_attends_as_a_causal_block() -> None:
    pages = random_pages([3, 70], 1, 32, 16, torch.float32, seed=3)
    tree = built(*random_candidates(2, 7, 1, seed=1), 7).rows
    query, keys, values = (normal(2, 8, heads, 32, dtype=torch.float32, seed=heads) for heads in (3, 1, 1))
    given = (query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, pages.context_lens)
    expected = block_attention_ref(*given, is_causal=True, window=None, softmax=PLAIN)
    assert torch.equal(tree_attention_ref(*given, tree, window=None), expected)
