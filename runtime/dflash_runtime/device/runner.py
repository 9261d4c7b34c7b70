"""Runs the models on one device: draft, verify, accept, context KV. Owns the KV tensors and the device state.

A decode step, for R requests with blocks of N = K + 1 rows:

    draft     [anchor, mask x K] over the context KV -> K drafted tokens
    verify    [anchor, drafted], W <= N rows of it, through the target -> the target's choice after every row
    accept    the longest prefix of the drafts that the target agrees with, and one bonus token, cut at stops and limits
    context   features of the committed rows -> the draft's context KV

The prompts of a step:

    lay out   the chunks of all prompts as flat rows (`prefill.py`)
    forward   the flat rows through the target, after the rows of decoding requests if there are any
    start     choose the first token of every prompt that ends, and switch its row of the device state on
    context   features of the prompt rows -> the draft's context KV

Blocks and prompts share a forward, so that the target's weights are read once. If both have few rows, the whole step is
one CUDA graph (`prompt_room.py`). Otherwise the forward runs in captured pieces (`piecewise_graphs.py`), or uncaptured.

Nothing here waits for the device. If the block of a request would pass the model's limit, none of its drafts is
accepted, which is plain decoding. A request that is done still runs, but changes nothing.

Axis letters: R requests, N block rows, W verified rows, K drafted tokens, T flat rows, E requests that end their
prefill, F fresh requests among them, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_kernels.sampling import Chosen
from dflash_kernels.step_rows import Bounds, StepRows
from dflash_kernels.uniform import DRAFT
from dflash_runtime.device.acceptance_model import OnlineAcceptance
from dflash_runtime.device.blocks import Blocks, ContextRows, Proposal, Sampling
from dflash_runtime.device.decode_graphs import DecodeGraphs, StepMode
from dflash_runtime.device.grammars import Grammars
from dflash_runtime.device.joined_attention import JoinedAttention
from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.device.kv_pages import PagePorter
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.piecewise_graphs import PiecewiseGraphs
from dflash_runtime.device.prefill import PromptLayout, PromptRows
from dflash_runtime.device.prompt_room import PromptRoom
from dflash_runtime.device.recurrent import BlockRecall, RecurrentStates, recall_alone
from dflash_runtime.device.results import PendingForward, with_confidences
from dflash_runtime.device.shared_rows import GivenRows, SharedAttention
from dflash_runtime.device.state import DeviceState, Uploader, row_of
from dflash_runtime.device.texts import Texts
from dflash_runtime.device.trees import TreeShape, VerifiedTree
from dflash_runtime.drafts.draft import Drawn, Draws, WalkingDraft, draft_places
from dflash_runtime.drafts.token_masks import TokenMasks
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff
from dflash_runtime.models.cache_state import TextState
from dflash_runtime.models.own_cache import OwnCacheTarget
from dflash_runtime.models.placement import as_current
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.limits import rows_to_ridge
from dflash_runtime.scheduling.request import Request, SamplingParams
from dflash_runtime.scheduling.text_index import padded

REGRET_ROWS = 256
"""Rows whose logits are computed at a time for `regrets`. The logits of a whole text may not fit into memory."""

Results = list[tuple[Sequence[Request], Tensor | None]]
"""Requests with their packed results [R, ...], which are None if the requests get no tokens."""


class Runner:
    """Runs batches on one device. Without a draft (K = 0) it decodes plainly."""

    def __init__(self, pair: LoadedPair, num_pages: int, num_snapshots: int = 0) -> None:
        self.target, self.draft, self.limits = pair.target, pair.draft, pair.limits
        self._placement, self.kernels = pair.placement, pair.placement.kernels
        self.device, self.ranks = pair.placement.device, pair.placement.ranks
        self.page_size = page_size = pair.config.page_size
        self._walks = isinstance(pair.draft, WalkingDraft)
        self.samples_drafts = pair.config.draft_sampling == "probabilistic"
        self._has_confidences = pair.config.draft_confidence or pair.config.row_budget
        has_trees = self.draft is not None and self.limits.num_tree_nodes > 0
        self.tree_shape = TreeShape(self.limits.num_tree_nodes, pair.config.most_candidates) if has_trees else None
        self.texts = Texts(self.target) if isinstance(self.target, OwnCacheTarget) else None
        num_target_pages = num_pages if self.texts is None else 0
        self.target_kv = KVCache(self.target.config, num_target_pages, page_size, pair.placement, pair.kv_scales)
        self.draft_kv = KVCache(self.draft.config, num_pages, page_size, pair.placement) if self.draft else None
        # A block may begin on the last position, so the table is one block longer than the model.
        max_pages = -(-(self.limits.max_model_len + self.limits.num_lookahead_tokens) // page_size)
        # The last row is the padding row of graphs. No request gets it.
        self.state = DeviceState.empty(self.limits.max_num_requests + 1, max_pages, self.kernels, self.device)
        self._upload = Uploader(self.device)
        recurrence, block_rows = self.target.config.recurrence, self.limits.num_lookahead_tokens
        num_texts = self.limits.max_num_requests + 1
        self.states = None
        if recurrence is not None:
            self.states = RecurrentStates(
                recurrence, num_texts, block_rows, pair.placement, num_snapshots, page_size,
                pair.config.most_exact_requests,
            )  # fmt: skip
        self._layout = PromptLayout(
            self.target.config, self.kernels, self.target_kv, self.state, self._upload, self.limits.max_model_len,
            self.states,
        )  # fmt: skip
        caches = {} if self.texts is not None else {TARGET_PAGES: self.target_kv}
        if self.draft_kv is not None:
            caches[DRAFT_PAGES] = self.draft_kv
        self.porter = PagePorter(caches, self.device, self._upload)
        self._draft_ids = draft_places(self.draft, self.target.config.vocab_size) if self.draft else None
        self._bounds = Bounds(
            max_model_len=self.limits.max_model_len,
            last_draft_len=self.limits.last_draft_len,
            page_size=page_size,
            mask_id=self.draft.config.mask_token_id if self.draft else 0,
        )
        self.grammars = Grammars(
            pair.tokenizer, self.target.config.vocab_size, self.device, self.draft.target_ids if self.draft else None
        )
        self._taps = self.draft.config.target_layer_ids if self.draft else ()
        self._looked_up, self.acceptance = _no_drafts(pair), _first_acceptance(pair)
        self.graphs: DecodeGraphs | None = None
        self.pieces: PiecewiseGraphs | None = None
        self._rooms: dict[int, PromptRoom] = {}
        self._prompt_stream: torch.cuda.Stream | None = None
        if pair.has_graphs:
            self._prompt_stream = torch.cuda.Stream(self.device, priority=-1)
            is_shared = self.ranks.size > 1
            self.graphs = DecodeGraphs(self._decode, self.limits.max_num_requests, self.device, is_shared=is_shared)
            self.pieces = PiecewiseGraphs(
                self.target, self._taps, self.kernels, self.target_kv, self.limits.max_rows, is_shared=is_shared
            )

    def drop_graphs(self) -> None:
        """Free the captured steps. Later steps run uncaptured."""
        self.graphs = self.pieces = None

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingForward | None:
        """Queue one step on the pair's device, even if another device is current. None if there is nothing to run."""
        with as_current(self.device):
            self._admit(batch)
            self._store_drafts(batch)
            room = self.room_beside(batch)
            prompts = self._layout.lay_out(batch.chunks) if batch.chunks and room is None else None
            results: Results = []
            context = None
            if prompts and batch.decode and self.texts is None:
                results, context = self._decode_and_prefill(batch, prompts)
            else:
                if batch.decode and self.graphs is not None and not self.grammars.are_in(batch):
                    results += self._replay(self.graphs, batch, room)
                elif batch.decode:
                    rows, mode = self._upload.ints(_rows(batch)), _mode_of(batch)
                    results.append((batch.decode, self._decode(rows, mode, batch.longest, batch.decode)[0]))
                if prompts is not None:
                    first, context = self._prefill(prompts)
                    results.append((prompts.fresh, first))
            pending = PendingForward.send(results, self.device, batch) if results else None
            self._write_context(context)  # after the results: only the next step's drafts read it
            if self.acceptance is not None and batch.decode:
                self.acceptance.count_step()
            return pending

    def _admit(self, batch: Batch) -> None:
        """Give rows of the state to admitted requests, and pages to rows."""
        if self.texts is not None:
            self.texts.drop_ended()
        if self.states is not None:
            self.states.hold(batch.admitted)
            self.states.pool.admit(batch.admitted, self.states.state_lens, self._upload)
        num_rows = self.limits.num_block_rows
        self.state.admit(batch.admitted, batch.additions, num_rows, self.page_size, self._upload)

    def _store_drafts(self, batch: Batch) -> None:
        """Copy the drafts of a lookup to the rows of their requests, where a captured step reads them."""
        if self._looked_up is not None and batch.decode:
            num_drafts = self._looked_up.shape[1]
            ids = [token for drafted in batch.looked_up for token in padded(drafted, num_drafts)]
            rows, sent = self._upload.lists(_rows(batch), ids)
            self._looked_up.index_copy_(0, rows, sent.view(-1, num_drafts))

    def room_beside(self, batch: Batch) -> PromptRoom | None:
        """The room for this batch's chunks in a captured decode step. None if they do not fit in one."""
        if self.graphs is None or not batch.decode or not batch.chunks or batch.verify_width > 1:
            return None
        if self.grammars.are_in(batch):
            return None
        num_rows = rows_to_ridge(len(batch.decode))
        room = self._room(num_rows) if num_rows else None
        return room if room is not None and room.holds(batch.chunks) else None

    def _room(self, num_rows: int) -> PromptRoom:
        if num_rows not in self._rooms:
            self._rooms[num_rows] = PromptRoom(num_rows, self._layout)
        return self._rooms[num_rows]

    def _replay(self, graphs: DecodeGraphs, batch: Batch, room: PromptRoom | None) -> Results:
        """Replay a captured decode step, with the batch's chunks if there is a room for them."""
        if room is None:
            packed, *_ = graphs.replay(_rows(batch), _mode_of(batch))
            return [(batch.decode, packed)]
        fresh = tuple(chunk.request for chunk in batch.chunks if chunk.is_last)
        mode = StepMode.of((*batch.decode, *fresh), batch.verify_width, room.num_rows)
        if not graphs.is_prepared(len(batch.decode), mode):
            room.fill(())  # the rehearsal of a capture must not advance the states of prompts
            graphs.prepare(len(batch.decode), mode)
        room.fill(batch.chunks)
        packed, first = graphs.replay(_rows(batch), mode)
        return [(batch.decode, packed), (fresh, first[: len(fresh)] if fresh else None)]

    def _decode(
        self, rows: Tensor, mode: StepMode, longest: int | None = None, requests: Sequence[Request] = ()
    ) -> tuple[Tensor, ...]:
        """Run one decode step of state rows [R] -> packed results, and packed results of prompts if `mode` has room.

        CUDA graphs capture this function. `longest` is an upper bound on the true KV lengths of the requests. Without
        it, the launches depend only on shapes and the mode. `requests` are needed if one of them has a grammar.
        """
        blocks = self._draft_blocks(rows, mode, longest, requests)
        if mode.num_prompt_rows:
            prompts = self._room(mode.num_prompt_rows).prompts(mode)
            packed, first, context = self._run_joined(blocks, prompts, self.target, self._prompt_stream)
            assert first is not None
            self._write_context(context)
            return packed, first
        if self.texts is None:
            attend = self._attend_target(blocks)
            hidden, features = self.target(blocks.token_ids, blocks.run(blocks.positions), attend, self._taps)
        else:
            ids, lens = blocks.token_ids.view(len(rows), -1), blocks.step.context_lens
            hidden, features = self.texts.verify(rows.tolist(), lens.tolist(), ids, self._taps)
        packed, slots = self._accept(blocks, hidden)
        # A later step reads all context KV below kv_len, so committed rows get theirs here, drafted or not.
        self._write_context(ContextRows(features, blocks.run(blocks.positions), slots))
        return (packed,)

    def _decode_and_prefill(self, batch: Batch, prompts: PromptRows) -> tuple[Results, ContextRows]:
        """Run the blocks of a batch and its prompts in one forward -> results, and the context KV to write."""
        rows = _rows(batch)
        # Padded to a number of rows that is captured at start, so its kernels are compiled already.
        padded = self._upload.ints(self.graphs.padded(rows) if self.graphs is not None else rows)
        blocks = self._draft_blocks(padded, _mode_of(batch), batch.longest, batch.decode)
        packed, first, context = self._run_joined(blocks, prompts, self.pieces or self.target)
        return [(batch.decode, packed[: len(rows)]), (prompts.fresh, first)], context

    def _run_joined(
        self,
        blocks: Blocks,
        prompts: PromptRows,
        target: Target | PiecewiseGraphs,
        prompt_stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor | None, ContextRows]:
        """Run one forward, blocks first -> packed results of blocks and of fresh requests, and context KV to write."""
        count = len(blocks.token_ids)
        attend = JoinedAttention.join(self._attend_target(blocks), prompts.attend, prompt_stream)
        positions = torch.cat((blocks.run(blocks.positions), prompts.positions))
        token_ids = torch.cat((blocks.token_ids, prompts.token_ids))
        wanted = torch.cat((torch.arange(count, device=self.device), prompts.wanted + count))
        hidden, features = target(token_ids, positions, attend, self._taps, wanted)
        packed, slots = self._accept(blocks, hidden[:count])
        context = ContextRows(features, positions, torch.cat((slots, prompts.slots)))
        return packed, self._start(prompts, hidden[count:]), context

    def _prefill(self, prompts: PromptRows) -> tuple[Tensor | None, ContextRows | None]:
        """Run prompts in a forward of their own -> packed results of fresh requests, and the context KV to write."""
        hidden = context = None
        if prompts:
            if self.texts is None:
                target, ids = self.pieces or self.target, prompts.token_ids
                hidden, features = target(ids, prompts.positions, prompts.attend, self._taps, prompts.wanted)
            else:
                hidden, features = self.texts.fill(prompts.chunks, prompts.token_ids, self._taps)
                hidden = hidden[prompts.wanted]
            context = ContextRows(features, prompts.positions, prompts.slots)
        return self._start(prompts, hidden), context

    def _start(self, prompts: PromptRows, hidden: Tensor | None) -> Tensor | None:
        """Choose first tokens, and switch on every request that ends its prefill.

        `hidden` [F, hidden] are the hidden states of `prompts.last_rows`. Returns the packed results of the F fresh
        requests, or None without fresh requests.
        """
        if not len(prompts.rows):
            return None
        chosen, is_finite = self._choose_first(prompts, hidden)
        packed = self.kernels.switch_on_rows(self.state.row_state, prompts.ready, chosen, is_finite)
        return packed if prompts.num_fresh else None

    def _choose_first(self, prompts: PromptRows, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first tokens [F] of fresh requests, and whether their logits are finite, [F]."""
        rows = prompts.rows[: prompts.num_fresh]
        if hidden is None or not prompts.num_fresh:
            return rows, rows.bool()
        positions = prompts.positions[prompts.last_rows]
        sampling = self._sampling(rows, prompts.mode, prompts.fresh)
        none_accepted = torch.zeros_like(rows)
        chosen, _, is_finite = self._choose(hidden, positions[:, None], sampling, Proposal.empty(rows), none_accepted)
        return chosen[:, 0], is_finite[:, 0]

    def take_state(self, request: Request) -> TextState:
        """The state of a request right after its prompt; empty for a target that keeps everything in pages."""
        if self.states is not None:
            return self.states.take(request)
        return self.texts.take(request) if self.texts is not None else TextState()

    @torch.inference_mode()
    def take_over(self, request: Request, handoff: Handoff) -> None:
        """Set the state and the seed of a request from a hand-off, after its rows were stored in the request's pages.

        Raises:
            HandoffMismatch: the target has its own cache, and the hand-off's state is of another target.
        """
        with as_current(self.device):
            state = TextState(handoff.tensors, handoff.state_values)
            if self.states is not None:
                self.states.put(row_of(request), state, handoff.kv_len)
            if self.texts is not None:
                self.texts.put(request, state, self._upload.ints(request.prompt_token_ids[:1]), handoff.kv_len)
            row = row_of(request)
            self.state.seeds[row : row + 1].fill_(request.seed)  # assigning to one element would wait for the device

    @torch.inference_mode()
    def regrets(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams | None = None
    ) -> list[float]:
        """For each output token, how many nats more likely the target's best choice is, by the grammar of `params`.

        Runs one forward over the text. Uses no pages, does not change the state, and waits for the device.
        """
        with as_current(self.device):
            text = self._upload.ints([*prompt_ids, *output_ids])
            positions = torch.arange(len(text) - 1, device=self.device)
            config, placement = self.target.config, self._placement
            memory = recall_alone(config.recurrence, len(positions), placement)
            attend = PagedAttention.of_text(self.kernels, self.target_kv, len(positions), config.windows, memory)
            hidden, _ = self.target(text[:-1], positions, attend, ())
            rows, said = hidden[len(prompt_ids) - 1 :], text[len(prompt_ids) :]
            masks = self.grammars.masks_along(params, output_ids) if params is not None and params.grammar else None
            parts = [slice(start, start + REGRET_ROWS) for start in range(0, len(said), REGRET_ROWS)]
            found = [self._regrets_of(rows[part], said[part], masks, part).tolist() for part in parts]
            return [float(value) for part in found for value in part]

    def _regrets_of(self, hidden: Tensor, token_ids: Tensor, masks: TokenMasks | None, part: slice) -> Tensor:
        """The regrets [T] of tokens [T], from the hidden states [T, hidden] of the rows before them."""
        logits = self.target.head(hidden)
        if masks is not None:
            logits = masks.limit(logits, part)
        log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        return log_probs.max(-1).values - log_probs.gather(-1, token_ids[:, None])[:, 0]

    def _draft_blocks(self, rows: Tensor, mode: StepMode, longest: int | None, requests: Sequence[Request]) -> Blocks:
        """Draft for state rows [R] -> the blocks that the target verifies."""
        width = mode.verify_width
        if self.tree_shape is not None and width > 1:
            return self._draft_trees(self.tree_shape, rows, mode, longest)
        block = self.limits.num_block_rows if width > 1 else 1
        # A block keeps its length near the model's limit and with fewer verified rows: in a non-causal block every row
        # depends on the number of rows after it.
        step = self.kernels.open_step(self.state.row_state, rows, block, width, self._bounds)
        page_table = self._page_table(rows, None if longest is None else longest + width)
        sampling = self._sampling(rows, mode, requests)
        proposal = self._propose(rows, step, page_table, sampling) if width > 1 else Proposal.empty(rows)
        # A draft may leave a position empty with a negative id, which is never accepted. The embedding lacks rows for
        # negative ids, so the target reads id 0.
        ids = torch.cat((step.block_ids[:, :1], proposal.token_ids.clamp(min=0)), dim=1)
        blocks = Blocks(rows, step, page_table, sampling, proposal, ids.flatten(), step.positions[:, :width])
        return blocks if self.acceptance is None or width == 1 else self._share(blocks, self.acceptance)

    def _share(self, blocks: Blocks, acceptance: OnlineAcceptance) -> Blocks:
        """Predict the acceptance of drafts, and give the rows of the step to the best survivals."""
        step, proposal, mode = blocks.step, blocks.proposal, blocks.sampling.mode
        assert proposal.confidences is not None, "a draft with confidences"
        odds = acceptance.predict(proposal.confidences, step.max_accepted)
        proposal = replace(proposal, confidences=odds.likely, features=odds.features)
        if not mode.mean_width:
            return replace(blocks, proposal=proposal)
        given = GivenRows(*self.kernels.give_rows(odds.survivals, len(odds.survivals) * mode.mean_width))
        step = step._replace(max_accepted=torch.minimum(step.max_accepted, given.widths - 1))
        proposal = replace(proposal, token_ids=given.drafts(proposal.token_ids))
        return replace(blocks, step=step, proposal=proposal, token_ids=blocks.token_ids[given.places], given=given)

    def _draft_trees(self, shape: TreeShape, rows: Tensor, mode: StepMode, longest: int | None) -> Blocks:
        """Draft for state rows [R] -> the trees that the target verifies, as blocks."""
        width = mode.verify_width
        state = self.state.row_state
        step, slots = shape.open(self.kernels, state, rows, self.limits.num_block_rows, width, self._bounds)
        page_table = self._page_table(rows, None if longest is None else longest + width)
        assert self.draft is not None
        attend = self._attend_draft(step, page_table)
        tree = shape.draft(self.kernels, self.draft, step.block_ids, step.positions, attend, width - 1)
        verified = VerifiedTree.of(self.kernels, tree, width - 1, slots)
        ids = torch.cat((step.block_ids[:, :1], tree.token_ids.clamp(min=0)), dim=1)
        positions = step.kv_lens[:, None] + verified.rows.depths
        sampling = self._sampling(rows, mode, ())
        return Blocks(
            rows, step, page_table, sampling, Proposal(tree.token_ids), ids.flatten(), positions, tree=verified
        )

    def _accept(self, blocks: Blocks, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Accept drafts by hidden states of the rows that are run -> packed results [R, ...], slots of these rows.

        Rows that are not committed have slot PAD.
        """
        step, proposal = blocks.step, blocks.proposal
        chosen, max_accepted, is_finite = self._choose(
            hidden, blocks.positions, blocks.sampling, proposal, step.max_accepted, blocks.given
        )
        if blocks.tree is not None:
            packed, slots = blocks.tree.close(
                self.kernels, self.state.row_state, blocks.rows, step, chosen, max_accepted, is_finite,
                self.target_kv.pages, self.states,
            )  # fmt: skip
        else:
            packed, slots = self.kernels.close_step(
                self.state.row_state, blocks.rows, step, proposal.token_ids, chosen, max_accepted, is_finite
            )
        if self.states is not None:
            self.states.pool.keep_passed(blocks.rows, step, self.state, self.states.state_lens)
        if self.acceptance is not None and proposal.features is not None:
            self.acceptance.observe(proposal.features, packed[:, 1], step.max_accepted)
        return with_confidences(packed, proposal.confidences), blocks.run(slots)

    def _propose(self, rows: Tensor, step: StepRows, page_table: Tensor, sampling: Sampling) -> Proposal:
        """Draft whole blocks [R, N] -> the tokens to verify. The block's K and V are not stored in pages.

        A lookup has drafted on the host.
        """
        if self._looked_up is not None:
            return Proposal(self._looked_up[rows, : sampling.mode.verify_width - 1])
        assert self.draft is not None
        num_drafts = sampling.mode.verify_width - 1
        attend = self._attend_draft(step, page_table)
        drafted = step.positions[:, 1 : 1 + num_drafts]
        if self._walks:
            draws = Draws(sampling.temperatures, sampling.seeds, drafted) if self._draws(sampling) else None
            assert isinstance(self.draft, WalkingDraft)
            walked = self.draft.propose(step.block_ids, step.positions, attend, num_drafts, draws, sampling.masks)
            confidences = self._confidences(walked.logits) if walked.confidences is None else walked.confidences
            return Proposal(self._to_target(walked.token_ids), walked.distribution, confidences)
        logits = self.draft.logits(step.block_ids, step.positions, attend, num_drafts)
        if sampling.masks is not None:
            for place in range(num_drafts):
                logits[:, place] = sampling.masks.allow(logits[:, place])
                one = slice(place, place + 1)
                sampling.masks.take(self._draw(logits[:, one], drafted[:, one], sampling).token_ids[:, 0])
        confidences = self._confidences(logits)
        drawn = self._draw(logits, drafted, sampling)
        return Proposal(self._to_target(drawn.token_ids), drawn.distribution, confidences)

    def _draws(self, sampling: Sampling) -> bool:
        """Whether draft tokens are sampled, so that rejection needs their distributions."""
        return self.samples_drafts and not sampling.mode.is_greedy

    def _draw(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Drawn:
        """Choose draft tokens from logits [R, K, V'] at positions [R, K]."""
        if not self._draws(sampling):
            return Drawn(self.kernels.argmax(logits.flatten(0, 1)).view(positions.shape))
        drawn = self.kernels.sample(
            logits.flatten(0, 1), *sampling.filters(), sampling.seeds, positions.flatten(),
            has_filters=sampling.mode.has_filters, purpose=DRAFT,
        )  # fmt: skip
        return Drawn(drawn.token_ids.view(positions.shape), drawn.distribution)

    def _confidences(self, logits: Tensor | None) -> Tensor | None:
        """The draft's largest probability at each position of logits [R, K, V'], if it is asked for."""
        if not self._has_confidences or logits is None:
            return None
        return self.kernels.largest_probability(logits.flatten(0, 1)).view(logits.shape[:2])

    def _attend_draft(self, step: StepRows, page_table: Tensor) -> PagedAttention:
        """The draft's attention over its context KV and its blocks."""
        assert self.draft is not None
        assert self.draft_kv is not None
        config = self.draft.config
        return PagedAttention(self.kernels, self.draft_kv, page_table, step.context_lens, config.causal, config.windows)

    def _to_target(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of the draft's token ids."""
        assert self.draft is not None
        return draft_ids if self.draft.target_ids is None else self.draft.target_ids[draft_ids]

    def _choose(
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
            max_accepted, chosen = self.kernels.reject(
                proposal.token_ids, chosen, distribution, proposal.distribution, self._draft_ids,
                sampling.seeds, positions[:, 1], max_accepted,
            )  # fmt: skip
        return chosen, max_accepted, is_finite.view_as(positions)

    def _sample(self, hidden: Tensor, positions: Tensor, sampling: Sampling, given: GivenRows | None) -> Chosen:
        """The target's token after each row [R * W]. A row that is not among the given ones repeats one before it.

        The distributions belong to the rows of `hidden`.
        """
        logits, after = self.target.head(hidden), sampling.after(positions.flatten())
        if sampling.masks is not None:
            logits = sampling.masks.limit(logits)
        ways = {"is_greedy": sampling.mode.is_greedy, "has_filters": sampling.mode.has_filters}
        if given is None:
            return self.kernels.sample(logits, *sampling.filters(), sampling.seeds, after, **ways)
        asked = (given.requests(item) for item in (*sampling.filters(), sampling.seeds))
        chosen = self.kernels.sample(logits, *asked, after[given.places], **ways)
        return chosen._replace(token_ids=chosen.token_ids[given.sources], is_finite=chosen.is_finite[given.sources])

    def _attend_target(self, blocks: Blocks) -> PagedAttention | SharedAttention:
        """The target's attention over the pages of blocks. It also stores the KV of verified rows."""
        step, page_table = blocks.step, blocks.page_table
        config = self.target.config
        causal, lens = (True,) * config.num_layers, step.context_lens
        slots, tree = (step.slots, None) if blocks.tree is None else (blocks.tree.slots, blocks.tree.rows)
        memory = None if self.states is None else BlockRecall.of(self.states, blocks.rows, lens, tree)
        attend = PagedAttention(
            self.kernels, self.target_kv, page_table, lens, causal, config.windows, slots, memory, tree
        )
        return attend if blocks.given is None else SharedAttention(attend, blocks.given, blocks.run(step.slots))

    def _write_context(self, rows: ContextRows | None) -> None:
        """Write the draft's context KV of rows. Rows with slot PAD are dropped."""
        if self.draft is None or self.draft_kv is None or rows is None or rows.features is None:
            return
        self.draft.write_context(rows.features, rows.positions.flatten(), self.draft_kv, rows.slots.flatten())

    def _page_table(self, rows: Tensor, num_tokens: int | None) -> Tensor:
        """The page table of state rows [R], with columns for at least `num_tokens` tokens if it is given: [R, P'].

        Only reference kernels get fewer columns than the whole table, because their attention reads all columns.
        """
        whole = self.state.page_table[rows]
        if num_tokens is None or self.kernels.name != "reference":
            return whole
        return whole[:, : -(-num_tokens // self.page_size)].contiguous()

    def _sampling(self, rows: Tensor, mode: StepMode, requests: Sequence[Request]) -> Sampling:
        state = self.state
        # A greedy step reads none of these values, so any rows will do.
        chosen = slice(len(rows)) if mode.is_greedy else rows
        return Sampling(
            state.temperatures[chosen], state.top_ks[chosen], state.top_ps[chosen], state.seeds[chosen], mode,
            self.grammars.masks_of(requests, len(rows)) if self.grammars.is_used else None,
        )  # fmt: skip


def _no_drafts(pair: LoadedPair) -> Tensor | None:
    """Drafts of a lookup by row of the state, [B, K], -1 for none. None without a lookup."""
    if not pair.is_looking_up:
        return None
    size = pair.limits.max_num_requests + 1, pair.limits.num_draft_tokens
    return torch.full(size, -1, dtype=torch.int64, device=pair.placement.device)


def _first_acceptance(pair: LoadedPair) -> OnlineAcceptance | None:
    """The model by which rows are given, or None without a row budget."""
    has_budget = pair.config.row_budget and pair.draft is not None
    if not has_budget:
        return None
    return OnlineAcceptance(pair.limits.num_draft_tokens, pair.placement.device, pair.placement.kernels)


def _mode_of(batch: Batch) -> StepMode:
    return StepMode.of(batch.decode, batch.verify_width, mean_width=batch.mean_width)


def _rows(batch: Batch) -> list[int]:
    """Rows of the state that a batch decodes."""
    return [row_of(request) for request in batch.decode]
