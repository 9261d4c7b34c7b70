"""Forced acceptance: a step computes everything, then a random draw replaces its number of accepted draft tokens.

Results with forced acceptance are marked `synthetic`. Random weights accept almost nothing, and tokens per second
depend on acceptance.
The draw is truncated-geometric: each draft token is accepted with the same probability, given the one before it. It
needs no waiting and no state, so every replay of a captured step draws anew. It adds ten small launches to a step.

Trees of random drafts are flat, because no token is likely. So a tree's path is forced too: its rows are spread evenly
over the rows of the tree, as the moved rows of a real path are.

Axis letters: R requests, N block rows, K draft tokens (N - 1), W rows of a path.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from dflash_kernels.drafts.draft_tree import Tree
from dflash_kernels.drafts.tree_path import Path
from dflash_kernels.steps.step_rows import RowState, StepRows
from dflash_kernels.suite import Kernels
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.scheduling.limits import Limits

TABLE_SIZE = 2**20
ROW_DISTANCE = 648055
"""Distance in the table between neighbouring batch rows: its golden section, so that no two rows are close."""


def acceptance_rates(mean: float, num_rows: int) -> list[float]:
    """Probability that the first 1, 2, ... K draft tokens are accepted, for a mean of `mean` tokens per step."""
    if not 1 <= mean <= num_rows:
        raise ValueError(f"acceptance {mean:g}, expected 1 to {num_rows}, the rows of a block")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**index for index in range(num_rows)) < mean else (low, middle)
    return [high**index for index in range(1, num_rows)]


def draw_table(rates: Sequence[float], seed: int = 0) -> Tensor:
    """Numbers of accepted draft tokens [TABLE_SIZE] int64, with the frequencies of `rates`, in random order.

    A request reads the entry of its remaining tokens, so it reads each entry at most once.
    """
    levels = (torch.arange(TABLE_SIZE, dtype=torch.float64) + 0.5) / TABLE_SIZE
    ascending = torch.tensor(sorted(rates), dtype=torch.float64)
    counts = len(rates) - torch.searchsorted(ascending, levels, right=True)
    return counts[torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(seed))]


def force_acceptance(pair: LoadedPair, mean: float) -> LoadedPair:
    """The pair with a random acceptance length of mean `mean` for whole blocks or trees, bonus included.

    A step that verifies fewer rows uses the same draw, truncated.
    """
    rates = acceptance_rates(mean, most_tokens(pair.limits))
    device, kernels = pair.placement.device, pair.placement.kernels
    path_rows = spread_rows(pair.limits).to(device) if pair.limits.num_tree_nodes else None
    kernels = _forcing(kernels, draw_table(rates).to(device), path_rows)
    target = pair.target
    if isinstance(target, OwnCacheTarget):
        target = copy(target)
        target.ends_early = False  # blocks end early where the target's own choice rejects a token
    return replace(pair, target=target, placement=replace(pair.placement, kernels=kernels))


def most_tokens(limits: Limits) -> int:
    """Most tokens that a step commits: the rows of a block, or of the longest path of a tree."""
    return min(limits.num_block_rows, (limits.num_tree_nodes or limits.num_draft_tokens) + 1)


def spread_rows(limits: Limits) -> Tensor:
    """Rows of a path [W] int64 that is spread over the rows of a tree, with 0 after its end."""
    depth = min(limits.num_tree_nodes, limits.num_draft_tokens)
    rows = [1 + place * (limits.num_tree_nodes - 1) // max(depth - 1, 1) for place in range(depth)]
    return torch.tensor([0, *rows, *[0] * (limits.num_draft_tokens - depth)])


def _forcing(kernels: Kernels, table: Tensor, path_rows: Tensor | None = None) -> Kernels:
    real, real_follow, real_tree = kernels.close_step, kernels.follow_tree, kernels.close_tree
    paths: dict[tuple[int, int], Tensor] = {}

    def force(step: StepRows, chosen: Tensor) -> Tensor:
        """Draft tokens: the drawn number of them equal the target's choice. Stops and limits then cut as usual."""
        places = torch.arange(len(chosen), device=chosen.device)
        drawn = table[(step.remaining + ROW_DISTANCE * places) % TABLE_SIZE]
        is_accepted = torch.arange(chosen.shape[1] - 1, device=drawn.device) < drawn[:, None]
        return torch.where(is_accepted, chosen[:, :-1], -1)

    def close(
        state: RowState, rows: Tensor, step: StepRows, draft_ids: Tensor, chosen: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        return real(state, rows, step, force(step, chosen), chosen, *rest)

    def close_tree(
        state: RowState, rows: Tensor, step: StepRows, path: Path, chosen: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        forced = path._replace(token_ids=force(step, chosen.gather(1, path.rows)))
        return real_tree(state, rows, step, forced, chosen, *rest)

    def follow(tree: Tree, chosen: Tensor, num_rows: int) -> Path:
        assert path_rows is not None, "a pair that verifies trees"
        real_follow(tree, chosen, num_rows)  # for its time
        size = (len(chosen), num_rows)
        if size not in paths:  # made before a capture, which comes after a step without one
            paths[size] = path_rows[:num_rows].repeat(len(chosen), 1)
        rows = paths[size]
        return Path(rows, rows[:, 1:])  # `close_tree` replaces these tokens by drawn ones

    return replace(kernels, close_step=close, close_tree=close_tree, follow_tree=follow)
