"""Steps that verify a tree of draft tokens instead of one block: many paths in one forward of the target.

A tree's rows have slots of their own: row i is stored in the slot of position `kv_len + i`. After the target has chosen
a path, the KV rows of this path move to the slots of its positions. Then the step ends as with a block.

Axis letters: R requests, N nodes, M rows of a tree (N + 1), N' rows of a block, K drafted positions, C candidates,
W rows of a path, V vocabulary of the draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.drafts.draft_tree import Tree
from dflash_kernels.drafts.tree_path import PathRecords
from dflash_kernels.steps.step_rows import RowState, StepRows
from dflash_kernels.suite import Kernels
from dflash_runtime.device.storage.recurrent import RecurrentStates
from dflash_runtime.drafts.draft import Draft, SelectingDraft, to_target
from dflash_runtime.models.layers import Attend


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """The trees of a step, and the number W of rows of the path that each tree gives."""

    tree: Tree
    num_path: int

    def close(
        self, kernels: Kernels, state: RowState, state_rows: Tensor, step: StepRows, chosen: Tensor,
        max_accepted: Tensor, is_finite: Tensor, pages: Tensor, states: RecurrentStates | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Commit the path that the target chose -> packed results of the path, and slots [R, M] of committed rows.

        Moves the path's rows in `pages`, and its records in the `states` of recurrent layers. The other arguments are
        as in `close_tree_ref`.
        """
        path = kernels.follow_tree(self.tree, chosen, self.num_path)
        packed, slots, row_slots = kernels.close_tree(state, state_rows, step, path, chosen, max_accepted, is_finite)
        kernels.move_rows(pages, step.slots, path.rows, slots)
        if states is not None:
            states.move_path(PathRecords(state_rows, step.context_lens, path.rows, slots))
        return packed, row_slots


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The number of nodes of each tree, and how many tokens per position are considered."""

    num_nodes: int
    num_candidates: int

    def draft(
        self, kernels: Kernels, draft: Draft, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int
    ) -> Tree:
        """Draft the first `num_drafts` masks of blocks [R, N'] -> a tree of each block, with ids of the target."""
        if isinstance(draft, SelectingDraft):
            token_ids, scores = draft.candidate_scores(block_ids, positions, attend, num_drafts)
            log_probs = self._cut(scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)))
        else:
            token_ids, log_probs = self._best(kernels, draft.logits(block_ids, positions, attend, num_drafts))
        anchors = block_ids[:, 0], positions[:, 0]
        return kernels.build_tree(log_probs, to_target(draft, token_ids), *anchors, self.num_nodes)

    def _cut(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities [R, K, C, C] with -inf for all but the most likely candidates of each row."""
        # More candidates than nodes change no tree: a node's better siblings are nodes too.
        if self.num_candidates >= min(self.num_nodes, log_probs.shape[-1]):
            return log_probs
        kept = log_probs.topk(self.num_candidates, dim=-1)
        return torch.full_like(log_probs, -torch.inf).scatter(-1, kept.indices, kept.values)

    def _best(self, kernels: Kernels, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens [R, K, C] of logits [R, K, V] in descending order, and log-probabilities [R, K, 1, C]."""
        num_requests, num_positions, vocab_size = logits.shape
        count = min(self.num_candidates, self.num_nodes, vocab_size)
        token_ids, log_probs = kernels.likely_tokens(logits.flatten(0, 1), count)
        shape = (num_requests, num_positions, count)
        return token_ids.view(shape), log_probs.view(shape)[:, :, None]
