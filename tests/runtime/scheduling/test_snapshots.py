"""Slots of snapshots, and lookups that end where a snapshot is."""

from collections.abc import Sequence

import pytest

from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request, SnapshotAt
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.snapshots import Lookup, SnapshotIndex, branches_and_ends

PAGE = 4


def taken(index: SnapshotIndex) -> int:
    slot = index.take()
    assert slot is not None
    return slot


def kept(index: SnapshotIndex, page: int, position: int, below: int = 0) -> int:
    slot = taken(index)
    index.keep(page, slot, position, below)
    return slot


def test_the_snapshot_that_saves_fewest_tokens_is_replaced() -> None:
    index = SnapshotIndex(3)
    for page, position, below in ((1, 40, 0), (2, 60, 40), (3, 100, 70)):
        kept(index, page, position, below)
    assert kept(index, 4, 1000) == 1
    assert index.pages == (1, 3, 4)


def test_a_snapshot_that_nobody_uses_loses_to_newer_ones() -> None:
    """Each snapshot of 30 tokens replaces the one before it until the unused snapshot of 100 tokens is older."""
    index = SnapshotIndex(2)
    kept(index, 1, 100)
    for page in range(2, 7):
        kept(index, page, 30)
    assert not index.has(1)


def test_a_snapshot_that_is_used_stays() -> None:
    index = SnapshotIndex(2)
    slot = kept(index, 1, 100)
    for page in range(2, 40):
        kept(index, page, 30)
        assert index.use(1) == slot


def test_the_order_of_replacement_stays_small() -> None:
    """Each use enters a snapshot anew. The latest ranks give the order."""
    index = SnapshotIndex(3)
    for page, position in ((1, 50), (2, 40), (3, 60)):
        kept(index, page, position)
    for _ in range(1000):
        index.use(1)
    assert len(index._order) < 200
    for page in (4, 5, 6):
        kept(index, page, 1000)
    assert index.pages == (4, 5, 6)
    index.check_integrity([])


def test_slots_of_requests_are_not_replaced() -> None:
    index = SnapshotIndex(2)
    slots = [taken(index), taken(index)]
    assert index.take() is None
    index.check_integrity(slots)
    index.give_back(slots[0])
    assert index.take() == slots[0]


def test_requests_hold_at_most_a_quarter_of_the_slots_as_spares() -> None:
    index = SnapshotIndex(11)
    assert [index.take_spare() is None for _ in range(3)] == [False, False, True]


def test_a_page_keeps_its_first_snapshot() -> None:
    index = SnapshotIndex(2)
    first, second = kept(index, 7, 8), kept(index, 7, 8)
    assert index.use(7) == first
    assert index.free == (second,)


@pytest.mark.parametrize(
    ("lookup", "wanted"),
    [
        (Lookup(0, 0, 9), [9]),
        (Lookup(4, 0, 9), [4, 9]),
        (Lookup(4, 4, 9), [9]),
        (Lookup(9, 0, 9), [9]),
        (Lookup(9, 9, 9), []),
        (Lookup(0, 0, 0), []),
    ],
)
def test_a_prompt_keeps_its_branch_and_its_end(lookup: Lookup, wanted: list[int]) -> None:
    assert branches_and_ends(lookup) == wanted


class TestLookups:
    """A cache with the pages of a text of ten pages, and snapshots after some of them."""

    text = tuple(range(10 * PAGE))

    def cached(self, boundaries: Sequence[int], num_pages: int = 30) -> tuple[PrefixCache, PagePool, Request]:
        pool = PagePool(num_pages, PAGE)
        cache = PrefixCache(pool, snapshots=SnapshotIndex(8))
        first = self.request(self.text)
        first.pages += pool.allocate(10) or []
        cache.publish(first, len(self.text))
        assert cache.snapshots is not None
        for boundary in boundaries:
            cache.keep(first, SnapshotAt(boundary * PAGE, taken(cache.snapshots)))
        return cache, pool, first

    def request(self, tokens: Sequence[int]) -> Request:
        return Request(index=0, prompt_token_ids=tuple(tokens), params=SamplingParams())

    @pytest.mark.parametrize(("num_equal", "restored"), [(10, 7), (28, 7), (27, 3), (12, 3), (11, 0)])
    def test_a_match_ends_at_the_last_snapshot(self, num_equal: int, restored: int) -> None:
        num_equal = num_equal * PAGE if num_equal == 10 else num_equal
        cache, pool, first = self.cached((3, 7))
        other = self.request((*self.text[:num_equal], *range(100, 120)))
        cache.match(other)
        assert other.prefilled_len == restored * PAGE
        assert other.pages == first.pages[:restored]
        assert (other.restored.position if other.restored else 0) == restored * PAGE
        most = (len(other.prompt_token_ids) - 1) // PAGE
        assert other.keep_at == {pages * PAGE for pages in (num_equal // PAGE, most) if pages > restored}
        pool.check_integrity([first.pages, other.pages])

    def test_a_snapshot_is_dropped_with_its_page(self) -> None:
        cache, pool, first = self.cached((3, 10), num_pages=11)
        assert cache.snapshots is not None
        pool.release(first.pages)
        assert pool.allocate(1) == [first.pages[9]]
        assert cache.snapshots.pages == (first.pages[2],)
        cache.check_integrity()

    def test_a_refused_prompt_is_looked_up_again_after_a_new_snapshot(self) -> None:
        cache, _, first = self.cached((3,))
        other = self.request((*self.text, 1))
        assert cache.finds_more(other, 0)
        assert not cache.finds_more(other, 3)
        assert cache.snapshots is not None
        cache.keep(first, SnapshotAt(8 * PAGE, taken(cache.snapshots)))
        assert cache.finds_more(other, 3)

    def test_a_snapshot_of_a_forgotten_page_is_not_kept(self) -> None:
        cache, pool, first = self.cached((), num_pages=11)
        assert cache.snapshots is not None
        slot = taken(cache.snapshots)
        pool.release(first.pages)
        pool.allocate(1)
        cache.keep(first, SnapshotAt(10 * PAGE, slot))
        assert not cache.snapshots.pages
        cache.snapshots.check_integrity([])
