"""The DFlash 2 draft: DFlash with convolutions around its sublayers and a choice among each position's best tokens.

Before and after attention and feed-forward, a short causal convolution mixes each row with the rows before it in its
block. The kernels depend on the sublayer's normalised input. Context KV is made as in DFlash. Masks do not propose
alone: from left to right, the selector scores each pair of a chosen token and a candidate of the next position.
Source: z-lab/dflash 0.1.0 model.py::DFlash2DraftModel.

Axis letters: R requests, N block rows, K draft tokens, T flat rows, S taps, G groups, C candidates, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.candidate_walk import WalkDraws
from dflash_kernels.rope_norm import sum_parts_ref
from dflash_kernels.suite import Kernels
from dflash_kernels.uniform import DRAFT
from dflash_runtime.checkpoint.layout import CONVOLUTIONS, SELECTOR
from dflash_runtime.config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import DRAFTS, Drawn, Draws
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.layers import Attend, DecoderLayer, DecoderStack, Linear
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
        """Return the parts of the kernels that depend on the row: [T, H] -> [T, 2, S, G]."""
        return self.projection(normed).view(len(normed), *self.kernels.shape[:2], -1)

    def __call__(self, hidden: Tensor, dynamic: Tensor, side: int, num_rows: int) -> Tensor:
        """Convolve blocks of `num_rows` rows, [T, H] -> [T, H]. Side 0 is before the sublayer, 1 after it."""
        return self.suite.block_conv(hidden, self.kernels[side], dynamic[:, side], num_rows)


@dataclass(frozen=True, slots=True)
class ConvolvedLayer:
    """A decoder layer with convolutions around attention and feed-forward."""

    layer: DecoderLayer
    around_attention: BlockConvolution
    around_mlp: BlockConvolution

    def __call__(
        self, index: int, normed: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, attend: Attend, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`. Blocks have `num_rows` rows."""
        attention, conv = self.layer.attention, self.around_attention
        dynamic = conv.dynamic(normed)
        query, keys, values = attention.project(conv(normed, dynamic, 0, num_rows), cos, sin, attend.place(index))
        attended = attend.read(index, query, keys, values, attention.softmax)
        added = conv(attention.output(attended.flatten(-2)), dynamic, 1, num_rows)
        normed, residual = self.layer.mlp_norm.add(added[None], residual)
        conv = self.around_mlp
        dynamic = conv.dynamic(normed)
        added = sum_parts_ref(self.layer.mlp(conv(normed, dynamic, 0, num_rows)), residual.dtype)
        return conv(added, dynamic, 1, num_rows)[None], residual


class ConvolvedStack(DecoderStack):
    """The layers of a DFlash 2 draft, with rope and norms."""

    def __init__(self, weights: Weights, config: DraftConfig, placement: Placement) -> None:
        super().__init__(weights, "", config, placement)
        names = [[f"layers.{index}.{name}" for name in CONVOLUTIONS] for index in range(config.num_layers)]
        self.convolved = [
            ConvolvedLayer(layer, *(BlockConvolution.read(weights, name, placement.kernels) for name in both))
            for layer, both in zip(self.layers, names, strict=True)
        ]

    def denoise(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Embedded rows of blocks [R * N, hidden] at positions [R, N] -> normalised rows [R * N, hidden]."""
        cos, sin = self.rope.rows(positions.flatten())
        normed, residual = self.norms[0](hidden), hidden
        for index, layer in enumerate(self.convolved):
            added, residual = layer(index, normed, residual, cos, sin, attend, positions.shape[1])
            normed, residual = self.norms[index + 1].add(added, residual)
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
        self._predecessors = weights[f"{SELECTOR}.predecessor_codebook"].contiguous()
        self._successors = weights[f"{SELECTOR}.successor_codebook"].contiguous()
        self._projection = Linear.read(weights, f"{SELECTOR}.hidden_projection", placement.kernels)

    def _read_layers(self, weights: Weights, config: DraftConfig, placement: Placement) -> ConvolvedStack:
        return ConvolvedStack(weights, config, placement)

    def _denoise(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int) -> Tensor:
        assert isinstance(self._decoder, ConvolvedStack)
        hidden = self._decoder.denoise(self._embed(block_ids), positions, attend)
        return hidden.view(*block_ids.shape, -1)[:, 1 : 1 + num_drafts].flatten(0, 1)

    def propose(
        self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int, draws: Draws | None
    ) -> Drawn:
        """See `drafts.draft.WalkingDraft`. The filters of a request apply to the target only."""
        hidden = self._denoise(block_ids, positions, attend, num_drafts)
        logits = self._score(hidden).unflatten(0, (-1, num_drafts))
        candidates = logits.topk(self._top_k, dim=-1, sorted=False).indices.sort(dim=-1).values
        how = None if draws is None else WalkDraws(draws.temperatures, draws.seeds, draws.positions)
        walk = self._kernels.candidate_walk(
            logits.gather(-1, candidates), candidates, self._projection(hidden).unflatten(0, (-1, num_drafts)),
            self._predecessors, self._successors, block_ids[:, 0].contiguous(), how,
        )  # fmt: skip
        if draws is None:
            return Drawn(walk.token_ids)
        scores = torch.full(logits.shape, -torch.inf, dtype=walk.scores.dtype, device=logits.device)
        scores.scatter_(-1, candidates, walk.scores)
        whole, all_ids = torch.ones_like(draws.temperatures), torch.zeros_like(draws.seeds)
        described = self._kernels.sample(
            scores.flatten(0, 1), draws.temperatures, all_ids, whole, draws.seeds, draws.positions.flatten(),
            has_filters=False, purpose=DRAFT,
        )  # fmt: skip
        return Drawn(walk.token_ids, described.distribution)
