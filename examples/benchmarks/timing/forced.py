"""Forced acceptance: a step computes all it would, then its count of accepted drafts is replaced by a drawn one.

Figures made with it are `synthetic`: random weights accept next to nothing, and how a step's time turns into tokens
depends on acceptance alone. The draw is truncated-geometric, each drafted token accepted with the same probability
after the one before it. It needs no waiting and no state, so a captured step draws afresh in every replay; it adds ten
small launches to a step.

Axis letters: R requests, N block rows, K drafted tokens (N - 1).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_kernels.step_rows import RowState, StepRows
from dflash_kernels.suite import Kernels
from dflash_runtime.device.loading import LoadedPair

TABLE_SIZE = 2**20
ROW_DISTANCE = 648055
"""Entries between one batch row's draws and the next row's: the golden section of the table, so that none are close."""


def acceptance_rates(mean: float, num_rows: int) -> list[float]:
    """How often the first 1, 2, ... K drafts are all accepted, when a step commits `mean` tokens of `num_rows` rows."""
    if not 1 <= mean <= num_rows:
        raise ValueError(f"acceptance {mean:g}, expected 1 to {num_rows}, the rows of a block")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**index for index in range(num_rows)) < mean else (low, middle)
    return [high**index for index in range(1, num_rows)]


def draw_table(rates: Sequence[float], seed: int = 0) -> Tensor:
    """[TABLE_SIZE] int64 numbers of accepted drafts, as often as the rates say.

    Their order is random, and a request walks through them by the tokens that remain to it: no entry comes twice.
    """
    levels = (torch.arange(TABLE_SIZE, dtype=torch.float64) + 0.5) / TABLE_SIZE
    counts = (levels[:, None] < torch.tensor(rates, dtype=torch.float64)).sum(1)
    return counts[torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(seed))]


def force_acceptance(pair: LoadedPair, mean: float) -> LoadedPair:
    """The pair with acceptance drawn around `mean` tokens a step of a whole block, the bonus included.

    A step that verifies fewer rows has the same draw, cut at its rows.
    """
    rates = acceptance_rates(mean, pair.limits.num_lookahead_tokens)
    kernels = _forcing(pair.placement.kernels, draw_table(rates).to(pair.placement.device))
    return replace(pair, placement=replace(pair.placement, kernels=kernels))


def _forcing(kernels: Kernels, table: Tensor) -> Kernels:
    real = kernels.close_step

    def close(
        state: RowState, rows: Tensor, step: StepRows, draft_ids: Tensor, chosen: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        places = torch.arange(len(rows), device=rows.device)
        drawn = table[(step.remaining + ROW_DISTANCE * places) % TABLE_SIZE]
        is_accepted = torch.arange(draft_ids.shape[1], device=drawn.device) < drawn[:, None]
        # Drafts that are what the target says as far as the draw goes: stops and limits then cut as they always do.
        forced = torch.where(is_accepted, chosen[:, :-1], -1)
        return real(state, rows, step, forced, chosen, *rest)

    return replace(kernels, close_step=close)
