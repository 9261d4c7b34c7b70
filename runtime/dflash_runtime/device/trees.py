"""Steps that verify a tree of draft tokens instead of one block: many paths in one forward of the target.

A tree's rows have slots of their own: row i is stored in the slot of position `kv_len + i`. After the target has chosen
a path, the KV rows of this path move to the slots of its positions. Then the step ends as with a block.

Axis letters: R requests, N nodes, M rows of a tree (N + 1), K drafted positions, C candidates, W rows of a path,
V vocabulary of the draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.draft_tree import Tree, TreeRows
from dflash_kernels.slot_mapping import PAD
from dflash_kernels.step_rows import Bounds, RowState, StepRows
from dflash_kernels.suite import Kernels
from dflash_kernels.tree_path import PathRecords
from dflash_runtime.device.recurrent import RecurrentStates
from dflash_runtime.drafts.draft import Draft, SelectingDraft, to_target
from dflash_runtime.models.layers import Attend


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """The trees of a step, how their rows depend on each other, and the slots [R, M] of their KV rows."""

    tree: Tree
    rows: TreeRows
    slots: Tensor

    @classmethod
    def of(cls, kernels: Kernels, tree: Tree, num_positions: int, slots: Tensor) -> "VerifiedTree":
        """The trees with `num_positions` as the greatest depth, and slots [R, M or more] of consecutive positions."""
        depths, parents = (F.pad(item, (1, 0)) for item in (tree.depths, tree.parents))
        words = kernels.ancestor_words(tree.parents, num_positions)
        return cls(tree, TreeRows(depths, words, parents), slots[:, : depths.shape[1]].contiguous())

    def close(
        self, kernels: Kernels, state: RowState, state_rows: Tensor, step: StepRows, chosen: Tensor,
        max_accepted: Tensor, is_finite: Tensor, pages: Tensor, states: RecurrentStates | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Commit the path that the target chose -> packed results of the path, and slots [R, M] of committed rows.

        Moves the path's rows in `pages`, and its records in the `states` of recurrent layers. `chosen` and `is_finite`
        [R, M] describe every row. The other arguments are as in `close_step_ref`, with the slots of the path's
        positions in `step`.
        """
        num_rows = step.slots.shape[1]
        path = kernels.follow_tree(self.tree, chosen, num_rows)
        packed, slots = kernels.close_step(
            state, state_rows, step, path.token_ids, chosen.gather(1, path.rows), max_accepted,
            is_finite.gather(1, path.rows),
        )  # fmt: skip
        kernels.move_rows(pages, self.slots.gather(1, path.rows), slots)
        if states is not None:
            states.move_path(PathRecords(state_rows, step.context_lens, path.rows, slots))
        # Rows after the end of a path are the anchor's row without a slot, so the greatest slot is the row's own.
        return packed, torch.full_like(self.slots, PAD).scatter_reduce(1, path.rows, slots, "amax")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The number of nodes of each tree, and how many tokens per position are considered."""

    num_nodes: int
    num_candidates: int

    def open(
        self, kernels: Kernels, state: RowState, rows: Tensor, num_block: int, width: int, bounds: Bounds
    ) -> tuple[StepRows, Tensor]:
        """The rows of a step as `open_step_ref` gives them for a block, and slots [R, M or more] of the tree's rows."""
        num_rows = max(num_block, self.num_nodes + 1)
        step = kernels.open_step(state, rows, num_rows, num_rows, bounds)
        block = step._replace(
            positions=step.positions[:, :num_block].contiguous(),
            block_ids=step.block_ids[:, :num_block].contiguous(),
            slots=step.slots[:, :width].contiguous(),
        )
        return block, step.slots

    def draft(
        self, kernels: Kernels, draft: Draft, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int
    ) -> Tree:
        """Draft the first `num_drafts` masks of blocks [R, N] -> a tree of each block, with ids of the target."""
        if isinstance(draft, SelectingDraft):
            token_ids, scores = draft.candidate_scores(block_ids, positions, attend, num_drafts)
            log_probs = self._cut(scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1))
        else:
            token_ids, log_probs = self._best(kernels, draft.logits(block_ids, positions, attend, num_drafts))
        return kernels.build_tree(log_probs, to_target(draft, token_ids), self.num_nodes)

    def _cut(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities [R, K, C, C] with -inf for all but the most likely candidates of each row."""
        if self.num_candidates >= log_probs.shape[-1]:
            return log_probs
        kept = log_probs.topk(self.num_candidates, dim=-1)
        return torch.full_like(log_probs, -torch.inf).scatter(-1, kept.indices, kept.values)

    def _best(self, kernels: Kernels, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens [R, K, C] of logits [R, K, V] in descending order, and log-probabilities [R, K, 1, C]."""
        num_requests, num_positions, vocab_size = logits.shape
        # More candidates than nodes change no tree: a node's better siblings are nodes too.
        count = min(self.num_candidates, self.num_nodes, vocab_size)
        flat = logits.flatten(0, 1)
        token_ids, values = kernels.top_tokens(flat, count)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        # In ascending order of ids, so that equal logits rank as in `argmax`.
        values, order = values.to(dtype).sort(dim=1, descending=True, stable=True)
        best = kernels.largest_probability(flat).probabilities.to(dtype).log()
        log_probs = values - values[:, :1] + best[:, None]
        shape = (num_requests, num_positions, count)
        return token_ids.gather(1, order).view(shape), log_probs.view(shape)[:, :, None]
