"""Early ends of blocks that a target reads token by token: no row runs behind the last accepted draft token.

Axis letters: R requests.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dflash_runtime.device.blocks import Blocks

MOST_REQUESTS = 4
"""Most requests of a block that may end early. In a larger batch the last rejection comes late, and is not awaited."""


Choose = Callable[[Blocks, Tensor, int], Tensor]
"""The target's tokens [R] after hidden states [R, hidden] of one column of blocks."""


class EarlyEnd:
    """Whether the rows of a step need another row, because a request accepted all its draft tokens so far."""

    def __init__(self, blocks: Blocks, choose: Choose) -> None:
        self._blocks, self._choose = blocks, choose
        self._is_accepted = torch.ones_like(blocks.rows, dtype=torch.bool)
        self._most_accepted: int | None = None

    @classmethod
    def of(cls, blocks: Blocks, choose: Choose) -> "EarlyEnd | None":
        """The early end of a step. None if draft tokens are not only compared with the target's choice."""
        is_plain = blocks.proposal.distribution is None and blocks.sampling.masks is None
        is_whole = blocks.given is None and blocks.tree is None
        return cls(blocks, choose) if is_plain and is_whole and len(blocks.rows) <= MOST_REQUESTS else None

    def needs_next(self, hidden: Tensor, column: int) -> bool:
        """Take the hidden states [R, hidden] of a column -> whether a request accepts the draft token behind it."""
        chosen, step = self._choose(self._blocks, hidden, column), self._blocks.step
        self._is_accepted &= (chosen == self._blocks.proposal.token_ids[:, column]) & (step.max_accepted > column)
        if bool(self._is_accepted.any()):
            return True
        self._most_accepted = column
        return False

    def limited(self) -> Blocks:
        """The blocks with a limit on accepted draft tokens, so that only rows that ran are committed.

        Rounding may depend on the number of rows. So the choice among all rows may differ in a tie.
        """
        if self._most_accepted is None:
            return self._blocks
        step = self._blocks.step
        limit = step.max_accepted.clamp(max=self._most_accepted)
        return replace(self._blocks, step=step._replace(max_accepted=limit))
