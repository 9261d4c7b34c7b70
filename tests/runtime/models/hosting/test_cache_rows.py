"""Rows of transformers' caches: texts of several caches in one cache."""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dflash_runtime.models.hosting.cache_rows import CacheLayout, CacheRow, copy_cache, find_layout, gather_rows

WINDOW = 4


class StateLayer:
    """A layer with a state, and a number of tokens."""

    def __init__(self, state: torch.Tensor) -> None:
        self.states = {0: state}
        self.is_ready = True


def make_cache(length: int, first: float) -> Any:
    """A cache of one text: key and value t are `first + t`, the state is `first`."""
    cache: Any = DynamicCache()
    rows = (first + torch.arange(length).float()).view(1, 1, -1, 1)
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(WINDOW)]
    for layer in cache.layers:
        layer.update(rows, -rows)
    cache.layers.append(StateLayer(torch.full((1, 2), first)))
    return cache


LAYOUT = find_layout(make_cache(1, 0.0), make_cache(9, 0.0), (1, 9))


def test_the_layout_of_a_cache() -> None:
    assert set(LAYOUT.grown) == {("layers", index, name) for index in (0, 1) for name in ("keys", "values")}
    assert set(LAYOUT.grown.values()) == {2}
    assert LAYOUT.counts == {("layers", 1, "cumulative_length")}
    assert LAYOUT.problem is None


def test_a_part_that_rows_cannot_share_is_named() -> None:
    few, many = make_cache(1, 0.0), make_cache(9, 0.0)
    many.layers[2].is_ready = False
    assert find_layout(few, many, (1, 9)) == CacheLayout(problem="layers.2.is_ready")
    few, many = make_cache(1, 0.0), make_cache(9, 0.0)
    for cache in (few, many):
        cache.layers[2].states[0] = torch.zeros(2, 1)
    assert find_layout(few, many, (1, 9)).problem == "layers.2.states.0"


def test_rows_of_different_lengths_are_padded_on_the_left() -> None:
    short, long = make_cache(2, 10.0), make_cache(6, 20.0)
    cache = gather_rows([CacheRow(short, 0, 1, 2), CacheRow(long, 0, 1, 6)], LAYOUT)
    assert cache.layers[0].keys[:, 0, :, 0].tolist() == [[0, 0, 0, 0, 10, 11], [20, 21, 22, 23, 24, 25]]
    assert cache.layers[1].values[:, 0, :, 0].tolist() == [[0, -10, -11], [-23, -24, -25]]
    assert cache.layers[1].cumulative_length == 6
    assert cache.layers[2].states[0].tolist() == [[10, 10], [20, 20]]


def test_a_row_without_its_padding_and_rejected_tokens() -> None:
    short, long = make_cache(2, 10.0), make_cache(6, 20.0)
    both = gather_rows([CacheRow(long, 0, 1, 6), CacheRow(short, 0, 1, 2)], LAYOUT)
    alone = gather_rows([CacheRow(both, 1, 2, 2)], LAYOUT)
    assert alone.layers[0].keys.flatten().tolist() == [10, 11]
    assert alone.layers[1].keys.flatten().tolist() == [10, 11]
    assert alone.layers[1].cumulative_length == 2
    plain = CacheLayout({("layers", 0, "keys"): 2, ("layers", 0, "values"): 2})
    cropped = gather_rows([CacheRow(long, 0, 1, 4, num_rejected=2)], plain)
    assert cropped.layers[0].keys.flatten().tolist() == [20, 21, 22, 23]


def test_the_same_rows_are_the_same_cache() -> None:
    both = gather_rows([CacheRow(make_cache(3, 1.0), 0, 1, 3), CacheRow(make_cache(3, 9.0), 0, 1, 3)], LAYOUT)
    rows = [CacheRow(both, row, 2, 3) for row in (0, 1)]
    assert gather_rows(rows, LAYOUT) is both
    turned = gather_rows(rows[::-1], LAYOUT)
    assert turned is not both
    assert turned.layers[2].states[0][:, 0].tolist() == [9, 1]


def test_a_copy_has_states_of_its_own_and_shares_keys() -> None:
    cache = make_cache(6, 20.0)
    copied = copy_cache(cache, LAYOUT)
    assert copied.layers[0].keys is cache.layers[0].keys
    copied.layers[2].states[0].zero_()
    more = torch.zeros(1, 1, 1, 1)
    for layer in copied.layers[:2]:
        layer.update(more, more)
    assert cache.layers[2].states[0].tolist() == [[20, 20]]
    assert [layer.get_seq_length() for layer in cache.layers[:2]] == [6, 6]
    assert [layer.get_seq_length() for layer in copied.layers[:2]] == [7, 7]
