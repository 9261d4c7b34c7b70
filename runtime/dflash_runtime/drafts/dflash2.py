"""The DFlash 2 draft: DFlash with convolutions around its sublayers and a choice among each position's best tokens.

Before and after attention and feed-forward, a short causal convolution mixes each row with the rows before it in its
block. The kernels depend on the sublayer's normalised input. Context KV is made as in DFlash. Masks do not propose
alone: from left to right, the selector scores each pair of a chosen token and a candidate of the next position.
Source: z-lab/dflash 0.1.0 model.py::DFlash2DraftModel.

Axis letters: R requests, N block rows, K draft tokens, T flat rows, S taps, G groups, C candidates, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_kernels.drafts.candidate_walk import Codebooks, Walk, WalkDraws
from dflash_kernels.logits.uniform import DRAFT
from dflash_kernels.suite import Kernels
from dflash_runtime.checkpoint.layout import CONVOLUTIONS, SELECTOR
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import DRAFTS, Drawn, Draws
from dflash_runtime.drafts.token_masks import TokenMasks
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.layers import Attend, DecoderLayer, DecoderStack, Linear, RMSNorm
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TargetEnds
from dflash_runtime.models.weights import Weights


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """The convolutions before and after one sublayer. `kernels` [2, S, H] are the parts that all rows share."""

    kernels: Tensor
    projection: Linear
    suite: Kernels

    @classmethod
    def read(cls, weights: Weights, name: str, suite: Kernels) -> "BlockConvolution":
        projection = Linear.read(weights, f"{name}.kernel_projection", suite)
        return cls(weights[f"{name}.base_kernel"].contiguous(), projection, suite)

    def dynamic(self, normed: Tensor) -> Tensor:
        """Return the parts of the kernels that depend on the row, as parts of a product: [T, H] -> [P, T, 2, S, G]."""
        parts = self.projection.parts(normed)
        return parts.view(*parts.shape[:2], *self.kernels.shape[:2], -1)

    def before(self, normed: Tensor, dynamic: Tensor, num_rows: int) -> Tensor:
        """Convolve the input of the sublayer in blocks of `num_rows` rows, [T, H] -> [T, H]."""
        return self.suite.block_conv(normed, self.kernels[0], dynamic[:, :, 0], num_rows)

    def after(
        self, parts: Tensor, dynamic: Tensor, num_rows: int, residual: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Convolve the output of the sublayer, [P, T, H], add it to the residual, and apply the next norm."""
        dynamic = dynamic[:, :, 1]
        return self.suite.conv_add_norm(parts, self.kernels[1], dynamic, num_rows, residual, norm.weight, norm.eps)


@dataclass(frozen=True, slots=True)
class ConvolvedLayer:
    """A decoder layer with convolutions around attention and feed-forward, and the norm after it."""

    layer: DecoderLayer
    around_attention: BlockConvolution
    around_mlp: BlockConvolution
    next_norm: RMSNorm

    def __call__(
        self, index: int, normed: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, attend: Attend, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`, but the residual includes the layer, and the rows are normalised for the next one.

        Blocks have `num_rows` rows.
        """
        attention, conv = self.layer.attention, self.around_attention
        dynamic = conv.dynamic(normed)
        convolved = conv.before(normed, dynamic, num_rows)
        query, keys, values = attention.project(convolved, cos, sin, attend.place(index))
        attended = attend.read(index, query, keys, values, attention.softmax)
        added = attention.output.parts(attended.flatten(-2))
        normed, residual = conv.after(added, dynamic, num_rows, residual, self.layer.mlp_norm)
        conv = self.around_mlp
        dynamic = conv.dynamic(normed)
        added = self.layer.mlp(conv.before(normed, dynamic, num_rows))
        return conv.after(added, dynamic, num_rows, residual, self.next_norm)


class ConvolvedStack(DecoderStack):
    """The layers of a DFlash 2 draft, with rope and norms."""

    def __init__(self, weights: Weights, config: DraftConfig, placement: Placement) -> None:
        super().__init__(weights, "", config, placement)
        suite = placement.kernels
        self.convolved = []
        for index, layer in enumerate(self.layers):
            names = (f"layers.{index}.{name}" for name in CONVOLUTIONS)
            attention, mlp = (BlockConvolution.read(weights, name, suite) for name in names)
            self.convolved.append(ConvolvedLayer(layer, attention, mlp, self.norms[index + 1]))

    def denoise(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Embedded rows of blocks [R * N, hidden] at positions [R, N] -> normalised rows [R * N, hidden]."""
        cos, sin = self.rope.rows(positions.flatten())
        normed, residual = self.norms[0](hidden), hidden
        for index, layer in enumerate(self.convolved):
            normed, residual = layer(index, normed, residual, cos, sin, attend, positions.shape[1])
        return normed


@DRAFTS.register("dflash2")
class DFlash2Draft(DFlashDraft):
    """A DFlash draft with block convolutions and a candidate selector."""

    def __init__(self, config: DraftConfig, weights: Weights, target: TargetEnds, placement: Placement) -> None:
        assert config.selector is not None, "the dialects of this family state a selector"
        if config.has_reduced_vocab:
            raise UnsupportedError(
                id="selector-vocabulary",
                field="draft_vocab_size",
                found=config.draft_vocab_size,
                expected=f"the target's vocabulary of {config.vocab_size} tokens, which a selector needs",
            )
        super().__init__(config, weights, target, placement)
        self._top_k = config.selector.top_k
        names = (f"{SELECTOR}.{part}_codebook" for part in ("predecessor", "successor"))
        predecessors, successors = (weights[name].contiguous() for name in names)
        self._codebooks = Codebooks(predecessors, successors)
        self._projection = Linear.read(weights, f"{SELECTOR}.hidden_projection", placement.kernels)

    def _read_layers(self, weights: Weights, config: DraftConfig, placement: Placement) -> ConvolvedStack:
        return ConvolvedStack(weights, config, placement)

    def _denoise(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int) -> Tensor:
        assert isinstance(self._decoder, ConvolvedStack)
        hidden = self._decoder.denoise(self._embed(block_ids), positions, attend)
        return hidden.view(*block_ids.shape, -1)[:, 1 : 1 + num_drafts].flatten(0, 1)

    def propose(
        self,
        block_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        num_drafts: int,
        draws: Draws | None,
        masks: TokenMasks | None = None,
    ) -> Drawn:
        """See `drafts.draft.WalkingDraft`. The filters of a request apply to the target only."""
        hidden = self._denoise(block_ids, positions, attend, num_drafts)
        logits = self._score(hidden).unflatten(0, (-1, num_drafts))
        projected = self._projection.parts(hidden)
        anchors = block_ids[:, 0].contiguous()
        if masks is None:
            candidates, walk = self._walk(logits, projected, anchors, draws)
        else:
            candidates, walk = self._walk_within(masks, logits, projected, anchors, draws)
        if draws is None:
            return Drawn(walk.token_ids, logits=logits)
        scores = torch.full(logits.shape, -torch.inf, dtype=walk.scores.dtype, device=logits.device)
        scores.scatter_(-1, candidates, walk.scores)
        whole, all_ids = torch.ones_like(draws.temperatures), torch.zeros_like(draws.seeds)
        described = self._kernels.sample(
            scores.flatten(0, 1), draws.temperatures, all_ids, whole, draws.seeds, draws.positions.flatten(),
            has_filters=False, purpose=DRAFT,
        )  # fmt: skip
        return Drawn(walk.token_ids, described.distribution, logits=logits)

    def candidate_scores(
        self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int
    ) -> tuple[Tensor, Tensor]:
        """See `drafts.draft.SelectingDraft`."""
        hidden = self._denoise(block_ids, positions, attend, num_drafts)
        best, values = self._kernels.top_tokens(self._score(hidden), self._top_k)
        candidates = best.view(len(block_ids), num_drafts, -1)
        anchors = block_ids[:, :1, None].expand(-1, -1, self._top_k)
        before = torch.cat((anchors, candidates[:, :-1]), dim=1)
        reading = self._codebooks.predecessors[before] * self._projection(hidden).view(*before.shape[:2], 1, -1)
        pairs = reading @ self._codebooks.successors[candidates].transpose(2, 3)
        return candidates, values.view_as(candidates)[:, :, None] + pairs

    def _walk(self, logits: Tensor, projected: Tensor, anchors: Tensor, draws: Draws | None) -> tuple[Tensor, Walk]:
        """Walk over the best tokens of logits [R, K, V] after anchors [R] -> candidates [R, K, C], and the walk.

        `projected` [P, R * K, E] are the parts of the positions' projected hidden states.
        """
        best, values = self._kernels.top_tokens(logits.flatten(0, 1), self._top_k)
        candidates = best.view(*logits.shape[:2], -1)
        how = None if draws is None else WalkDraws(draws.temperatures, draws.seeds, draws.positions)
        values = values.view_as(candidates)
        return candidates, self._kernels.candidate_walk(values, candidates, projected, self._codebooks, anchors, how)

    def _walk_within(
        self, masks: TokenMasks, logits: Tensor, projected: Tensor, anchors: Tensor, draws: Draws | None
    ) -> tuple[Tensor, Walk]:
        """See `_walk`. Each position is a walk of its own, because its mask follows from the choices before it."""
        num_drafts = logits.shape[1]
        candidates, walks = [], []
        for place in range(num_drafts):
            at = None if draws is None else replace(draws, positions=draws.positions[:, place : place + 1].contiguous())
            allowed = masks.allow(logits[:, place])[:, None]
            found, walk = self._walk(allowed, projected[:, place::num_drafts].contiguous(), anchors, at)
            anchors = walk.token_ids[:, 0].contiguous()
            masks.take(anchors)
            candidates.append(found)
            walks.append(walk)
        joined = Walk(*(torch.cat(parts, dim=1) for parts in zip(*walks, strict=True)))
        return torch.cat(candidates, dim=1), joined

    def logits_along(self, block_ids: Tensor, positions: Tensor, attend: Attend, text: Tensor) -> Tensor:
        """See `drafts.draft.WalkingDraft`."""
        hidden = self._denoise(block_ids, positions, attend, text.shape[1])
        logits = self._score(hidden).view(*text.shape, -1)
        best, _ = self._kernels.top_tokens(logits.flatten(0, 1), self._top_k)
        candidates = best.view(*text.shape, -1)
        values = logits.gather(-1, candidates)
        before = torch.cat((block_ids[:, :1], text[:, :-1]), dim=1)
        reading = self._codebooks.predecessors[before] * self._projection(hidden).view(*text.shape, -1)
        pairs = (reading[:, :, None] * self._codebooks.successors[candidates]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, values + pairs)
