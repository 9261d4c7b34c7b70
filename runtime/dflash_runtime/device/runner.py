"""Runs the models: draft, verify, accept, context KV; `prefill.py` runs prompts. Owns KV tensors and device state.

One decode step, for R requests of N = K + 1 block rows each:

    draft     [anchor, mask x K] over the context KV -> K drafted tokens
    verify    [anchor, drafted], W <= N rows of it, through the target -> its own choice after every row
    accept    the longest prefix of the drafts the target agrees with, one bonus token, cut at stops and limits
    context   features of the committed rows -> the draft's context KV, before anything reads past them

A step that has prompts too runs their rows behind those it verifies, so that the target's weights are read once. It is
captured whole while both have few rows (`prompt_room.py`), and otherwise piece by piece or not at all.

Nothing here waits for the device. A request whose block would pass the model's limit takes part with no drafts
accepted, which is plain decoding; one that is done takes part and changes nothing.

Axis letters: R requests, N block rows, W of them verified, K drafted tokens, T flat rows, F features, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_kernels.step_rows import Bounds, StepRows
from dflash_kernels.uniform import DRAFT
from dflash_runtime.device.blocks import Blocks, ContextRows, Proposal, Sampling
from dflash_runtime.device.decode_graphs import DecodeGraphs, StepMode
from dflash_runtime.device.joined_attention import JoinedAttention
from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.device.kv_pages import PagePorter
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.piecewise_graphs import PiecewiseGraphs
from dflash_runtime.device.prefill import Prefill, PromptRows
from dflash_runtime.device.prompt_room import PromptRoom
from dflash_runtime.device.results import PendingForward
from dflash_runtime.device.state import DeviceState, Uploader, row_of
from dflash_runtime.device.texts import Texts
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff
from dflash_runtime.models.cache_state import TextState
from dflash_runtime.models.own_cache import OwnCacheTarget
from dflash_runtime.models.placement import as_current
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.limits import rows_to_ridge
from dflash_runtime.scheduling.request import Request

REGRET_ROWS = 256
"""Rows whose logits are held against the best choice at a time; a whole text's would not fit beside the KV."""

Results = list[tuple[Sequence[Request], Tensor | None]]
"""Packed results [R, ...] and whose they are; None where no tokens come of them."""


class Runner:
    """Executes batches on one device. Without a draft (K = 0) it decodes plainly."""

    def __init__(self, pair: LoadedPair, num_pages: int) -> None:
        self.target, self.draft, self.limits = pair.target, pair.draft, pair.limits
        self.kernels = pair.placement.kernels
        self.device = pair.placement.device
        self.page_size = page_size = pair.config.page_size
        self.samples_drafts = pair.config.draft_sampling == "probabilistic"
        self.texts = Texts(self.target) if isinstance(self.target, OwnCacheTarget) else None
        num_target_pages = num_pages if self.texts is None else 0
        self.target_kv = KVCache(self.target.config, num_target_pages, page_size, pair.placement)
        self.draft_kv = KVCache(self.draft.config, num_pages, page_size, pair.placement) if self.draft else None
        # A block may begin on the last position, so the table is a block wider than the model is long.
        max_pages = -(-(self.limits.max_model_len + self.limits.num_lookahead_tokens) // page_size)
        # The last row is never given to a request: graphs fill their batches with it.
        self.state = DeviceState.empty(self.limits.max_num_requests + 1, max_pages, self.kernels, self.device)
        self._upload = Uploader(self.device)
        caches = {} if self.texts is not None else {TARGET_PAGES: self.target_kv}
        if self.draft_kv is not None:
            caches[DRAFT_PAGES] = self.draft_kv
        self.porter = PagePorter(caches, self.device, self._upload)
        self._draft_places = self._find_places()
        self._bounds = Bounds(
            max_model_len=self.limits.max_model_len,
            last_draft_len=self.limits.last_draft_len,
            page_size=page_size,
            mask_id=self.draft.config.mask_token_id if self.draft else 0,
        )
        self._taps = self.draft.config.target_layer_ids if self.draft else ()
        self.graphs: DecodeGraphs | None = None
        self.pieces: PiecewiseGraphs | None = None
        self._rooms: dict[int, PromptRoom] = {}
        self._prompt_stream: torch.cuda.Stream | None = None
        if pair.has_graphs:
            self._prompt_stream = torch.cuda.Stream(self.device, priority=-1)
            self.graphs = DecodeGraphs(self._decode, self.limits.max_num_requests, self.device)
            self.pieces = PiecewiseGraphs(self.target, self._taps, self.kernels, self.target_kv, self.limits.max_rows)

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingForward | None:
        """Queue one step, on the device of the pair whatever the caller's current one is; None where nothing runs.

        Decoding requests and prompts go through the target together, unless it keeps a cache of its own.
        """
        with as_current(self.device):
            if self.texts is not None:
                self.texts.drop_ended()
            num_rows = self.limits.num_lookahead_tokens
            self.state.admit(batch.admitted, batch.additions, num_rows, self.page_size, self._upload)
            rows, mode = [row_of(request) for request in batch.decode], _mode(batch.decode, batch.verify_width)
            room = self.room_beside(batch)
            prompts = self._prefill().lay_out(batch.chunks) if batch.chunks and room is None else None
            parts: Results = []
            context = None
            if room is not None:
                parts = self._replay_together(batch, rows, room)
            elif rows and prompts and self.texts is None:
                parts, context = self._run_together(batch, rows, mode, prompts)
            else:
                if rows and self.graphs is not None:
                    parts.append((batch.decode, self.graphs.replay(rows, mode)[0]))
                elif rows:
                    parts.append((batch.decode, self._decode(self._upload.ints(rows), mode, batch.longest)[0]))
                if prompts is not None:
                    packed, context = self._fill(prompts)
                    parts.append((prompts.fresh, packed))
            pending = PendingForward.send(parts, self.device, batch) if parts else None
            self._write_context(context)  # behind the results: nothing reads it before the next step drafts
            return pending

    def room_beside(self, batch: Batch) -> PromptRoom | None:
        """The room for the chunks of a step that is captured with them, if there is such a step."""
        if self.graphs is None or not batch.decode or not batch.chunks or batch.verify_width > 1:
            return None
        num_rows = rows_to_ridge(len(batch.decode))
        room = self._room(num_rows) if num_rows else None
        return room if room is not None and room.holds(batch.chunks) else None

    def _room(self, num_rows: int) -> PromptRoom:
        if num_rows not in self._rooms:
            parts = (self.target, self.kernels, self.target_kv, self.state, self.limits.max_model_len, self._upload)
            self._rooms[num_rows] = PromptRoom(num_rows, *parts)
        return self._rooms[num_rows]

    def _replay_together(self, batch: Batch, rows: list[int], room: PromptRoom) -> Results:
        """Run batch rows [R] and prompts in one captured step."""
        assert self.graphs is not None
        fresh = room.fill(batch.chunks)
        mode = replace(_mode((*batch.decode, *fresh), batch.verify_width), num_prompt_rows=room.num_rows)
        packed, first = self.graphs.replay(rows, mode)
        return [(batch.decode, packed), (fresh, first[: len(fresh)] if fresh else None)]

    def take_state(self, request: Request) -> TextState:
        """What a target that keeps its own cache has of a request's text, whose prompt has just been run."""
        return self.texts.take(request) if self.texts is not None else TextState()

    @torch.inference_mode()
    def take_over(self, request: Request, handoff: Handoff) -> None:
        """Let a request go on from a hand-off whose rows are in its pages: its state, and its seed.

        Raises:
            HandoffMismatch: the state of a target that keeps its own cache is not one of this target.
        """
        with as_current(self.device):
            if self.texts is not None:
                state = TextState(handoff.tensors, handoff.state_values)
                self.texts.put(request, state, self._upload.ints(request.prompt_token_ids[:1]), handoff.kv_len)
            row = row_of(request)
            self.state.seeds[row : row + 1].fill_(request.seed)  # to assign to one element is to wait for the device

    @torch.inference_mode()
    def regrets(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """How many nats each output token is behind the target's best choice there, by one forward over the text.

        Uses no pages and leaves the state alone; waits for the device.
        """
        with as_current(self.device):
            text = self._upload.ints([*prompt_ids, *output_ids])
            positions = torch.arange(len(text) - 1, device=self.device)
            causal = (True,) * self.target.config.num_layers
            attend = PagedAttention.in_order(self.kernels, self.target_kv, 0, causal, self.target.config.windows)
            hidden, _ = self.target(text[:-1], positions, attend, ())
            rows = hidden[len(prompt_ids) - 1 :].split(REGRET_ROWS)
            said = text[len(prompt_ids) :].split(REGRET_ROWS)
            parts = [self._behind(*part).tolist() for part in zip(rows, said, strict=True)]
            return [float(value) for part in parts for value in part]

    def _behind(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Nats that tokens [T] are behind the best choice after rows [T, hidden]."""
        logits = self.target.head(hidden)
        log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        return log_probs.max(-1).values - log_probs.gather(-1, token_ids[:, None])[:, 0]

    def _fill(self, prompts: PromptRows) -> tuple[Tensor | None, ContextRows | None]:
        """Run prompts alone -> packed results of those that begin to decode, and what is to be written."""
        hidden = context = None
        if len(prompts):
            if self.texts is None:
                assert prompts.attend is not None
                ids, positions = prompts.token_ids, prompts.positions
                target = self.pieces or self.target
                hidden, features = target(ids, positions, prompts.attend, self._taps, prompts.wanted)
            else:
                hidden, features = self.texts.fill(prompts.chunks, prompts.token_ids, self._taps)
                hidden = hidden[prompts.wanted]
            context = ContextRows(features, prompts.positions, prompts.slots)
        return self._prefill().finish(prompts, hidden, _mode(prompts.fresh, verify_width=1)), context

    def _run_together(
        self, batch: Batch, rows: list[int], mode: StepMode, prompts: PromptRows
    ) -> tuple[Results, ContextRows]:
        """Run blocks of batch rows [R] and prompts in one forward -> results, and what is to be written."""
        # Of a size that steps are captured in, so that kernels are those that were compiled at start.
        padded = self._upload.ints(self.graphs.padded(rows) if self.graphs is not None else rows)
        blocks = self._draft_blocks(padded, mode, batch.longest)
        target, first_mode = self.pieces or self.target, _mode(prompts.fresh, verify_width=1)
        packed, first, context = self._step_together(blocks, prompts, target, first_mode)
        return [(batch.decode, packed[: len(rows)]), (prompts.fresh, first)], context

    def _step_together(
        self,
        blocks: Blocks,
        prompts: PromptRows,
        target: Target | PiecewiseGraphs,
        first_mode: StepMode,
        prompt_stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor | None, ContextRows]:
        """One forward, blocks first -> packed results of blocks, of prompts that end, and what is to be written."""
        count = len(blocks.token_ids)
        assert prompts.attend is not None
        attend = JoinedAttention.join(self._attend_target(blocks), prompts.attend, prompt_stream)
        positions = torch.cat((blocks.positions.flatten(), prompts.positions))
        token_ids = torch.cat((blocks.token_ids, prompts.token_ids))
        wanted = torch.cat((torch.arange(count, device=self.device), prompts.wanted + count))
        hidden, features = target(token_ids, positions, attend, self._taps, wanted)
        packed, slots = self._settle(blocks, hidden[:count])
        context = ContextRows(features, positions, torch.cat((slots.flatten(), prompts.slots)))
        return packed, self._prefill().finish(prompts, hidden[count:], first_mode), context

    def _decode(self, rows: Tensor, mode: StepMode, longest: int | None = None) -> tuple[Tensor, ...]:
        """One step of decoding batch rows [R] -> packed results, and those of prompts where the mode has room for some.

        `longest` bounds their true KV lengths; without it nothing here depends on lengths, only on shapes and the mode.
        """
        blocks = self._draft_blocks(rows, mode, longest)
        if mode.num_prompt_rows:
            prompts = self._room(mode.num_prompt_rows).prompts()
            packed, first, context = self._step_together(blocks, prompts, self.target, mode, self._prompt_stream)
            assert first is not None
            self._write_context(context)
            return packed, first
        if self.texts is None:
            attend = self._attend_target(blocks)
            hidden, features = self.target(blocks.token_ids, blocks.positions.flatten(), attend, self._taps)
        else:
            ids, lens = blocks.token_ids.view(len(rows), -1), blocks.step.context_lens
            hidden, features = self.texts.verify(rows.tolist(), lens.tolist(), ids, self._taps)
        packed, slots = self._settle(blocks, hidden)
        # Context KV of committed rows only, in the step that commits them and also where nothing was drafted: a later
        # step reads all of it below kv_len.
        self._write_context(ContextRows(features, blocks.positions, slots))
        return (packed,)

    def _draft_blocks(self, rows: Tensor, mode: StepMode, longest: int | None) -> Blocks:
        """Draft, for batch rows [R], up to what goes through the target."""
        width = mode.verify_width
        block = self.limits.num_lookahead_tokens if width > 1 else 1
        # A block keeps its length where a request is near the model's limit, and where fewer rows of it are verified:
        # in a non-causal block every row depends on how many follow.
        step = self.kernels.open_step(self.state.row_state, rows, block, width, self._bounds)
        page_table = self._page_table(rows, None if longest is None else longest + width)
        sampling = self._sampling(rows, mode)
        proposal = self._propose(step, page_table, sampling) if width > 1 else Proposal.empty(rows)
        # A draft may decline a position with a negative id, which is never accepted. An embedding has no row for it,
        # so it becomes 0 here.
        ids = torch.cat((step.block_ids[:, :1], proposal.token_ids.clamp(min=0)), dim=1)
        return Blocks(rows, step, page_table, sampling, proposal, ids.flatten(), step.positions[:, :width])

    def _settle(self, blocks: Blocks, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Accept, by hidden states [R * W, hidden] -> packed results [R, ...], slots of committed rows [R, W]."""
        step, proposal = blocks.step, blocks.proposal
        chosen, max_accepted, is_finite = self._choose(
            hidden, blocks.positions, blocks.sampling, proposal, step.max_accepted
        )
        return self.kernels.close_step(
            self.state.row_state, blocks.rows, step, proposal.token_ids, chosen, max_accepted, is_finite
        )

    def _prefill(self) -> Prefill:
        """What lays out prompts, with the parts that this runner has now."""
        return Prefill(
            target=self.target,
            kernels=self.kernels,
            cache=self.target_kv,
            has_own_cache=self.texts is not None,
            state=self.state,
            upload=self._upload,
            max_model_len=self.limits.max_model_len,
            choose_first=self._choose_first,
        )

    def _choose_first(self, rows: Tensor, hidden: Tensor, positions: Tensor, mode: StepMode) -> tuple[Tensor, Tensor]:
        """The tokens after prompts, from their last rows: see `prefill.ChooseFirst`."""
        sampling = self._sampling(rows, mode)
        zero = torch.zeros_like(rows)
        chosen, _, is_finite = self._choose(hidden, positions[:, None], sampling, Proposal.empty(rows), zero)
        return chosen[:, 0], is_finite[:, 0]

    def _propose(self, step: StepRows, page_table: Tensor, sampling: Sampling) -> Proposal:
        """Draft whole blocks [R, N]; choose what is verified. The block's K and V stay out of the pages."""
        assert self.draft is not None
        assert self.draft_kv is not None
        config = self.draft.config
        num_drafts = sampling.mode.verify_width - 1
        attend = PagedAttention(
            self.kernels, self.draft_kv, page_table, step.context_lens, config.causal, config.windows
        )
        logits = self.draft.logits(step.block_ids, step.positions, attend, num_drafts)
        if sampling.mode.is_greedy or not self.samples_drafts:
            return Proposal(self._to_target(self.kernels.argmax(logits.flatten(0, 1)).view(-1, num_drafts)))
        drawn = self.kernels.sample(
            logits.flatten(0, 1), *sampling.filters(), sampling.seeds, step.positions[:, 1 : 1 + num_drafts].flatten(),
            has_filters=sampling.mode.has_filters, purpose=DRAFT,
        )  # fmt: skip
        return Proposal(self._to_target(drawn.token_ids.view(-1, num_drafts)), drawn.distribution)

    def _to_target(self, draft_ids: Tensor) -> Tensor:
        """Token ids of the draft's vocabulary -> the target's ids."""
        assert self.draft is not None
        return draft_ids if self.draft.target_ids is None else self.draft.target_ids[draft_ids]

    def _find_places(self) -> Tensor | None:
        """The draft's ids of the target's, [V], -1 where it has none; None where they are the same."""
        if self.draft is None or self.draft.target_ids is None:
            return None
        places = torch.full((self.target.config.vocab_size,), -1, dtype=torch.int64, device=self.device)
        places[self.draft.target_ids] = torch.arange(len(self.draft.target_ids), device=self.device)
        return places

    def _choose(
        self, hidden: Tensor, positions: Tensor, sampling: Sampling, proposal: Proposal, max_accepted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The target's choice after each row: hidden states [T, hidden] -> token ids [R, W], how many drafts count,
        [R], and whether the logits are finite, [R, W].

        What is chosen where they are not is some id of the vocabulary, and not to be committed. Sampled drafts are
        judged by rejection with their own distribution; others by whether the target would say the same.
        """
        logits = self.target.head(hidden)
        token_ids, is_finite, distribution = self.kernels.sample(
            logits, *sampling.filters(), sampling.seeds, sampling.after(positions.flatten()),
            is_greedy=sampling.mode.is_greedy, has_filters=sampling.mode.has_filters,
        )  # fmt: skip
        chosen = token_ids.view_as(positions)
        if proposal.distribution is not None:
            max_accepted, chosen = self.kernels.reject(
                proposal.token_ids, chosen, distribution, proposal.distribution, self._draft_places,
                sampling.seeds, positions[:, 1], max_accepted,
            )  # fmt: skip
        return chosen, max_accepted, is_finite.view_as(positions)

    def _attend_target(self, blocks: Blocks) -> PagedAttention:
        """The target's attention over the rows' pages, where it stores the KV of verified rows."""
        step, page_table = blocks.step, blocks.page_table
        config = self.target.config
        causal = (True,) * config.num_layers
        return PagedAttention(
            self.kernels, self.target_kv, page_table, step.context_lens, causal, config.windows, step.slots
        )

    def _write_context(self, rows: ContextRows | None) -> None:
        """Context KV of rows; those with PAD are dropped."""
        if self.draft is None or self.draft_kv is None or rows is None or rows.features is None:
            return
        self.draft.write_context(rows.features, rows.positions.flatten(), self.draft_kv, rows.slots.flatten())

    def _page_table(self, rows: Tensor, num_tokens: int | None) -> Tensor:
        """Page table of rows [R], at least as far as `num_tokens` tokens reach, where that is known: [R, P'].

        Only the references are given less than all of it: their attention reads whatever the table could hold.
        """
        whole = self.state.page_table[rows]
        if num_tokens is None or self.kernels.name != "reference":
            return whole
        return whole[:, : -(-num_tokens // self.page_size)].contiguous()

    def _sampling(self, rows: Tensor, mode: StepMode) -> Sampling:
        state = self.state
        # Nobody reads them in a greedy step, so that any rows will do.
        chosen = slice(len(rows)) if mode.is_greedy else rows
        return Sampling(
            state.temperatures[chosen], state.top_ks[chosen], state.top_ps[chosen], state.seeds[chosen], mode
        )


def _mode(requests: Sequence[Request], verify_width: int) -> StepMode:
    return StepMode(
        verify_width=verify_width,
        is_greedy=all(request.params.is_greedy for request in requests),
        has_filters=any(request.params.has_filters for request in requests),
    )
