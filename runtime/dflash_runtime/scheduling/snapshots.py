"""Which snapshots of recurrent states the prefix cache keeps. Host only: knows pages and slots, no tensors.

A hit on a target with recurrent layers continues from a state, so it ends where a snapshot exists. A snapshot belongs
to a published page and is dropped with it. `SnapshotIndex` hands out a fixed number of slots. If all are in use, the
snapshot with the lowest worth is replaced. The worth is the number of tokens that a hit saves. It ages by the
GreedyDual rule, so that an unused snapshot loses to newer ones.
Sources: Young 1994, "The k-server dual and loose competitiveness for paging" (GreedyDual); Pan et al. 2025, "Marconi:
Prefix Caching for the Era of Hybrid LLMs" (snapshots at branches and at the ends of texts).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

SPARE_SHARE = 0.25
"""The most slots that running requests may hold as spares."""

MOST_OUTDATED = 64
"""Outdated entries of the order of snapshots that are kept besides one for each snapshot."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a lookup, in pages of a text.

    num_found      pages that the cache holds
    num_restored   pages before the snapshot that the request continues from
    num_pages      full pages of the text before its last token: the most that a later lookup can find
    """

    num_found: int
    num_restored: int
    num_pages: int


Policy = Callable[[Lookup], Sequence[int]]
"""The numbers of pages after which a request keeps a snapshot while its prompt runs, in ascending order."""


def branches_and_ends(found: Lookup) -> list[int]:
    """Keep the state where the text leaves the cached texts, and at the end of the prompt.

    The next text with the same beginning then continues from the branch, and the next turn of a conversation from the
    end. `docs/measurements/snapshots.md` compares policies.
    """
    return sorted({item for item in (found.num_found, found.num_pages) if item > found.num_restored})


@dataclass(slots=True)
class Kept:
    """A snapshot: its slot, the tokens that a hit saves, its rank, and the number of its last use.

    The snapshot with the lowest rank is replaced, among equals the one with the oldest use.
    """

    slot: int
    worth: int
    rank: float
    last_use: int = 0


class SnapshotIndex:
    """Snapshots by page. A slot is free, taken by a request, or has the snapshot of one page."""

    def __init__(self, num_slots: int, policy: Policy = branches_and_ends) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.most_spares = int(num_slots * SPARE_SHARE)
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages that have a snapshot."""
        return tuple(self._kept)

    @property
    def free(self) -> tuple[int, ...]:
        """The slots that nobody uses."""
        return tuple(self._free)

    def clear(self) -> None:
        """Make every slot free."""
        self._kept: dict[int, Kept] = {}  # by page
        self._order: list[tuple[float, int, int]] = []  # a heap of rank, number of use and page, some of them outdated
        self._num_uses = 0
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._age = 0.0
        self.num_spares = 0

    def has(self, page: int) -> bool:
        """Whether a page has a snapshot."""
        return page in self._kept

    def depth(self, pages: Sequence[int]) -> int:
        """The number of pages before the last snapshot among these pages of a text."""
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self._kept), 0)

    def use(self, page: int) -> int:
        """The slot of a page's snapshot, which gets its full worth again."""
        kept = self._kept[page]
        kept.rank = self.rank(kept.worth)
        self._enqueue(page, kept)
        return kept.slot

    def take(self) -> int | None:
        """A slot for a new snapshot, or None if requests hold all slots."""
        while not self._free and self._kept:
            item = heappop(self._order)
            if self._is_current(item):
                self._age, _, page = item
                self.drop(page)
        return self._free.pop() if self._free else None

    def take_spare(self) -> int | None:
        """A slot that a request holds while it decodes, or None if enough slots are spares."""
        slot = self.take() if self.num_spares < self.most_spares else None
        self.num_spares += slot is not None
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot that a request took."""
        self._free.append(slot)

    def keep(self, page: int, slot: int, position: int, below: int) -> None:
        """Enter the snapshot of a published page in a slot that was taken. A page keeps its first snapshot.

        It includes `position` rows of its text, and the snapshot before it `below` rows.
        """
        if page in self._kept:
            self.give_back(slot)
        else:
            worth = self.worth(position, below)
            self._kept[page] = kept = Kept(slot, worth, self.rank(worth))
            self._enqueue(page, kept)

    def worth(self, position: int, below: int) -> int:
        """The tokens that a hit of a snapshot saves."""
        return position - below

    def rank(self, worth: int) -> float:
        """The rank of a snapshot that is used now."""
        return self._age + worth

    def drop(self, page: int) -> None:
        """Forget the snapshot of a page, if it has one."""
        kept = self._kept.pop(page, None)
        if kept is not None:
            self._free.append(kept.slot)

    def _enqueue(self, page: int, kept: Kept) -> None:
        """Enter the rank of a snapshot. Outdated entries are removed when they are many."""
        self._num_uses += 1
        kept.last_use = self._num_uses
        heappush(self._order, (kept.rank, kept.last_use, page))
        if len(self._order) > 2 * len(self._kept) + MOST_OUTDATED:
            self._order = [item for item in self._order if self._is_current(item)]
            heapify(self._order)

    def _is_current(self, item: tuple[float, int, int]) -> bool:
        _, number, page = item
        return page in self._kept and self._kept[page].last_use == number

    def check_integrity(self, taken: Sequence[int]) -> None:
        """Assert that every slot is in one state. `taken` are the slots that requests hold."""
        slots = [*self._free, *taken, *(kept.slot for kept in self._kept.values())]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or has two owners"
