"""The draft's part of a step: it opens the rows of the step, drafts tokens, and writes the draft's context KV.

A draft fills a block at once, walks from token to token, or spans a tree. A lookup has drafted on the host.

Axis letters: R requests, N block rows, W verified rows, K drafted tokens, V' vocabulary of the draft, B rows of the
state, P' pages.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_kernels.logits.uniform import DRAFT
from dflash_kernels.steps.step_rows import Bounds, StepRows
from dflash_runtime.device.acceptance_model import OnlineAcceptance
from dflash_runtime.device.blocks import Blocks, ContextRows, Proposal, Sampling
from dflash_runtime.device.grammars import Grammars
from dflash_runtime.device.graphs.decode_graphs import StepMode
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.shared_rows import GivenRows
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.device.storage.state import DeviceState, Uploader, rows_of
from dflash_runtime.device.trees import TreeShape, VerifiedTree
from dflash_runtime.drafts.draft import Drawn, Draws, WalkingDraft, to_target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.text_index import padded


class Drafter:
    """Drafts the blocks of a runner's steps. Without a draft (K = 0) a block is its anchor.

    cache        the draft's context KV
    acceptance   the model by which rows are given, with a row budget
    """

    def __init__(
        self,
        pair: LoadedPair,
        cache: KVCache | None,
        state: DeviceState,
        grammars: Grammars,
        acceptance: OnlineAcceptance | None,
    ) -> None:
        limits, device = pair.limits, pair.placement.device
        self._draft, self._limits, self._kernels = pair.draft, limits, pair.placement.kernels
        self._cache, self._state, self._grammars, self._acceptance = cache, state, grammars, acceptance
        self._walks = isinstance(pair.draft, WalkingDraft)
        self.samples_drafts = pair.config.draft_sampling == "probabilistic"
        self._has_confidences = pair.config.draft_confidence or pair.config.row_budget
        has_trees = pair.draft is not None and limits.num_tree_nodes > 0
        self._tree_shape = TreeShape(limits.num_tree_nodes, pair.config.most_candidates) if has_trees else None
        self._looked_up: Tensor | None = None  # [B, K] drafts of a lookup, -1 for none
        if pair.is_looking_up:
            size = limits.max_num_requests + 1, limits.num_draft_tokens
            self._looked_up = torch.full(size, -1, dtype=torch.int64, device=device)
        self._bounds = Bounds(
            max_model_len=limits.max_model_len,
            last_draft_len=limits.last_draft_len,
            page_size=pair.config.page_size,
            mask_id=pair.draft.config.mask_token_id if pair.draft else 0,
        )

    def store(self, batch: Batch, upload: Uploader) -> None:
        """Copy the drafts of a lookup to the rows of their requests, where a captured step reads them."""
        if self._looked_up is not None and batch.decode:
            num_drafts = self._looked_up.shape[1]
            ids = [token for drafted in batch.looked_up for token in padded(drafted, num_drafts)]
            rows, sent = upload.lists(rows_of(batch.decode), ids)
            self._looked_up.index_copy_(0, rows, sent.view(-1, num_drafts))

    def draft(
        self, rows: Tensor, mode: StepMode, longest: int | None = None, requests: Sequence[Request] = ()
    ) -> Blocks:
        """Draft for state rows [R] -> the blocks or trees that the target verifies; see `Runner._decode`."""
        width = mode.verify_width
        page_table = self._page_table(rows, None if longest is None else longest + width)
        sampling = Sampling.of(self._state, rows, mode, self._grammars.masks_of(requests, len(rows)))
        if self._tree_shape is not None and width > 1:
            return self._draft_trees(self._tree_shape, rows, page_table, sampling)
        block = self._limits.num_block_rows if width > 1 else 1
        # A block keeps its length near the model's limit and with fewer verified rows: in a non-causal block every row
        # depends on the number of rows after it.
        step = self._kernels.open_step(self._state.row_state, rows, block, width, self._bounds)
        proposal = self.propose(rows, step, page_table, sampling) if width > 1 else Proposal.empty(rows)
        ids = proposal.verified_ids(step.block_ids[:, :1])
        blocks = Blocks(rows, step, page_table, sampling, proposal, ids.flatten(), step.positions[:, :width])
        return blocks if self._acceptance is None or width == 1 else self._share(blocks, self._acceptance)

    def propose(self, rows: Tensor, step: StepRows, page_table: Tensor, sampling: Sampling) -> Proposal:
        """Draft whole blocks [R, N] -> the tokens to verify. The block's K and V are not stored in pages."""
        num_drafts = sampling.mode.verify_width - 1
        if self._looked_up is not None:
            return Proposal(self._looked_up[rows, :num_drafts])
        assert self._draft is not None
        block = step.block_ids, step.positions, self._attend(step, page_table), num_drafts
        positions = step.positions[:, 1 : 1 + num_drafts]
        if self._walks:
            draws = Draws(sampling.temperatures, sampling.seeds, positions) if self._draws(sampling) else None
            assert isinstance(self._draft, WalkingDraft)
            drawn = self._draft.propose(*block, draws, sampling.masks)
        else:
            logits = self._draft.logits(*block)
            if sampling.masks is not None:
                for place in range(num_drafts):
                    logits[:, place] = sampling.masks.allow(logits[:, place])
                    one = slice(place, place + 1)
                    sampling.masks.take(self._draw(logits[:, one], positions[:, one], sampling).token_ids[:, 0])
            drawn = self._draw(logits, positions, sampling)
        confidences = self._confidences(drawn.logits) if drawn.confidences is None else drawn.confidences
        return Proposal(to_target(self._draft, drawn.token_ids), drawn.distribution, confidences)

    def write_context(self, rows: ContextRows | None) -> None:
        """Write the draft's context KV of rows. Rows with slot PAD are dropped."""
        if self._draft is None or self._cache is None or rows is None or rows.features is None:
            return
        self._draft.write_context(rows.features, rows.positions.flatten(), self._cache, rows.slots.flatten())

    def _share(self, blocks: Blocks, acceptance: OnlineAcceptance) -> Blocks:
        """Predict the acceptance of drafts, and give the rows of the step to the best survivals."""
        step, proposal, mode = blocks.step, blocks.proposal, blocks.sampling.mode
        assert proposal.confidences is not None, "a draft with confidences"
        odds = acceptance.predict(proposal.confidences, step.max_accepted)
        proposal = replace(proposal, confidences=odds.likely, features=odds.features)
        if not mode.mean_width:
            return replace(blocks, proposal=proposal)
        given = GivenRows(*self._kernels.give_rows(odds.survivals, len(odds.survivals) * mode.mean_width))
        step = step._replace(max_accepted=torch.minimum(step.max_accepted, given.widths - 1))
        proposal = replace(proposal, token_ids=given.drafts(proposal.token_ids))
        return replace(blocks, step=step, proposal=proposal, token_ids=blocks.token_ids[given.places], given=given)

    def _draft_trees(self, shape: TreeShape, rows: Tensor, page_table: Tensor, sampling: Sampling) -> Blocks:
        """Draft for state rows [R] -> the trees that the target verifies, as blocks.

        A tree spans the whole block also with fewer verified rows, so that it does not depend on other requests.
        """
        width, num_block = sampling.mode.verify_width, self._limits.num_block_rows
        step = self._kernels.open_step(self._state.row_state, rows, num_block, shape.num_nodes + 1, self._bounds)
        assert self._draft is not None
        attend = self._attend(step, page_table)
        tree = shape.draft(self._kernels, self._draft, step.block_ids, step.positions, attend, num_block - 1)
        verified, proposal = VerifiedTree(tree, width), Proposal(tree.draft_ids)
        return Blocks(
            rows, step, page_table, sampling, proposal, tree.token_ids.flatten(), tree.positions, tree=verified
        )

    def _draws(self, sampling: Sampling) -> bool:
        """Whether draft tokens are sampled, so that rejection needs their distributions."""
        return self.samples_drafts and not sampling.mode.is_greedy

    def _draw(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Drawn:
        """Choose draft tokens from logits [R, K, V'] at positions [R, K]."""
        flat, shape = logits.flatten(0, 1), positions.shape
        if self._draws(sampling):
            drawn = self._kernels.sample(
                flat, *sampling.filters(), sampling.seeds, positions.flatten(),
                has_filters=sampling.mode.has_filters, purpose=DRAFT,
            )  # fmt: skip
            return Drawn(drawn.token_ids.view(shape), drawn.distribution, logits=logits)
        if self._has_confidences:  # both from one pass over the logits
            best = self._kernels.largest_probability(flat)
            return Drawn(best.token_ids.view(shape), confidences=best.probabilities.view(shape))
        return Drawn(self._kernels.argmax(flat).view(shape))

    def _confidences(self, logits: Tensor | None) -> Tensor | None:
        """The draft's largest probability at each position of logits [R, K, V'], if it is asked for."""
        if not self._has_confidences or logits is None:
            return None
        return self._kernels.largest_probability(logits.flatten(0, 1)).probabilities.view(logits.shape[:2])

    def _attend(self, step: StepRows, page_table: Tensor) -> PagedAttention:
        """The draft's attention over its context KV and its blocks."""
        assert self._draft is not None
        assert self._cache is not None
        config = self._draft.config
        return PagedAttention(self._kernels, self._cache, page_table, step.context_lens, config.causal, config.windows)

    def _page_table(self, rows: Tensor, num_tokens: int | None) -> Tensor:
        """The page table of state rows [R], with columns for at least `num_tokens` tokens if it is given: [R, P'].

        Only reference kernels get fewer columns than the whole table, because their attention reads all columns.
        """
        whole = self._state.page_table[rows]
        if num_tokens is None or self._kernels.name != "reference":
            return whole
        return whole[:, : -(-num_tokens // self._bounds.page_size)].contiguous()
