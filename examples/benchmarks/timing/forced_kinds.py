"""Forced acceptance of requests of several kinds, with draft confidences that say a stated amount about it.

The kind of a request is its row of the state, modulo the number of kinds. Each kind has a table of drawn blocks: the
number of accepted draft tokens, and a confidence for each draft token. A request takes the block that its remaining
tokens point to, so the confidences and the outcome of a step belong together, and each replay of a captured step takes
other blocks. Nothing waits for the device. The draft's own confidences are computed all the same, then replaced.

Axis letters: R requests, K draft tokens, B blocks of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dflash_kernels.logits.largest_probability import Likeliest
from dflash_kernels.steps.step_rows import Bounds, RowState, StepRows
from dflash_kernels.suite import Kernels
from dflash_runtime.device.setup.loading import LoadedPair
from timing.forced import ROW_DISTANCE, acceptance_rates

Feature = Literal["perfect", "measured", "uninformative"]
NUM_BLOCKS = 2**16
SURE = 0.999
"""The confidence of a token that is accepted, if the feature is perfect; 1 minus it for a rejected token."""

CONFIDENCES = (
    0.079, 0.147, 0.216, 0.297, 0.389, 0.481, 0.578, 0.678, 0.774, 0.858, 0.920, 0.960, 0.982, 0.994, 0.999,
)  # fmt: skip
"""Calibrated predictions of the bundled pair, of bins with equally many tokens: docs/measurements/row-budget.md."""


@dataclass(frozen=True)
class KindTables:
    """Blocks of all kinds: accepted draft tokens [kinds, B] int64, and confidences [kinds, B, K] float32.

    means  the expected number of tokens per step of each kind, bonus included
    """

    means: tuple[float, ...]
    accepted: Tensor
    confidences: Tensor

    @classmethod
    def draw(cls, means: Sequence[float], num_draft_tokens: int, feature: Feature) -> "KindTables":
        """Draw the blocks of kinds with these means. Counts do not depend on the feature."""
        generator = torch.Generator().manual_seed(0)
        kinds = [_accepted(mean, num_draft_tokens, generator) for mean in means]
        confidences = [_confidences(*kind, num_draft_tokens, feature, generator) for kind in kinds]
        return cls(tuple(means), torch.stack([counts for _, counts in kinds]), torch.stack(confidences))

    def to(self, device: torch.device) -> "KindTables":
        return replace(self, accepted=self.accepted.to(device), confidences=self.confidences.to(device))

    def blocks(self, rows: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted tokens [R] and confidences [R, K] of state rows [R], by their numbers of remaining tokens [R]."""
        kind, place = rows % len(self.accepted), (remaining + ROW_DISTANCE * rows) % NUM_BLOCKS
        return self.accepted[kind, place], self.confidences[kind, place]

    def drawn(self, row: int, remaining: Sequence[int]) -> list[int]:
        """Accepted draft tokens that a state row drew in steps with these remaining tokens, verified or not."""
        places = torch.tensor(remaining, dtype=torch.int64, device=self.accepted.device)
        return [int(count) for count in self.blocks(torch.full_like(places, row), places)[0]]


def _accepted(mean: float, num_draft_tokens: int, generator: torch.Generator) -> tuple[float, Tensor]:
    """The acceptance rate of a token after accepted ones, and the accepted tokens of NUM_BLOCKS blocks."""
    rates = acceptance_rates(mean, num_draft_tokens + 1)
    levels = (torch.arange(NUM_BLOCKS, dtype=torch.float64) + 0.5) / NUM_BLOCKS
    counts = (levels[:, None] < torch.tensor(rates, dtype=torch.float64)).sum(1)
    return rates[0], counts[torch.randperm(NUM_BLOCKS, generator=generator)]


def _confidences(
    rate: float, accepted: Tensor, num_draft_tokens: int, feature: Feature, generator: torch.Generator
) -> Tensor:
    """Confidences [B, K] of blocks with these accepted counts [B].

    A measured confidence is drawn given the outcome of its token, as the bundled pair's is. A token after a
    rejected one has an outcome drawn by `rate`.
    """
    place, shape = torch.arange(num_draft_tokens), (len(accepted), num_draft_tokens)
    is_accepted = place < accepted[:, None]
    if feature == "perfect":
        return torch.where(is_accepted, SURE, 1 - SURE)
    if feature == "measured":
        is_drawn = torch.rand(shape, generator=generator) < rate
        is_accepted = torch.where(place > accepted[:, None], is_drawn, is_accepted)
    values, levels = torch.tensor(CONFIDENCES), torch.rand(shape, generator=generator)
    weights = torch.stack((1 - values, values)) if feature == "measured" else torch.ones(2, len(values))
    rejected, taken = (
        torch.searchsorted((own.cumsum(0) / own.sum())[:-1].contiguous(), levels, right=True) for own in weights
    )
    return values[torch.where(is_accepted, taken, rejected)]


@dataclass
class _Step:
    """The blocks of the step that runs."""

    accepted: Tensor = field(default_factory=lambda: torch.empty(0))
    confidences: Tensor = field(default_factory=lambda: torch.empty(0))


def force_kinds(pair: LoadedPair, tables: KindTables) -> LoadedPair:
    """The pair with drawn blocks: steps accept their tokens, cut to the verified rows, and get their confidences."""
    kernels = _forcing(pair.placement.kernels, tables.to(pair.placement.device))
    return replace(pair, placement=replace(pair.placement, kernels=kernels))


def _forcing(kernels: Kernels, tables: KindTables) -> Kernels:
    step_now = _Step()

    def open_step(state: RowState, rows: Tensor, num_block: int, num_verified: int, bounds: Bounds) -> StepRows:
        step = kernels.open_step(state, rows, num_block, num_verified, bounds)
        step_now.accepted, step_now.confidences = tables.blocks(rows, step.remaining)
        return step

    def largest_probability(logits: Tensor) -> Likeliest:
        found, confidences = kernels.largest_probability(logits), step_now.confidences
        return found._replace(probabilities=confidences[:, : len(logits) // len(confidences)].flatten())

    def close_step(
        state: RowState, rows: Tensor, step: StepRows, draft_ids: Tensor, chosen: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        is_accepted = torch.arange(draft_ids.shape[1], device=rows.device) < step_now.accepted[:, None]
        # A row that was not verified keeps its mark, by which the host counts verified rows.
        forced = torch.where(draft_ids < 0, draft_ids, torch.where(is_accepted, chosen[:, :-1], -1))
        return kernels.close_step(state, rows, step, forced, chosen, *rest)

    return replace(kernels, open_step=open_step, close_step=close_step, largest_probability=largest_probability)
