"""A guard against ranks that no longer do the same: a digest of every schedule and result, compared now and then."""

import hashlib

from dflash_runtime.errors import DFlashError
from dflash_runtime.ranks.rank_group import Ranks
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request

STEPS_PER_LOOK = 64
"""Steps between two comparisons. A comparison costs the host about 0.2 ms, and delays no step that is queued."""

DIGEST_BYTES = 16


class Witness:
    """The digest of everything that a rank has scheduled and committed. With one rank it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._num_steps = 0

    def see_batch(self, batch: Batch) -> None:
        """Note a step before it is queued. Every `STEPS_PER_LOOK` steps, compare.

        Raises:
            DFlashError: the ranks have scheduled or committed different things.
        """
        if self._ranks.size == 1:
            return
        decode = [(item.index, item.row) for item in batch.decode]
        chunks = [(item.request.index, item.start, item.end) for item in batch.chunks]
        additions = [(item.row, item.pages) for item in batch.additions]
        self._note((decode, chunks, batch.verify_width, batch.mean_width, additions))
        self._num_steps += 1
        if self._num_steps % STEPS_PER_LOOK == 0:
            self.compare()

    def see_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Note the tokens that a step committed for a request."""
        if self._ranks.size > 1:
            self._note((request.index, token_ids))

    def compare(self) -> None:
        """Compare the digests of all ranks.

        Raises:
            DFlashError: they differ.
        """
        if not self._ranks.are_equal(self._digest.digest()):
            raise DFlashError(
                f"the {self._ranks.size} GPUs no longer run the same steps: a fault of this program or of a GPU",
                id="ranks-diverged", found=self._num_steps, hint="run again; report it if it happens twice",
            )  # fmt: skip

    def _note(self, values: object) -> None:
        self._digest.update(repr(values).encode())
