"""A DFlash 2 draft for training: convolutions around the sublayers, and a selector among each position's best tokens.

Parameters have the names of the checkpoint. `runtime/dflash_runtime/drafts/dflash2.py` runs the result.

Axis letters: B sequences, T context positions, A anchors, N rows of a block, K draft tokens, H hidden width, S taps of
a convolution, C candidates, V vocabulary, E rank of the selector.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .draft import Draft, Layer, Rotary, weighted_mean
from .settings import DraftRecipe, ModelShape, SelectorShape, Settings


class BlockConvolution(nn.Module):
    """The convolutions before (side 0) and after (side 1) one sublayer."""

    def __init__(self, hidden_size: int, shape: SelectorShape, block_size: int) -> None:
        super().__init__()
        self.group_size, self.block_size = shape.group_size, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, shape.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * shape.kernel_size * hidden_size // shape.group_size, False)

    def begin_as_identity(self) -> None:
        """Let every row pass through unchanged."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, normed: Tensor) -> Tensor:
        """Kernels of each row, [B, A*N, H] -> [B, A*N, 2, S, H]."""
        dynamic: Tensor = self.kernel_projection(normed).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        return self.base_kernel + dynamic.repeat_interleave(self.group_size, -1)

    def forward(self, rows: Tensor, kernels: Tensor, side: int) -> Tensor:
        """Mix each row with earlier rows of its block: rows [B, A*N, H] -> [B, A*N, H]."""
        blocks = rows.unflatten(1, (-1, self.block_size))
        mixed = torch.zeros_like(blocks)
        for back in range(kernels.shape[3]):
            earlier = F.pad(blocks, (0, 0, back, 0))[:, :, : self.block_size]
            mixed = mixed + kernels[:, :, side, back].view_as(blocks) * earlier
        return mixed.flatten(1, 2)


class ConvolvedLayer(Layer):
    """A draft layer with convolutions around attention and MLP."""

    def __init__(self, shape: ModelShape, extra: SelectorShape, block_size: int) -> None:
        super().__init__(shape)
        self.attention_conv = BlockConvolution(shape.hidden_size, extra, block_size)
        self.mlp_conv = BlockConvolution(shape.hidden_size, extra, block_size)

    def forward(self, rows: Tensor, context: Tensor, block_rope: Rotary, context_rope: Rotary, mask: Tensor) -> Tensor:
        """rows [B, A*N, H] -> [B, A*N, H]."""
        normed = self.input_layernorm(rows)
        kernels = self.attention_conv.kernels(normed)
        mixed = self.attention_conv(normed, kernels, 0)
        mixed = self.self_attn(mixed, context, block_rope, context_rope, mask)
        rows = rows + self.attention_conv(mixed, kernels, 1)
        normed = self.post_attention_layernorm(rows)
        kernels = self.mlp_conv.kernels(normed)
        result: Tensor = rows + self.mlp_conv(self.mlp(self.mlp_conv(normed, kernels, 0)), kernels, 1)
        return result


class Selector(nn.Module):
    """Scores of pairs of a token and its successor. Successors begin at zero, so that the draft begins as DFlash."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=hidden_size**-0.5)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Hidden states [..., H], tokens before [...], candidates [..., C] -> pair scores [..., C]."""
        wanted = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        scores: Tensor = (self.successor_codebook[candidates] * wanted[..., None, :]).sum(-1)
        return scores


class DFlash2Draft(Draft):
    """A DFlash draft with block convolutions and a candidate selector. Its head is the target's."""

    kind = "dflash2"

    def __init__(self, settings: Settings, recipe: DraftRecipe, mask_token_id: int) -> None:
        self.extra = recipe.selector
        super().__init__(settings, recipe, mask_token_id)
        for part in self.modules():
            if isinstance(part, BlockConvolution):
                part.begin_as_identity()
        self.candidate_selector = Selector(settings.vocab_size, settings.shape.hidden_size, self.extra.rank)

    def _make_layer(self, shape: ModelShape, block_size: int) -> Layer:
        return ConvolvedLayer(shape, self.extra, block_size)

    def loss(
        self, hidden: Tensor, head: Tensor, before: Tensor, labels: Tensor, targets: Tensor | None, decay: float
    ) -> tuple[Tensor, Tensor]:
        """See `Draft.loss`. A label outside the candidates replaces the weakest one."""
        logits = F.linear(hidden, head)
        unary = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view(labels.shape)
        candidates = logits.topk(self.extra.top_k, dim=-1).indices
        same = candidates == labels[..., None]
        is_found = same.any(-1)
        place = torch.where(is_found, same.int().argmax(-1), self.extra.top_k - 1)
        candidates = candidates.scatter(-1, place[..., None], labels[..., None])
        scores = logits.gather(-1, candidates).float() + self.candidate_selector(hidden, before, candidates).float()
        chosen = F.cross_entropy(scores.flatten(0, 2), place.flatten(), reduction="none").view(labels.shape)
        right = (scores.argmax(-1) == place) & is_found
        return weighted_mean(unary + self.extra.loss_share * chosen, decay), right.int().cumprod(-1).sum(-1)

    def choose(self, hidden: Tensor, head: Tensor, anchor_ids: Tensor) -> Tensor:
        """See `Draft.choose`."""
        logits = F.linear(hidden, head)
        best = logits.topk(self.extra.top_k, dim=-1)
        before, chosen = anchor_ids, []
        for position in range(hidden.shape[2]):
            candidates = best.indices[:, :, position]
            pairs = self.candidate_selector(hidden[:, :, position], before, candidates)
            pick = (best.values[:, :, position] + pairs).argmax(-1, keepdim=True)
            before = candidates.gather(-1, pick)[..., 0]
            chosen.append(before)
        return torch.stack(chosen, -1)

    def extra_keys(self) -> dict[str, object]:
        """See `Draft.extra_keys`."""
        return {
            "conv_group_size": self.extra.group_size,
            "conv_kernel_size": self.extra.kernel_size,
            "selector_rank": self.extra.rank,
            "selector_top_k": self.extra.top_k,
        }
