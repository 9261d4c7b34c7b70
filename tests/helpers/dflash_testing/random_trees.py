"""Random trees of draft tokens, for tests of kernels."""

import torch

from dflash_kernels.drafts.draft_tree import TreeRows, ancestor_words
from dflash_testing.tensors import DEVICE


def random_tree_rows(num_trees: int, num_nodes: int, seed: int) -> TreeRows:
    """Trees in which the parent of a row is one of the four rows before it. Every second row continues the last one."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = torch.zeros(2, num_trees, num_nodes + 1, dtype=torch.int64)
    for row in range(1, num_nodes + 1):
        back = torch.randint(1, 5, (num_trees,), generator=generator) if row % 2 else torch.ones(num_trees).long()
        parents[:, row] = (row - back).clamp(min=0)
        depths[:, row] = depths.gather(1, parents[:, row : row + 1])[:, 0] + 1
    words = ancestor_words(parents[:, 1:], num_nodes)
    return TreeRows(depths.to(DEVICE), words.to(DEVICE), parents.to(DEVICE))
