"""The DSpark draft: DFlash with a bias of the logits that depends on the token before (a Markov head of low rank).

A block has one of two layouts. In the fill-in layout of DFlash each mask predicts the token at its own position. In the
anchor-first layout (`sample_from_anchor`) every row predicts the token after it, so a block of N rows gives N tokens.
The block is denoised in one pass. Then tokens are chosen from left to right, each with the bias of the one before.
Sources: speculators 0.9.0 models/dspark; vLLM 0.33.0 models/qwen3_dspark.py.

Axis letters: R requests, N block rows, K draft tokens, H hidden width, E rank of the bias, V' output vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dflash_kernels.drafts.candidate_walk import Codebooks
from dflash_kernels.logits.sampling import Chosen
from dflash_kernels.logits.top_tokens import MOST_TOP_TOKENS
from dflash_kernels.logits.uniform import DRAFT
from dflash_runtime.checkpoint.layout import MARKOV
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.confidence import ConfidenceHead
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import DRAFTS, Drawn, Draws
from dflash_runtime.drafts.token_masks import TokenMasks
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TargetEnds
from dflash_runtime.models.weights import Weights


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """The bias of a position's logits by the token before it."""

    head_type: str
    before: Tensor  # [V, E], a row per token of the target
    after: Linear  # [V', E]
    inner: Linear | None  # of the gate, or of the state

    @classmethod
    def read(cls, weights: Weights, head_type: str, placement: Placement) -> "MarkovHead":
        name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(head_type)
        inner = None if name is None else Linear.read(weights, f"{MARKOV}.{name}", placement.kernels)
        after = Linear.read(weights, f"{MARKOV}.markov_w2", placement.kernels)
        return cls(head_type, weights[f"{MARKOV}.markov_w1.weight"].contiguous(), after, inner)

    def first_state(self, hidden: Tensor) -> Tensor:
        """The state before the first position, [R, E], for hidden states [R, H]."""
        return hidden.new_zeros(len(hidden), self.before.shape[1])

    def factors(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens before [R], hidden states of the position [R, H], state [R, E] -> factors [R, E], and the next state.

        The bias is the product of the factors with `after`.
        """
        embedded = self.before[tokens]
        if self.inner is None:
            return embedded, state
        if self.head_type == "gated":
            return torch.sigmoid(self.inner(torch.cat((hidden, embedded), -1))) * embedded, state
        gate, fresh, out = self.inner(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(fresh)

    def add_bias(self, logits: Tensor, factors: Tensor, scale: float) -> None:
        """Add the bias of factors [R, E] to logits [R, V'] in place, and round once."""
        logits.addmm_(factors, self.after.plain.t(), alpha=scale)


@DRAFTS.register("dspark")
class DSparkDraft(DFlashDraft):
    """A DFlash draft with a Markov head, and a head that predicts which tokens the target accepts."""

    samples_from_anchor: ClassVar[bool] = True

    def __init__(self, config: DraftConfig, weights: Weights, target: TargetEnds, placement: Placement) -> None:
        super().__init__(config, weights, target, placement)
        markov = config.markov
        self._markov = None if markov is None else MarkovHead.read(weights, markov.head_type, placement)
        self._confidence = ConfidenceHead.read(weights, config, placement.dtype)

    def _denoise(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int) -> Tensor:
        if not self.config.sample_from_anchor:
            return super()._denoise(block_ids, positions, attend, num_drafts)
        return self._rows(block_ids[:, :-1], positions[:, :-1], attend)[:, :num_drafts].flatten(0, 1)

    def _rows(self, block_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states of every row of the blocks, [R, N, H]."""
        hidden, _ = self._decoder(self._embed(block_ids), positions.flatten(), attend)
        return hidden.view(*block_ids.shape, -1)

    def propose(
        self,
        block_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        num_drafts: int,
        draws: Draws | None,
        masks: TokenMasks | None = None,
    ) -> Drawn:
        """See `drafts.draft.WalkingDraft`. As in vLLM 0.33.0, the filters of a request apply to the target only."""
        anchors, hidden = self._read_block(block_ids, positions, attend, num_drafts)
        drawn = self._draw(block_ids, anchors, hidden, num_drafts, draws, masks)
        if self._confidence is None:
            return drawn
        before = torch.cat((block_ids[:, :1], self._to_target(drawn.token_ids[:, :-1])), 1)
        return drawn._replace(confidences=self._confidence(hidden.view(*before.shape, -1), before))

    def logits_along(self, block_ids: Tensor, positions: Tensor, attend: Attend, text: Tensor) -> Tensor:
        """See `drafts.draft.WalkingDraft`."""
        anchors, hidden = self._read_block(block_ids, positions, attend, text.shape[1])
        logits, rows = self._limit(self._score(hidden).view(*text.shape, -1)), hidden.view(*text.shape, -1)
        if self._markov is None:
            return logits
        state = self._first_state(self._markov, rows, block_ids[:, 0], anchors)
        before, biased = torch.cat((block_ids[:, :1], text[:, :-1]), dim=1), []
        for position in range(text.shape[1]):
            factors, state = self._markov.factors(before[:, position], rows[:, position], state)
            biased.append(logits[:, position] + self.config.logit_scale * self._markov.after(factors))
        return torch.stack(biased, dim=1)

    def _read_block(
        self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int
    ) -> tuple[Tensor | None, Tensor]:
        """Return hidden states of anchors [R, H] if the state of the bias begins there, and of drafts [R * K, H]."""
        has_anchor_step = self._markov is not None and self._markov.head_type == "rnn"
        if has_anchor_step and not self.config.sample_from_anchor:
            rows = self._rows(block_ids, positions, attend)[:, : 1 + num_drafts]
            return rows[:, 0], rows[:, 1:].flatten(0, 1)
        return None, self._denoise(block_ids, positions, attend, num_drafts)

    def _draw(
        self,
        block_ids: Tensor,
        anchors: Tensor | None,
        hidden: Tensor,
        num_drafts: int,
        draws: Draws | None,
        masks: TokenMasks | None,
    ) -> Drawn:
        """Choose the tokens of blocks [R, N] from the hidden states of `_read_block`."""
        logits = self._score(hidden).view(len(block_ids), num_drafts, -1)
        if self._markov is not None and self._markov.inner is None and draws is None and masks is None:
            return Drawn(self._best(self._markov, logits, block_ids[:, 0].contiguous()), logits=logits)
        if self._markov is not None and masks is None:
            logits = self._limit(logits)
        return self._walk(logits, hidden.view(len(block_ids), num_drafts, -1), block_ids[:, 0], anchors, draws, masks)

    def _best(self, markov: MarkovHead, logits: Tensor, anchors: Tensor) -> Tensor:
        """Choose the best tokens from left to right with a bias that reads only the token before: [R, K]."""
        scale, top_k = self.config.logit_scale, self._top_k(logits)
        if top_k is None or top_k > MOST_TOP_TOKENS:
            logits = self._limit(logits)
            return self._kernels.markov_walk(logits, markov.before, markov.after.plain, anchors, scale, self.target_ids)
        best, values = (item.view(*logits.shape[:2], -1) for item in self._top_tokens(logits, top_k))
        codebooks = Codebooks(markov.before, markov.after.plain, scale, self.target_ids)
        return self._kernels.candidate_walk(values, best, None, codebooks, anchors).token_ids

    def _top_k(self, logits: Tensor) -> int | None:
        """How many of the best tokens of a position the bias chooses among; None: among all."""
        top_k = self.config.markov.top_k if self.config.markov is not None else None
        return None if top_k is None or top_k >= logits.shape[-1] else top_k

    def _top_tokens(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        return self._kernels.top_tokens(logits.flatten(0, 1), top_k)

    def _limit(self, logits: Tensor) -> Tensor:
        """Leave only the best tokens of each position, if the config says how many."""
        top_k = self._top_k(logits)
        if top_k is None:
            return logits
        best, values = self._top_tokens(logits, top_k)
        return torch.full_like(logits, -torch.inf).flatten(0, 1).scatter_(-1, best, values).view_as(logits)

    def _walk(
        self,
        logits: Tensor,
        hidden: Tensor,
        tokens: Tensor,
        anchors: Tensor | None,
        draws: Draws | None,
        masks: TokenMasks | None,
    ) -> Drawn:
        """Choose tokens from left to right: logits [R, K, V'], hidden states [R, K, H], anchor tokens [R].

        Each position's bias is added to the logits in place.
        `anchors` [R, H] are the anchors' own hidden states, if the state of the bias begins at the anchor.
        """
        state = None if self._markov is None else self._first_state(self._markov, hidden, tokens, anchors)
        drafted = []
        for position in range(logits.shape[1]):
            if masks is not None:
                allowed = masks.allow(logits[:, position])[:, None]
                logits[:, position] = (allowed if self._markov is None else self._limit(allowed))[:, 0]
            scores = logits[:, position]
            if self._markov is not None and state is not None:
                factors, state = self._markov.factors(tokens, hidden[:, position], state)
                self._markov.add_bias(scores, factors, self.config.logit_scale)  # as vLLM 0.33.0 qwen3_dspark.py
            chosen = self._choose(scores, draws, position)
            tokens = self._to_target(chosen)
            drafted.append(chosen)
            if masks is not None:
                masks.take(chosen)
        token_ids = torch.stack(drafted, 1)
        if draws is None:
            return Drawn(token_ids, logits=logits)
        return Drawn(token_ids, self._sample(logits.flatten(0, 1), draws, draws.positions).distribution, logits=logits)

    def _first_state(self, markov: MarkovHead, hidden: Tensor, tokens: Tensor, anchors: Tensor | None) -> Tensor:
        """The state of the bias [R, E] before the first drafted position; see `_walk`."""
        state = markov.first_state(hidden[:, 0])
        return state if anchors is None else markov.factors(tokens, anchors, state)[1]

    def _to_target(self, token_ids: Tensor) -> Tensor:
        return token_ids if self.target_ids is None else self.target_ids[token_ids]

    def _choose(self, scores: Tensor, draws: Draws | None, position: int) -> Tensor:
        """[R, V'] -> [R], ids of the draft."""
        if draws is None:
            return self._kernels.argmax(scores)
        return self._sample(scores, draws, draws.positions[:, position]).token_ids

    def _sample(self, scores: Tensor, draws: Draws, positions: Tensor) -> Chosen:
        whole, all_ids = torch.ones_like(draws.temperatures), torch.zeros_like(draws.seeds)
        return self._kernels.sample(
            scores, draws.temperatures, all_ids, whole, draws.seeds, positions.flatten(), has_filters=False,
            purpose=DRAFT,
        )  # fmt: skip
