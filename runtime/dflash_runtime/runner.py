"""Runs the models: prefill, draft, verify, accept, context KV. Owns the weights and the KV tensors.

One decode step, for R requests of N = K + 1 rows each:

    draft     [anchor, mask x K] over the context KV -> K drafted tokens
    verify    [anchor, drafted] through the target -> its own choice after every row
    accept    the longest prefix of the drafts that equals those choices, and one bonus token
    context   features of the accepted rows -> the draft's context KV, before anything reads past them

Axis letters: R requests, N block rows, K drafted tokens, F features, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_kernels.accept import accept_ref
from dflash_kernels.sampling import sample_ref
from dflash_kernels.slot_mapping import PAD
from dflash_runtime.batch import Batch, Rows, StepOutput
from dflash_runtime.drafts.base import Draft
from dflash_runtime.kv import KVCache, PagedAttention
from dflash_runtime.models.base import Target
from dflash_runtime.request import Request


class Runner:
    """Executes batches on one device. Without a draft (K = 0) it decodes plainly."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        num_draft_tokens: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.target = target
        self.draft = draft
        self.num_draft_tokens = num_draft_tokens
        self.page_size = page_size
        self.device = device
        self.target_kv = KVCache(target.config, num_pages, page_size, device, dtype)
        self.draft_kv = KVCache(draft.config, num_pages, page_size, device, dtype) if draft else None
        self._taps = draft.config.target_layer_ids if draft else ()

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[StepOutput]:
        """Run one step and return each request's tokens."""
        outputs = self._draft_and_verify(batch.draft) if batch.draft else []
        outputs += self._decode(batch.plain) if batch.plain else []
        outputs += [self._prefill(request) for request in batch.prefill]
        return outputs

    def _prefill(self, request: Request) -> StepOutput:
        """Run a prompt through the target, make its context KV, and choose the first token."""
        rows = self._rows([request], [0])
        token_ids = self._ids([request.prompt_token_ids])
        positions = rows.positions(request.prompt_len)
        hidden, features = self._run_target(rows, token_ids, positions, longest=0)
        chosen = self._choose(rows, hidden[:, -1:], positions[:, -1:])
        self._write_context(rows, features, positions)
        return StepOutput(request, chosen[0].tolist())

    def _decode(self, requests: Sequence[Request]) -> list[StepOutput]:
        """One token a request, without drafting; the context KV is kept up to date all the same."""
        rows = self._rows(requests, [request.kv_len for request in requests])
        positions = rows.positions(1)
        longest = max(request.kv_len for request in requests)
        hidden, features = self._run_target(rows, self._anchors(requests), positions, longest)
        chosen = self._choose(rows, hidden, positions)
        self._write_context(rows, features, positions)
        return [StepOutput(request, ids) for request, ids in zip(requests, chosen.tolist(), strict=True)]

    def _draft_and_verify(self, requests: Sequence[Request]) -> list[StepOutput]:
        """A whole block a request: draft, verify, accept, context KV."""
        rows = self._rows(requests, [request.kv_len for request in requests])
        positions = rows.positions(self.num_draft_tokens + 1)
        longest = max(request.kv_len for request in requests)
        anchors = self._anchors(requests)
        draft_ids = self._propose(rows, anchors, positions, longest)
        hidden, features = self._run_target(rows, torch.cat((anchors, draft_ids), dim=1), positions, longest)
        chosen = self._choose(rows, hidden, positions)
        num_accepted, _ = accept_ref(draft_ids, chosen)
        self._write_context(rows, features, positions, num_accepted)
        return [
            # An accepted draft equals the target's choice, so the choices up to the bonus are the step's tokens.
            StepOutput(request, ids[: accepted + 1], accepted)
            for request, ids, accepted in zip(requests, chosen.tolist(), num_accepted.tolist(), strict=True)
        ]

    def _propose(self, rows: Rows, anchors: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Anchors [R, 1] at positions [R, N] -> drafted ids [R, K]. The block's K and V stay out of the pages."""
        assert self.draft is not None
        assert self.draft_kv is not None
        config = self.draft.config
        masks = anchors.new_full((len(anchors), self.num_draft_tokens), config.mask_token_id)
        attend = PagedAttention(
            self.draft_kv, rows.context_table(longest, self.page_size), rows.context_lens, config.causal, config.windows
        )
        return self.draft.propose(torch.cat((anchors, masks), dim=1), positions, attend)

    def _run_target(
        self, rows: Rows, token_ids: Tensor, positions: Tensor, longest: int
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [R, N] -> hidden states [R, N, hidden] and features [R, N, F]; stores the rows' KV."""
        config = self.target.config
        attend = PagedAttention(
            self.target_kv,
            rows.context_table(longest, self.page_size),
            rows.context_lens,
            (True,) * config.num_layers,
            config.windows,
            rows.slots(positions, self.page_size),
        )
        return self.target(token_ids, positions, attend, self._taps)

    def _choose(self, rows: Rows, hidden: Tensor, positions: Tensor) -> Tensor:
        """The target's choice after each row: hidden states [R, N, hidden] -> token ids [R, N]."""
        num_rows = positions.shape[1]
        logits = self.target.head(hidden)

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(num_rows)

        return sample_ref(
            logits.flatten(0, 1),
            spread(rows.temperatures),
            spread(rows.top_ks),
            spread(rows.top_ps),
            spread(rows.seeds),
            positions.flatten() + 1,
        ).view_as(positions)

    def _write_context(
        self, rows: Rows, features: Tensor | None, positions: Tensor, num_accepted: Tensor | None = None
    ) -> None:
        """Context KV of the committed rows: all of them, or the anchor and the accepted drafts."""
        if self.draft is None or self.draft_kv is None or features is None:
            return
        slots = rows.slots(positions, self.page_size)
        if num_accepted is not None:
            is_committed = torch.arange(positions.shape[1], device=self.device) <= num_accepted[:, None]
            slots = torch.where(is_committed, slots, PAD)
        keys, values = self.draft.context_kv(features.flatten(0, 1), positions.flatten())
        for layer in range(len(keys)):
            self.draft_kv.store(layer, keys[layer], values[layer], slots.flatten())

    def _rows(self, requests: Sequence[Request], context_lens: Sequence[int]) -> Rows:
        return Rows.read(requests, context_lens, self.page_size, self.device)

    def _anchors(self, requests: Sequence[Request]) -> Tensor:
        return self._ids([[request.anchor_id] for request in requests])

    def _ids(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(ids) for ids in token_ids], dtype=torch.int64, device=self.device)
