"""Ranks as threads of one process over gloo, so that a test starts no process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_runtime.ranks.exchanges import GlooExchange, connect_store, open_store
from dflash_runtime.ranks.rank_group import Ranks

Found = TypeVar("Found")

LIMIT_S = 30.0
"""Seconds that a rank waits for the others. A failed rank of a test ends the others after this time."""


class RankThreads:
    """A group of ranks on the CPU. `run` makes the same call on each rank, in a thread of its own."""

    def __init__(self, size: int) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="rank")
        self._store = open_store()
        self.ranks = list(self._pool.map(lambda rank: self._join(rank, size), range(size)))

    def run(self, call: Callable[[Ranks], Found]) -> list[Found]:
        """The results of all ranks. Raises the error of the first rank that has one."""
        return [future.result() for future in [self._pool.submit(call, item) for item in self.ranks]]

    def close(self) -> None:
        self._pool.shutdown()

    def _join(self, rank: int, size: int) -> Ranks:
        store = self._store if rank == 0 else connect_store(self._store.port)  # one client serves one thread at a time
        exchange = GlooExchange(store, rank, size, limit_s=LIMIT_S)
        return Ranks(rank, size, exchange, exchange)
