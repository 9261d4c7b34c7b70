"""The data of one decode step: how tokens are sampled, the drafted tokens, and the rows to verify.

Axis letters: R requests, W verified rows per request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.logits.sampling import Distribution
from dflash_kernels.steps.step_rows import StepRows
from dflash_runtime.device.graphs.decode_graphs import StepMode
from dflash_runtime.device.shared_rows import GivenRows
from dflash_runtime.device.storage.state import DeviceState
from dflash_runtime.device.trees import VerifiedTree
from dflash_runtime.drafts.token_masks import TokenMasks


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one forward, [R] each, and the masks of grammars if a request has one."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    seeds: Tensor
    mode: StepMode
    masks: TokenMasks | None = None

    @classmethod
    def of(cls, state: DeviceState, rows: Tensor, mode: StepMode, masks: TokenMasks | None) -> "Sampling":
        """The parameters of state rows [R]. A greedy step reads no parameters: it gets the first R rows."""
        chosen = slice(len(rows)) if mode.is_greedy else rows
        return cls(
            state.temperatures[chosen], state.top_ks[chosen], state.top_ps[chosen], state.seeds[chosen], mode, masks
        )

    def filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Temperatures, top-ks and top-ps, in the order of the kernels' arguments, with one value per request."""
        return self.temperatures, self.top_ks, self.top_ps

    def after(self, positions: Tensor) -> Tensor:
        """Positions of the tokens sampled after these rows. A greedy step does not read them."""
        return positions if self.mode.is_greedy else positions + 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens. If they were sampled, `distribution` has their R * (W - 1) distributions."""

    token_ids: Tensor  # [R, W - 1] ids of the target; negative at positions and nodes without a draft token
    distribution: Distribution | Tensor | None = None  # over ids of the draft
    confidences: Tensor | None = None  # [R, W - 1] predictions that the target accepts, if the draft makes them
    features: Tensor | None = None  # [R, W - 1] their logits before a fit, with a row budget

    @classmethod
    def empty(cls, anchors: Tensor) -> "Proposal":
        """The proposal of plain decoding: no draft tokens after anchors [R]."""
        return cls(anchors.new_empty((len(anchors), 0)))

    def verified_ids(self, anchors: Tensor) -> Tensor:
        """The token ids [R, W] that the target reads, with anchors [R, 1] first.

        A draft may leave a position empty with a negative id, which is never accepted. The embedding lacks rows for
        negative ids, so the target reads id 0.
        """
        return torch.cat((anchors, self.token_ids.clamp(min=0)), dim=1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks that a decode step verifies, W rows of each of R requests. `given` has the rows that are run.

    With `tree`, the rows are the rows of trees, and `step` has their slots.
    """

    rows: Tensor  # [R] rows of the state
    step: StepRows
    page_table: Tensor
    sampling: Sampling
    proposal: Proposal
    token_ids: Tensor  # [R * W], or [n] of the given rows
    positions: Tensor  # [R, W]
    given: GivenRows | None = None  # None for all rows
    tree: VerifiedTree | None = None

    def run(self, values: Tensor) -> Tensor:
        """Values of whole blocks [R, W] -> of the rows that are run, [R * W] or [n]."""
        return values.flatten() if self.given is None else values.flatten()[self.given.places]


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows to write context KV for. Positions and slots may have any shape. Rows with slot PAD are not written."""

    features: Tensor | None  # [T, F] outputs of the target's tapped layers
    positions: Tensor
    slots: Tensor
