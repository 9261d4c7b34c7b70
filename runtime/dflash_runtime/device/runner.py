"""Runs the models: draft, verify, accept, context KV; `prefill.py` runs prompts. Owns KV tensors and device state.

One decode step, for R requests of N = K + 1 block rows each:

    draft     [anchor, mask x K] over the context KV -> K drafted tokens
    verify    [anchor, drafted] through the target -> its own choice after every row
    accept    the longest prefix of the drafts the target agrees with, one bonus token, cut at stops and limits
    context   features of the committed rows -> the draft's context KV, before anything reads past them

Nothing here waits for the device. A request whose block would pass the model's limit takes part with no drafts
accepted, which is plain decoding; one that is done takes part and changes nothing.

Axis letters: R requests, N block rows, K drafted tokens, T flat rows (R * N), F features, V vocabulary, P pages.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.accept import Acceptance
from dflash_kernels.slot_mapping import PAD
from dflash_kernels.uniform import DRAFT
from dflash_runtime.device.decode_graphs import DecodeGraphs, StepMode
from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.prefill import Prefill
from dflash_runtime.device.results import PendingForward, StepResults
from dflash_runtime.device.state import DeviceState, Uploader
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request

REGRET_ROWS = 256
"""Rows whose logits are held against the best choice at a time; a whole text's would not fit beside the KV."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The batch rows that take part in one forward, as tensors.

    A row that is done has no context, nothing reserved and nothing remaining: it reads and writes no KV and commits no
    token.
    """

    rows: Tensor  # [R] in the device state
    is_alive: Tensor  # [R] bool
    kv_lens: Tensor  # [R]
    context_lens: Tensor  # [R] kv_lens, 0 where the row is done
    reserved_lens: Tensor  # [R] first position that must not be written
    remaining: Tensor  # [R] tokens that may still be committed
    page_table: Tensor  # [R, P] as wide as the longest context and block need


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one forward are sampled, [R] each."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    seeds: Tensor
    mode: StepMode

    def spread(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each value once for each of a request's block rows: [R] -> [R * N]."""
        values = (self.temperatures, self.top_ks, self.top_ps, self.seeds)
        temperatures, top_ks, top_ps, seeds = (value.repeat_interleave(num_rows) for value in values)
        return temperatures, top_ks, top_ps, seeds


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, and the distributions they were sampled from where they were sampled."""

    token_ids: Tensor  # [R, K] over the target's ids; negative where the draft proposes nothing
    probs: Tensor | None = None  # [R, K, V]


class Runner:
    """Executes batches on one device. Without a draft (K = 0) it decodes plainly."""

    def __init__(self, pair: LoadedPair, num_pages: int) -> None:
        self.target, self.draft, self.limits = pair.target, pair.draft, pair.limits
        self.kernels = pair.placement.kernels
        self.device = pair.placement.device
        self.page_size = page_size = pair.config.page_size
        self.samples_drafts = pair.config.draft_sampling == "probabilistic"
        self.target_kv = KVCache(self.target.config, num_pages, page_size, pair.placement)
        self.draft_kv = KVCache(self.draft.config, num_pages, page_size, pair.placement) if self.draft else None
        # A block may begin on the last position, so the table is a block wider than the model is long.
        max_pages = -(-(self.limits.max_model_len + self.limits.num_lookahead_tokens) // page_size)
        # The last row is never given to a request: graphs fill their batches with it.
        self.state = DeviceState.empty(self.limits.max_num_requests + 1, max_pages, self.device)
        self._upload = Uploader(self.device)
        self._taps = self.draft.config.target_layer_ids if self.draft else ()
        self.graphs = DecodeGraphs(self._decode, self.limits.max_num_requests, self.device) if pair.has_graphs else None

    @torch.inference_mode()
    def submit(self, batch: Batch) -> list[PendingForward]:
        """Queue one step, on the device of the pair whatever the caller's current one is.

        Decoding first: its results are on their way to the host before the chunks, which take longer, are queued.
        """
        with self._on_device():
            num_rows = self.limits.num_lookahead_tokens
            self.state.admit(batch.admitted, batch.additions, num_rows, self.page_size, self._upload)
            pending = []
            if batch.decode:
                rows, mode = [_row(request) for request in batch.decode], _mode(batch.decode, batch.is_drafting)
                if self.graphs is not None:
                    packed = self.graphs.replay(rows, mode)
                else:
                    packed = self._decode(self._upload.ints(rows), mode, batch.longest)
                pending.append(PendingForward.send(batch.decode, packed, self.device))
            if batch.chunks:
                requests, first = self._prefill().fill(batch.chunks)
                pending.append(PendingForward.send(requests, first, self.device, batch.chunks))
            return pending

    @torch.inference_mode()
    def regrets(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """How many nats each output token is behind the target's best choice there, by one forward over the text.

        Uses no pages and leaves the state alone; waits for the device.
        """
        with self._on_device():
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

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the pair's GPU the current one of this thread, which is where Triton launches."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _decode(self, rows: Tensor, mode: StepMode, longest: int | None = None) -> Tensor:
        """One step of decoding batch rows [R] -> packed results.

        `longest` bounds their true KV lengths; without it nothing here depends on lengths, only on shapes and the mode.
        """
        is_drafting = self.draft is not None and mode.is_drafting
        num_rows = self.limits.num_lookahead_tokens if is_drafting else 1
        view = self._view(rows, None if longest is None else longest + num_rows)
        positions = view.kv_lens[:, None] + torch.arange(num_rows, device=self.device)
        sampling = self._sampling(view.rows, mode)
        anchors = self.state.anchors[view.rows]
        # Each request by itself: near the model's limit its drafts do not count. The block keeps its length all the
        # same, since in a non-causal block every row depends on how many follow.
        can_draft = view.is_alive & (view.kv_lens <= self.limits.last_draft_len) & is_drafting
        max_accepted = torch.where(can_draft, self.state.widths[view.rows] - 1, 0)
        proposal = self._propose(view, anchors, positions, sampling) if is_drafting else _no_drafts(anchors)
        # A draft may decline a position with a negative id, which is never accepted. An embedding has no row for it,
        # so it becomes 0 here.
        block_ids = torch.cat((anchors[:, None], proposal.token_ids.clamp(min=0)), dim=1)
        # Rows past what is reserved get PAD, as do all rows of a request that is done: they store nothing.
        slots = self._slots(view, positions)
        attend = self._attend_target(view, slots)
        hidden, features = self.target(block_ids.flatten(), positions.flatten(), attend, self._taps)
        chosen, max_accepted, num_finite = self._choose(hidden, positions, sampling, proposal, max_accepted)
        stop_ids = self.state.stop_ids[view.rows]
        accepted = self.kernels.accept_block(proposal.token_ids, chosen, max_accepted, stop_ids, view.remaining)
        # Context KV of committed rows only, in the step that commits them and also where nothing was drafted: a later
        # step reads all of it below kv_len.
        is_committed = torch.arange(num_rows, device=self.device) < accepted.num_committed[:, None]
        self._write_context(features, positions, torch.where(is_committed, slots, PAD))
        return StepResults(
            num_committed=accepted.num_committed,
            num_accepted=accepted.num_accepted,
            is_drafting=can_draft,
            is_done=self._advance(view, accepted),
            num_finite=num_finite,
            generations=self.state.generations[view.rows],
            token_ids=chosen,
            draft_ids=proposal.token_ids,
        ).pack()

    def _advance(self, view: BatchRows, accepted: Acceptance) -> Tensor:
        """Advance the state of rows by the tokens they committed; returns which rows are done now, [R] bool."""
        state, rows = self.state, view.rows
        remaining = state.remaining[rows] - accepted.num_committed
        is_done = ~view.is_alive | accepted.is_stopped | (remaining <= 0)
        state.kv_lens[rows] = view.kv_lens + accepted.num_committed
        state.anchors[rows] = torch.where(accepted.num_committed > 0, accepted.last_ids, state.anchors[rows])
        state.remaining[rows] = remaining
        state.done[rows] = is_done
        return is_done

    def _prefill(self) -> Prefill:
        """What runs prompts, with the parts that this runner has now."""
        return Prefill(
            target=self.target,
            kernels=self.kernels,
            cache=self.target_kv,
            state=self.state,
            upload=self._upload,
            taps=self._taps,
            max_model_len=self.limits.max_model_len,
            choose_first=self._choose_first,
            write_context=self._write_context,
        )

    def _choose_first(
        self, requests: Sequence[Request], rows: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tokens after prompts, from their last rows: see `prefill.ChooseFirst`."""
        sampling = self._sampling(rows, _mode(requests, is_drafting=False))
        zero = torch.zeros_like(rows)
        chosen, _, num_finite = self._choose(hidden, positions[:, None], sampling, _no_drafts(rows), zero)
        return chosen[:, 0], num_finite

    def _propose(self, view: BatchRows, anchors: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
        """Draft after anchors [R] at positions [R, N]. The block's K and V stay out of the pages."""
        assert self.draft is not None
        assert self.draft_kv is not None
        config = self.draft.config
        num_drafts = positions.shape[1] - 1
        masks = anchors.new_full((len(anchors), num_drafts), config.mask_token_id)
        attend = PagedAttention(
            self.kernels, self.draft_kv, view.page_table, view.context_lens, config.causal, config.windows
        )
        logits = self.draft.logits(torch.cat((anchors[:, None], masks), dim=1), positions, attend)
        if sampling.mode.is_greedy or not self.samples_drafts:
            return Proposal(self._to_target(logits.argmax(-1)))
        temperatures, top_ks, top_ps, seeds = sampling.spread(num_drafts)
        probs = self.kernels.filtered_probs(
            logits.flatten(0, 1), temperatures, top_ks, top_ps, has_filters=sampling.mode.has_filters
        )
        sampled = self.kernels.sample_probs(probs, seeds, positions[:, 1:].flatten(), DRAFT)
        return Proposal(self._to_target(sampled.view(-1, num_drafts)), self._spread_probs(probs, num_drafts))

    def _to_target(self, draft_ids: Tensor) -> Tensor:
        """Token ids of the draft's vocabulary -> the target's ids."""
        assert self.draft is not None
        return draft_ids if self.draft.target_ids is None else self.draft.target_ids[draft_ids]

    def _spread_probs(self, probs: Tensor, num_drafts: int) -> Tensor:
        """[R * K, V'] over the draft's ids -> [R, K, V] over the target's."""
        assert self.draft is not None
        if self.draft.target_ids is not None:
            whole = probs.new_zeros((len(probs), self.target.config.vocab_size))
            probs = whole.index_copy_(1, self.draft.target_ids, probs)
        return probs.view(-1, num_drafts, probs.shape[-1])

    def _choose(
        self, hidden: Tensor, positions: Tensor, sampling: Sampling, proposal: Proposal, max_accepted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The target's choice after each row: hidden states [T, hidden] -> token ids [R, N], and two counts, [R] each.

        The first caps how many drafts count. The second is that of the rows before the first whose logits are not
        finite: what is chosen from there on is some id of the vocabulary, and not to be committed. Sampled drafts are
        judged by rejection with their own distribution; others by whether the target would say the same.
        """
        num_rows = positions.shape[1]
        logits = self.target.head(hidden)
        # The highest logit of a row is NaN where any is, and infinite where nothing can be said: one token, or none.
        is_finite = logits.amax(-1).isfinite().view_as(positions)
        num_finite = is_finite.to(torch.int64).cumprod(1).sum(1)
        temperatures, top_ks, top_ps, seeds = sampling.spread(num_rows)
        if proposal.probs is None:
            chosen = self.kernels.sample(
                logits,
                temperatures,
                top_ks,
                top_ps,
                seeds,
                positions.flatten() + 1,
                is_greedy=sampling.mode.is_greedy,
                has_filters=sampling.mode.has_filters,
            )
            return chosen.view_as(positions), max_accepted, num_finite
        probs = self.kernels.filtered_probs(logits, temperatures, top_ks, top_ps, has_filters=sampling.mode.has_filters)
        probs = probs.view(*positions.shape, -1)
        num_accepted, chosen = self.kernels.reject(
            proposal.token_ids, probs, proposal.probs, sampling.seeds, positions[:, 1], max_accepted
        )
        return chosen, num_accepted, num_finite

    def _attend_target(self, view: BatchRows, slots: Tensor) -> PagedAttention:
        """The target's attention over the rows' pages; stores the KV of rows [R, N] in slots [R, N]."""
        config = self.target.config
        causal = (True,) * config.num_layers
        return PagedAttention(
            self.kernels, self.target_kv, view.page_table, view.context_lens, causal, config.windows, slots
        )

    def _write_context(self, features: Tensor | None, positions: Tensor, slots: Tensor) -> None:
        """Context KV of rows [R, N]; those with PAD are dropped."""
        if self.draft is not None and self.draft_kv is not None and features is not None:
            self.draft.write_context(features, positions.flatten(), self.draft_kv, slots.flatten())

    def _view(self, rows: Tensor, num_tokens: int | None) -> BatchRows:
        """Decoding batch rows [R] for a forward that reaches `num_tokens` tokens at most; None is the model's limit."""
        state = self.state
        is_alive = ~state.done[rows]
        kv_lens = state.kv_lens[rows]
        return BatchRows(
            rows=rows,
            is_alive=is_alive,
            kv_lens=kv_lens,
            context_lens=torch.where(is_alive, kv_lens, 0),
            reserved_lens=torch.where(is_alive, state.reserved_lens[rows], 0).clamp(max=self.limits.max_model_len),
            remaining=torch.where(is_alive, state.remaining[rows], 0),
            page_table=self._page_table(rows, num_tokens),
        )

    def _page_table(self, rows: Tensor, num_tokens: int | None) -> Tensor:
        """Page table of rows [R] as far as `num_tokens` tokens reach: [R, P']."""
        if num_tokens is None:
            return self.state.page_table[rows]
        num_pages = -(-num_tokens // self.page_size)
        return self.state.page_table[rows][:, :num_pages].contiguous()

    def _slots(self, view: BatchRows, positions: Tensor) -> Tensor:
        return self.kernels.slot_mapping(view.page_table, positions, view.reserved_lens, self.page_size)

    def _sampling(self, rows: Tensor, mode: StepMode) -> Sampling:
        state = self.state
        return Sampling(state.temperatures[rows], state.top_ks[rows], state.top_ps[rows], state.seeds[rows], mode)


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row


def _mode(requests: Sequence[Request], is_drafting: bool) -> StepMode:
    return StepMode(
        is_drafting=is_drafting,
        is_greedy=all(request.params.is_greedy for request in requests),
        has_filters=any(request.params.has_filters for request in requests),
    )


def _no_drafts(anchors: Tensor) -> Proposal:
    return Proposal(anchors.new_empty((len(anchors), 0)))
