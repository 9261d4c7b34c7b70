"""Runs the models on one device: draft, verify, accept, context KV. Owns the KV tensors and the device state.

A decode step, for R requests with blocks of N = K + 1 rows (`drafter.py`, `verifier.py`):

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
prefill, F fresh requests among them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_runtime.device.acceptance_model import OnlineAcceptance
from dflash_runtime.device.blocks import Blocks, ContextRows, Proposal, Sampling
from dflash_runtime.device.drafter import Drafter
from dflash_runtime.device.early_end import EarlyEnd
from dflash_runtime.device.grammars import Grammars
from dflash_runtime.device.graphs.decode_graphs import DecodeGraphs, StepMode
from dflash_runtime.device.graphs.piecewise_graphs import PiecewiseGraphs
from dflash_runtime.device.graphs.prompt_room import PromptRoom
from dflash_runtime.device.joined_attention import JoinedAttention
from dflash_runtime.device.prefill import PromptLayout, PromptRows
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.storage.kv import KVCache
from dflash_runtime.device.storage.kv_pages import PagePorter
from dflash_runtime.device.storage.recurrent import RecurrentStates
from dflash_runtime.device.storage.results import PendingForward
from dflash_runtime.device.storage.state import DeviceState, Uploader, row_of, rows_of
from dflash_runtime.device.storage.texts import Texts
from dflash_runtime.device.verifier import Verifier
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff
from dflash_runtime.models.hosting.cache_state import TextState
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.placement import as_current
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.limits import rows_to_ridge
from dflash_runtime.scheduling.request import Request

Results = list[tuple[Sequence[Request], Tensor | None]]
"""Requests with their packed results [R, ...], which are None if the requests get no tokens."""


class Runner:
    """Runs batches on one device. Without a draft (K = 0) it decodes plainly."""

    def __init__(self, pair: LoadedPair, num_pages: int, num_snapshots: int = 0) -> None:
        self.target, self.draft, self.limits = pair.target, pair.draft, pair.limits
        self.placement, self.kernels = pair.placement, pair.placement.kernels
        self.device, self.ranks = pair.placement.device, pair.placement.ranks
        self.page_size = page_size = pair.config.page_size
        self.texts = None
        if isinstance(self.target, OwnCacheTarget):
            self.texts = Texts(self.target, pair.cache_graphs(self.target))
        num_target_pages = num_pages if self.texts is None else 0
        self.target_kv = KVCache(self.target.config, num_target_pages, page_size, pair.placement, pair.kv_scales)
        self.draft_kv = KVCache(self.draft.config, num_pages, page_size, pair.placement) if self.draft else None
        # A block may begin on the last position, so the table is one block longer than the model.
        max_pages = -(-(self.limits.max_model_len + self.limits.num_lookahead_tokens) // page_size)
        # The last row is the padding row of graphs. No request gets it.
        self.state = DeviceState.empty(self.limits.max_num_requests + 1, max_pages, self.kernels, self.device)
        self._upload = Uploader(self.device)
        self.states = _recurrent_states(pair, num_snapshots)
        self._layout = PromptLayout(
            self.target.config, self.kernels, self.target_kv, self.state, self._upload, self.limits.max_model_len,
            self.states,
        )  # fmt: skip
        caches = {} if self.texts is not None else {TARGET_PAGES: self.target_kv}
        if self.draft_kv is not None:
            caches[DRAFT_PAGES] = self.draft_kv
        self.porter = PagePorter(caches, self.device, self._upload)
        self.grammars = Grammars(
            pair.tokenizer, self.target.config.vocab_size, self.device, self.draft.target_ids if self.draft else None
        )
        self.acceptance = None
        if pair.config.row_budget and self.draft is not None:
            self.acceptance = OnlineAcceptance(self.limits.num_draft_tokens, self.device, self.kernels)
        self.drafter = Drafter(pair, self.draft_kv, self.state, self.grammars, self.acceptance)
        self.verifier = Verifier(pair, self.target_kv, self.state, self.states, self.acceptance)
        self._taps = self.draft.config.target_layer_ids if self.draft else ()
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
        if self.texts is not None:
            self.texts.drop_graphs()

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingForward | None:
        """Queue one step on the pair's device, even if another device is current. None if there is nothing to run."""
        with as_current(self.device):
            self._admit(batch)
            self.drafter.store(batch, self._upload)
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
                    rows = self._upload.ints(rows_of(batch.decode))
                    results.append((batch.decode, self._decode(rows, _mode_of(batch), batch.longest, batch.decode)[0]))
                if prompts is not None:
                    first, context = self._prefill(prompts)
                    results.append((prompts.fresh, first))
            pending = PendingForward.send(results, self.device, batch) if results else None
            self.drafter.write_context(context)  # after the results: only the next step's drafts read it
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

    def room_beside(self, batch: Batch) -> PromptRoom | None:
        """The room for this batch's chunks in a captured decode step. None if they do not fit in one."""
        if self.graphs is None or not batch.decode or not batch.chunks or batch.verify_width > 1:
            return None
        num_rows = 0 if self.grammars.are_in(batch) else rows_to_ridge(len(batch.decode))
        return self._room(num_rows) if num_rows and self._room(num_rows).holds(batch.chunks) else None

    def _room(self, num_rows: int) -> PromptRoom:
        if num_rows not in self._rooms:
            self._rooms[num_rows] = PromptRoom(num_rows, self._layout)
        return self._rooms[num_rows]

    def _replay(self, graphs: DecodeGraphs, batch: Batch, room: PromptRoom | None) -> Results:
        """Replay a captured decode step, with the batch's chunks if there is a room for them."""
        if room is None:
            packed, *_ = graphs.replay(rows_of(batch.decode), _mode_of(batch))
            return [(batch.decode, packed)]
        fresh = tuple(chunk.request for chunk in batch.chunks if chunk.is_last)
        mode = StepMode.of((*batch.decode, *fresh), batch.verify_width, room.num_rows)
        if not graphs.is_prepared(len(batch.decode), mode):
            room.fill(())  # the rehearsal of a capture must not advance the states of prompts
            graphs.prepare(len(batch.decode), mode)
        room.fill(batch.chunks)
        packed, first = graphs.replay(rows_of(batch.decode), mode)
        return [(batch.decode, packed), (fresh, first[: len(fresh)] if fresh else None)]

    def _decode(
        self, rows: Tensor, mode: StepMode, longest: int | None = None, requests: Sequence[Request] = ()
    ) -> tuple[Tensor, ...]:
        """Run one decode step of state rows [R] -> packed results, and packed results of prompts if `mode` has room.

        CUDA graphs capture this function. `longest` is an upper bound on the true KV lengths of the requests. Without
        it, the launches depend only on shapes and the mode. `requests` are needed if one of them has a grammar.
        """
        blocks = self.drafter.draft(rows, mode, longest, requests)
        if mode.num_prompt_rows:
            prompts = self._room(mode.num_prompt_rows).prompts(mode)
            packed, first, context = self._run_joined(blocks, prompts, self.target, self._prompt_stream)
            assert first is not None
            self.drafter.write_context(context)
            return packed, first
        if self.texts is None:
            attend = self.verifier.attend(blocks)
            hidden, features = self.target(blocks.token_ids, blocks.run(blocks.positions), attend, self._taps)
        else:
            ids, lens = blocks.token_ids.view(len(rows), -1), blocks.step.context_lens
            end = EarlyEnd.of(blocks, self.verifier.choose_column) if self.texts.ends_early else None
            hidden, features = self.texts.verify(rows.tolist(), lens.tolist(), ids, self._taps, end)
            blocks = blocks if end is None else end.limited()
        packed, slots = self.verifier.accept(blocks, hidden)
        # A later step reads all context KV below kv_len, so committed rows get theirs here, drafted or not.
        self.drafter.write_context(ContextRows(features, blocks.run(blocks.positions), slots))
        return (packed,)

    def _decode_and_prefill(self, batch: Batch, prompts: PromptRows) -> tuple[Results, ContextRows]:
        """Run the blocks of a batch and its prompts in one forward -> results, and the context KV to write."""
        rows = rows_of(batch.decode)
        # Padded to a number of rows that is captured at start, so its kernels are compiled already.
        padded = self._upload.ints(self.graphs.padded(rows) if self.graphs is not None else rows)
        blocks = self.drafter.draft(padded, _mode_of(batch), batch.longest, batch.decode)
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
        attend = JoinedAttention.join(self.verifier.attend(blocks), prompts.attend, prompt_stream)
        positions = torch.cat((blocks.run(blocks.positions), prompts.positions))
        token_ids = torch.cat((blocks.token_ids, prompts.token_ids))
        wanted = torch.cat((torch.arange(count, device=self.device), prompts.wanted + count))
        hidden, features = target(token_ids, positions, attend, self._taps, wanted)
        packed, slots = self.verifier.accept(blocks, hidden[:count])
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
        masks = self.grammars.masks_of(prompts.fresh, len(rows))
        sampling = Sampling.of(self.state, rows, prompts.mode, masks)
        none_accepted = torch.zeros_like(rows)
        chosen, _, is_finite = self.verifier.choose(
            hidden, positions[:, None], sampling, Proposal.empty(rows), none_accepted
        )
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


def _recurrent_states(pair: LoadedPair, num_snapshots: int) -> RecurrentStates | None:
    """The states of the target's recurrent layers, with one for the padding row. None without such layers."""
    recurrence, limits, config = pair.target.config.recurrence, pair.limits, pair.config
    if recurrence is None:
        return None
    return RecurrentStates(
        recurrence, limits.max_num_requests + 1, limits.num_lookahead_tokens, pair.placement, num_snapshots,
        config.page_size, config.most_exact_requests,
    )  # fmt: skip


def _mode_of(batch: Batch) -> StepMode:
    return StepMode.of(batch.decode, batch.verify_width, mean_width=batch.mean_width)
