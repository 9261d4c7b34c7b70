"""Runs the models: prefill, draft, verify, accept, context KV. Owns the weights, the KV tensors and the device state.

One decode step, for R requests of N = K + 1 rows each:

    draft     [anchor, mask x K] over the context KV -> K drafted tokens
    verify    [anchor, drafted] through the target -> its own choice after every row
    accept    the longest prefix of the drafts the target agrees with, one bonus token, cut at stops and limits
    context   features of the rows that were kept -> the draft's context KV, before anything reads past them

Nothing here waits for the device. A row whose block would pass the model's limit takes part with no drafts accepted,
which is plain decoding; a row that is done takes part and changes nothing.

Axis letters: R requests, N block rows, K drafted tokens, T flat rows (R * N), F features, V vocabulary, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.slot_mapping import PAD
from dflash_kernels.suite import Kernels
from dflash_kernels.uniform import DRAFT
from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.device.results import Launch, pack
from dflash_runtime.device.state import DeviceState, Uploader
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Batch, Chunk
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the state that take part in one forward, as tensors; dead rows have no context and no slots."""

    kv_lens: Tensor  # [R]
    alive: Tensor  # [R] bool
    limits: Tensor  # [R]
    page_table: Tensor  # [R, P] as wide as the longest context and block need


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the requests of one forward draw, [R] each; `is_greedy` and `has_filters` are known on the host."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    seeds: Tensor
    is_greedy: bool
    has_filters: bool

    def spread(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each value once for each of a request's rows: [R] -> [R * N]."""
        values = (self.temperatures, self.top_ks, self.top_ps, self.seeds)
        temperatures, top_ks, top_ps, seeds = (value.repeat_interleave(num_rows) for value in values)
        return temperatures, top_ks, top_ps, seeds


class Runner:
    """Executes batches on one device. Without a draft (K = 0) it decodes plainly."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        limits: Limits,
        *,
        kernels: Kernels,
        num_pages: int,
        page_size: int,
        samples_drafts: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.target = target
        self.draft = draft
        self.limits = limits
        self.kernels = kernels
        self.page_size = page_size
        self.samples_drafts = samples_drafts
        self.device = device
        self.target_kv = KVCache(target.config, num_pages, page_size, device, dtype)
        self.draft_kv = KVCache(draft.config, num_pages, page_size, device, dtype) if draft else None
        # A block may begin on the last position, so the table is a block wider than the model is long.
        max_pages = -(-(limits.max_model_len + limits.num_lookahead_tokens) // page_size)
        self.state = DeviceState.empty(limits.max_num_requests, max_pages, device)
        self._upload = Uploader(device)
        self._taps = draft.config.target_layer_ids if draft else ()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launch | None:
        """Queue one step; None where it gives no tokens, as a chunk in the middle of a prompt."""
        for request in batch.admitted:
            self.state.admit(request, request.generation, self.limits.num_lookahead_tokens, self._upload)
        self.state.add_pages(batch.additions, self.page_size, self._upload)
        parts: list[Tensor] = []
        requests: list[Request] = []
        if batch.decode:
            parts.append(self._decode(batch))
            requests += batch.decode
        for chunk in batch.chunks:
            packed = self._prefill(chunk)
            if packed is not None:
                parts.append(packed)
                requests.append(chunk.request)
        if not parts:
            return None
        width = max(part.shape[1] for part in parts)
        return Launch.send(requests, torch.cat([_widen(part, width) for part in parts]))

    @torch.inference_mode()
    def regrets(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """How many nats each output token is behind the target's best choice there, by one forward over the text.

        Uses no pages and leaves the state alone; waits for the device.
        """
        text = self._upload.ints([*prompt_ids, *output_ids])
        positions = torch.arange(len(text) - 1, device=self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        config = self.target.config
        attend = PagedAttention(
            self.kernels, self.target_kv, zero[:, None], zero, (True,) * config.num_layers, config.windows
        )
        hidden, _ = self.target(text[:-1], positions, attend, ())
        logits = self.target.head(hidden[len(prompt_ids) - 1 :])
        laws = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        behind = laws.max(-1).values - laws.gather(-1, text[len(prompt_ids) :, None])[:, 0]
        return [float(value) for value in behind.tolist()]

    def _decode(self, batch: Batch) -> Tensor:
        """One step of every decoding request -> packed results."""
        state, requests = self.state, batch.decode
        rows = self._upload.ints([_row(request) for request in requests])
        is_drafting = self.draft is not None and batch.is_drafting
        num_rows = self.limits.num_lookahead_tokens if is_drafting else 1
        view = self._view(rows, batch.longest + num_rows)
        positions = view.kv_lens[:, None] + torch.arange(num_rows, device=self.device)
        sampling = self._sampling(rows, requests)
        anchors = state.anchors[rows]
        can_draft = view.alive & (view.kv_lens <= self.limits.last_draft_len) & is_drafting
        max_accepted = torch.where(can_draft, state.widths[rows] - 1, 0)
        if is_drafting:
            draft_ids, draft_probs = self._propose(view, anchors, positions, sampling)
        else:
            draft_ids, draft_probs = anchors.new_empty((len(rows), 0)), None
        # A draft may decline a position with -1: never accepted, and no row of an embedding.
        block_ids = torch.cat((anchors[:, None], draft_ids.clamp(min=0)), dim=1)
        slots = self._slots(view, positions)
        hidden, features = self._run_target(view, block_ids, positions, slots)
        chosen, max_accepted = self._choose(hidden, positions, sampling, draft_ids, draft_probs, max_accepted)
        kept = self.kernels.accept_block(
            draft_ids, chosen, max_accepted, state.stop_ids[rows], torch.where(view.alive, state.rooms[rows], 0)
        )
        is_kept = torch.arange(num_rows, device=self.device) < kept.num_committed[:, None]
        self._write_context(features, positions, torch.where(is_kept, slots, PAD))
        done = self._advance(rows, view, kept.num_committed, kept.last_ids, kept.is_stopped)
        return pack(kept.num_committed, kept.num_accepted, can_draft, done, state.generations[rows], chosen, draft_ids)

    def _advance(self, rows: Tensor, view: Rows, num_committed: Tensor, last_ids: Tensor, is_stopped: Tensor) -> Tensor:
        """Move rows on by what they kept; returns which are done now."""
        state = self.state
        rooms = state.rooms[rows] - num_committed
        done = ~view.alive | is_stopped | (rooms <= 0)
        state.kv_lens[rows] = view.kv_lens + num_committed
        state.anchors[rows] = torch.where(num_committed > 0, last_ids, state.anchors[rows])
        state.rooms[rows] = rooms
        state.done[rows] = done
        return done

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Run a chunk of a prompt; with the last one, choose the first token and switch the request on."""
        request, row = chunk.request, _row(chunk.request)
        rows = self._upload.ints([row])
        hidden = positions = None
        if chunk.end > chunk.start:
            token_ids = self._upload.ints(request.token_ids[chunk.start : chunk.end])[None]
            positions = torch.arange(chunk.start, chunk.end, device=self.device)[None]
            view = Rows(
                kv_lens=torch.full((1,), chunk.start, dtype=torch.int64, device=self.device),
                alive=torch.ones(1, dtype=torch.bool, device=self.device),
                limits=self.state.limits[rows],
                page_table=self._page_table(rows, chunk.end),
            )
            slots = self._slots(view, positions)
            hidden, features = self._run_target(view, token_ids, positions, slots)
            self._write_context(features, positions, slots)
        if not chunk.is_last:
            return None
        if request.output_token_ids:
            self._resume(request, row)
            return None
        assert hidden is not None
        assert positions is not None
        return self._first_token(request, row, rows, hidden[-1:], positions[:, -1:])

    def _first_token(self, request: Request, row: int, rows: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Choose the token after a prompt from its last row's hidden state [1, hidden] -> packed results."""
        state = self.state
        sampling = self._sampling(rows, [request])
        nothing = positions.new_empty((1, 0))
        zero = positions.new_zeros(1)
        chosen, _ = self._choose(hidden, positions, sampling, nothing, None, zero)
        room = request.remaining(self.limits.max_model_len)
        rooms = positions.new_full((1,), room)
        kept = self.kernels.accept_block(nothing, chosen, zero, state.stop_ids[rows], rooms)
        done = kept.is_stopped if room > 1 else torch.ones_like(kept.is_stopped)
        state.activate(row, request.prompt_len, chosen[0, 0], rooms[0] - 1, done[0])
        return pack(kept.num_committed, zero, zero, done, state.generations[rows], chosen, nothing)

    def _resume(self, request: Request, row: int) -> None:
        """Switch a request on again where it was when it was preempted."""
        anchor, room = self._upload.ints([request.output_token_ids[-1], request.remaining(self.limits.max_model_len)])
        self.state.activate(row, request.kv_len, anchor, room, torch.zeros_like(room, dtype=torch.bool))

    def _propose(
        self, view: Rows, anchors: Tensor, positions: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor | None]:
        """Anchors [R] at positions [R, N] -> drafted target ids [R, K], and their law [R, K, V] where they are drawn.

        The block's K and V stay out of the pages.
        """
        assert self.draft is not None
        assert self.draft_kv is not None
        config = self.draft.config
        num_drafts = positions.shape[1] - 1
        masks = anchors.new_full((len(anchors), num_drafts), config.mask_token_id)
        context_lens = torch.where(view.alive, view.kv_lens, 0)
        attend = PagedAttention(
            self.kernels, self.draft_kv, view.page_table, context_lens, config.causal, config.windows
        )
        logits = self.draft.logits(torch.cat((anchors[:, None], masks), dim=1), positions, attend)
        if sampling.is_greedy or not self.samples_drafts:
            return self._to_target(logits.argmax(-1)), None
        temperatures, top_ks, top_ps, seeds = sampling.spread(num_drafts)
        probs = self.kernels.filtered_probs(
            logits.flatten(0, 1), temperatures, top_ks, top_ps, has_filters=sampling.has_filters
        )
        drafted = self.kernels.sample_probs(probs, seeds, positions[:, 1:].flatten(), DRAFT)
        return self._to_target(drafted.view(-1, num_drafts)), self._spread_probs(probs, num_drafts)

    def _to_target(self, drafted: Tensor) -> Tensor:
        """The draft's ids as the target's."""
        assert self.draft is not None
        return drafted if self.draft.target_ids is None else self.draft.target_ids[drafted]

    def _spread_probs(self, probs: Tensor, num_drafts: int) -> Tensor:
        """[R * K, V'] over the draft's ids -> [R, K, V] over the target's."""
        assert self.draft is not None
        if self.draft.target_ids is not None:
            whole = probs.new_zeros((len(probs), self.target.config.vocab_size))
            probs = whole.index_copy_(1, self.draft.target_ids, probs)
        return probs.view(-1, num_drafts, probs.shape[-1])

    def _run_target(
        self, view: Rows, token_ids: Tensor, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [R, N] -> hidden states [T, hidden] and features [T, F]; stores the rows' KV."""
        config = self.target.config
        attend = PagedAttention(
            self.kernels,
            self.target_kv,
            view.page_table,
            torch.where(view.alive, view.kv_lens, 0),
            (True,) * config.num_layers,
            config.windows,
            slots,
        )
        return self.target(token_ids.flatten(), positions.flatten(), attend, self._taps)

    def _choose(
        self,
        hidden: Tensor,
        positions: Tensor,
        sampling: Sampling,
        draft_ids: Tensor,
        draft_probs: Tensor | None,
        max_accepted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The target's choice after each row: hidden states [T, hidden] -> token ids [R, N], and the cap [R].

        Drawn drafts are judged by rejection with their own law; others by whether the target would say the same.
        """
        num_rows = positions.shape[1]
        logits = self.target.head(hidden)
        temperatures, top_ks, top_ps, seeds = sampling.spread(num_rows)
        if draft_probs is None:
            chosen = self.kernels.sample(
                logits,
                temperatures,
                top_ks,
                top_ps,
                seeds,
                positions.flatten() + 1,
                is_greedy=sampling.is_greedy,
                has_filters=sampling.has_filters,
            )
            return chosen.view_as(positions), max_accepted
        probs = self.kernels.filtered_probs(logits, temperatures, top_ks, top_ps, has_filters=sampling.has_filters)
        accepted, chosen = self.kernels.reject(
            draft_ids, probs.view(*positions.shape, -1), draft_probs, sampling.seeds, positions[:, 1], max_accepted
        )
        return chosen, accepted

    def _write_context(self, features: Tensor | None, positions: Tensor, slots: Tensor) -> None:
        """Context KV of rows [R, N]; those with PAD are dropped."""
        if self.draft is not None and self.draft_kv is not None and features is not None:
            self.draft.write_context(features, positions.flatten(), self.draft_kv, slots.flatten())

    def _view(self, rows: Tensor, num_tokens: int) -> Rows:
        """The state of rows [R] for a forward that reaches `num_tokens` tokens at most."""
        alive = ~self.state.done[rows]
        limits = torch.where(alive, self.state.limits[rows], 0).clamp(max=self.limits.max_model_len)
        return Rows(self.state.kv_lens[rows], alive, limits, self._page_table(rows, num_tokens))

    def _page_table(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Page table of rows [R] as far as `num_tokens` tokens reach: [R, P']."""
        num_pages = -(-num_tokens // self.page_size)
        return self.state.page_table[rows][:, :num_pages].contiguous()

    def _slots(self, view: Rows, positions: Tensor) -> Tensor:
        return self.kernels.slot_mapping(view.page_table, positions, view.limits, self.page_size)

    def _sampling(self, rows: Tensor, requests: Sequence[Request]) -> Sampling:
        state = self.state
        return Sampling(
            state.temperatures[rows],
            state.top_ks[rows],
            state.top_ps[rows],
            state.seeds[rows],
            is_greedy=all(request.params.is_greedy for request in requests),
            has_filters=any(request.params.has_filters for request in requests),
        )


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row


def _widen(packed: Tensor, width: int) -> Tensor:
    """Bring results of a forward with fewer rows to the width of the others: [R, W'] -> [R, W].

    Tokens stay where they are; the drafts of such a forward are none.
    """
    return torch.nn.functional.pad(packed, (0, width - packed.shape[1]))
