"""The target's part of a step: it attends over the rows of blocks, chooses tokens, and accepts draft tokens by them.

Axis letters: R requests, W verified rows, T flat rows, V vocabulary.
"""

from torch import Tensor

from dflash_kernels.logits.logit_cap import cap_logits
from dflash_kernels.logits.sampling import Chosen
from dflash_runtime.device.acceptance_model import OnlineAcceptance
from dflash_runtime.device.blocks import Blocks, Proposal, Sampling
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.shared_rows import GivenRows, SharedAttention
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.device.storage.recurrent import BlockRecall, RecurrentStates
from dflash_runtime.device.storage.results import with_confidences
from dflash_runtime.device.storage.state import DeviceState
from dflash_runtime.drafts.draft import draft_places
from dflash_runtime.models.head import uncapped_logits


class Verifier:
    """Chooses the tokens of a runner's steps with the target.

    cache        the target's KV
    states       of recurrent layers
    acceptance   the model by which rows are given, with a row budget
    """

    def __init__(
        self,
        pair: LoadedPair,
        cache: KVCache,
        state: DeviceState,
        states: RecurrentStates | None,
        acceptance: OnlineAcceptance | None,
    ) -> None:
        self._target, self._kernels = pair.target, pair.placement.kernels
        self._cache, self._state, self._states, self._acceptance = cache, state, states, acceptance
        self._draft_ids = draft_places(pair.draft, pair.target.config.vocab_size) if pair.draft else None

    def attend(self, blocks: Blocks) -> PagedAttention | SharedAttention:
        """The target's attention over the pages of blocks. It also stores the KV of verified rows."""
        step, config = blocks.step, self._target.config
        causal, lens = (True,) * config.num_layers, step.context_lens
        tree = None if blocks.tree is None else blocks.tree.tree.rows
        memory = None if self._states is None else BlockRecall.of(self._states, blocks.rows, lens, tree)
        attend = PagedAttention(
            self._kernels, self._cache, blocks.page_table, lens, causal, config.windows, step.slots, memory, tree
        )
        return attend if blocks.given is None else SharedAttention(attend, blocks.given, blocks.run(step.slots))

    def accept(self, blocks: Blocks, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Accept drafts by hidden states of the rows that are run -> packed results [R, ...], slots of these rows.

        Rows that are not committed have slot PAD.
        """
        step, proposal, state = blocks.step, blocks.proposal, self._state.row_state
        chosen, max_accepted, is_finite = self.choose(
            hidden, blocks.positions, blocks.sampling, proposal, step.max_accepted, blocks.given
        )
        if blocks.tree is not None:
            packed, slots = blocks.tree.close(
                self._kernels, state, blocks.rows, step, chosen, max_accepted, is_finite, self._cache.pages,
                self._states,
            )  # fmt: skip
        else:
            packed, slots = self._kernels.close_step(
                state, blocks.rows, step, proposal.token_ids, chosen, max_accepted, is_finite
            )
        if self._states is not None:
            self._states.pool.keep_passed(blocks.rows, step, self._state, self._states.state_lens)
        if self._acceptance is not None and proposal.features is not None:
            self._acceptance.observe(proposal.features, packed[:, 1], step.max_accepted)
        return with_confidences(packed, proposal.confidences), blocks.run(slots)

    def choose_column(self, blocks: Blocks, hidden: Tensor, column: int) -> Tensor:
        """Choose the target's tokens [R] after hidden states [R, hidden] of one column of blocks."""
        return self._sample(hidden, blocks.positions[:, column], blocks.sampling, None).token_ids

    def choose(
        self,
        hidden: Tensor,
        positions: Tensor,
        sampling: Sampling,
        proposal: Proposal,
        max_accepted: Tensor,
        given: GivenRows | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the target's token after each row of hidden states [T, hidden].

        Returns token ids [R, W], the most drafts that may be accepted [R], and whether logits are finite [R, W]. Ids
        from logits that are not finite must not be committed. Sampled drafts are accepted or rejected by their
        distribution. A greedy draft is accepted if it equals the target's choice.
        """
        token_ids, is_finite, distribution = self._sample(hidden, positions, sampling, given)
        chosen = token_ids.view_as(positions)
        if proposal.distribution is not None:
            assert distribution is not None, "a step that samples"
            if given is not None:
                distribution = given.spread(distribution, sampling.temperatures)
            max_accepted, chosen = self._kernels.reject(
                proposal.token_ids, chosen, distribution, proposal.distribution, self._draft_ids,
                sampling.seeds, positions[:, 1], max_accepted,
            )  # fmt: skip
        return chosen, max_accepted, is_finite.view_as(positions)

    def _sample(self, hidden: Tensor, positions: Tensor, sampling: Sampling, given: GivenRows | None) -> Chosen:
        """The target's token after each row [R * W]. A row that is not among the given ones repeats one before it.

        The distributions belong to the rows of `hidden`.
        """
        (logits, cap), after = uncapped_logits(self._target.head, hidden), sampling.after(positions.flatten())
        if sampling.masks is not None:
            logits, cap = sampling.masks.limit(cap_logits(logits, cap)), None
        ways = {"is_greedy": sampling.mode.is_greedy, "has_filters": sampling.mode.has_filters, "cap": cap}
        if given is None:
            return self._kernels.sample(logits, *sampling.filters(), sampling.seeds, after, **ways)
        asked = (given.requests(item) for item in (*sampling.filters(), sampling.seeds))
        chosen = self._kernels.sample(logits, *asked, after[given.places], **ways)
        return chosen._replace(token_ids=chosen.token_ids[given.sources], is_finite=chosen.is_finite[given.sources])
