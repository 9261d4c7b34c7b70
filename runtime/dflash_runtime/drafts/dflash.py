"""The DFlash draft: context KV from target hidden states, and a block denoised in one pass.

Context rows and block rows differ in where their K and V come from. A context row's are made from
`h = hidden_norm(fc(features))`, the same `h` for every layer and without the layer's input norm; a block row's come
from the layer stack as in any decoder. Rows 1..N-1 hold masks and each predicts the token at its own position.
Source: arXiv 2602.06036; z-lab/dflash model.py::DFlashDraftModel (PyPI dflash 0.1.0).

Axis letters: R requests, N block rows, K drafted tokens, T flat tokens, L layers, KV heads, D head dim, F features,
V output vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.suite import Kernels
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, HEAD
from dflash_runtime.config import DraftConfig
from dflash_runtime.device.kv import KVCache
from dflash_runtime.drafts.draft import DRAFTS
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.models.layers import Attend, Attention, DecoderLayer, Linear, RMSNorm, RopeTable, Weights
from dflash_runtime.models.target import Target


@DRAFTS.register("dflash")
class DFlashDraft:
    """A Qwen3-shaped DFlash draft. It borrows the target's embedding, and its head unless it brings a reduced one."""

    def __init__(
        self,
        config: DraftConfig,
        weights: Weights,
        target: Target,
        *,
        num_positions: int,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if config.sample_from_anchor:
            raise UnsupportedError("a draft that samples from its anchor has another block layout than DFlash")
        self.config = config
        self.target_ids = _target_ids(config, weights)
        self._embedding = target.embedding
        self._head = Linear(weights[HEAD]) if config.has_reduced_vocab else target.head
        self._features = Linear(weights["fc.weight"])
        self._kernels = kernels
        self._feature_norm = RMSNorm(weights["hidden_norm.weight"], config.rms_norm_eps, kernels)
        self._norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps, kernels)
        self._layers = [
            DecoderLayer.read(weights, f"layers.{index}", config, kernels) for index in range(config.num_layers)
        ]
        self._context = _stack_context([layer.attention for layer in self._layers])
        self._key_norms = torch.stack([layer.attention.key_norm for layer in self._layers])
        self._rope = RopeTable(
            config.rope, config.head_dim, config.max_position_embeddings, num_positions, device, dtype
        )

    def write_context(self, features: Tensor, positions: Tensor, cache: KVCache, slots: Tensor) -> None:
        """See `drafts.base.Draft`."""
        config = self.config
        hidden = self._feature_norm(self._features(features))
        projected = self._context(hidden).view(-1, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        cos, sin = self._rope.rows(positions)
        self._kernels.context_kv_store(
            projected, self._key_norms, config.rms_norm_eps, cos, sin, cache.keys, cache.values, slots
        )

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `drafts.base.Draft`."""
        hidden = F.embedding(block_ids.flatten(), self._embedding) * self.config.input_embedding_scale
        cos, sin = self._rope.rows(positions.flatten())
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, cos, sin, attend)
        drafted = hidden.view(*block_ids.shape, -1)[:, 1:]
        return self._cap(self._head(self._norm(drafted.contiguous())))

    def _cap(self, logits: Tensor) -> Tensor:
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits


def _stack_context(attentions: list[Attention]) -> Linear:
    """One projection to every layer's keys and values, [L * 2 * KV * D, hidden]: context rows are the same for all."""
    parts = [part for attention in attentions for part in (attention.key, attention.value)]
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def _target_ids(config: DraftConfig, weights: Weights) -> Tensor | None:
    """The target id of each draft id, [V] int64, or None where the vocabularies are one.

    The file stores offsets: target id = draft id + d2t[draft id].
    """
    if not config.has_reduced_vocab:
        return None
    offsets = weights[DRAFT_TO_TARGET].to(torch.int64)
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
        raise CheckpointError(
            f"{DRAFT_TO_TARGET}: maps to id {int(ids.max())}, expected ids below {config.vocab_size}; offsets, not "
            f"absolute ids",
            hint="dflash validate DRAFT --level weights",
        )
    return ids
