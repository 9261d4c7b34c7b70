"""What one decode step works on: how its tokens are sampled, what was drafted, and the rows that are verified.

Axis letters: R requests, W rows of each that are verified.
"""

from dataclasses import dataclass

from torch import Tensor

from dflash_kernels.sampling import Distribution
from dflash_kernels.step_rows import StepRows
from dflash_runtime.device.decode_graphs import StepMode


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one forward are sampled, [R] each."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    seeds: Tensor
    mode: StepMode

    def filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the order of the kernels, to which each value stands for all of a request's block rows."""
        return self.temperatures, self.top_ks, self.top_ps

    def after(self, positions: Tensor) -> Tensor:
        """Positions of the tokens that are sampled after these rows; a greedy step needs none."""
        return positions if self.mode.is_greedy else positions + 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, and the distribution of R * (W - 1) rows they were sampled from where they were sampled."""

    token_ids: Tensor  # [R, W - 1] over the target's ids; negative where the draft proposes nothing
    distribution: Distribution | Tensor | None = None  # over the draft's ids

    @classmethod
    def empty(cls, anchors: Tensor) -> "Proposal":
        """No drafts after these anchors [R], which is plain decoding."""
        return cls(anchors.new_empty((len(anchors), 0)))


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a decode step verifies: the blocks of R requests, W rows of each."""

    rows: Tensor  # [R] of the state
    step: StepRows
    page_table: Tensor
    sampling: Sampling
    proposal: Proposal
    token_ids: Tensor  # [R * W]
    positions: Tensor  # [R, W]


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows whose context KV is to be written, in any shape; those whose slot is PAD are not."""

    features: Tensor | None  # [T, F], of the target's tapped layers
    positions: Tensor
    slots: Tensor
