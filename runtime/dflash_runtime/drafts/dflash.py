"""The DFlash draft: context KV from target hidden states, and a block denoised in one pass.

Context rows and block rows get their K and V from different inputs. For context rows, every layer projects the same
`h = hidden_norm(fc(features))`, without the layer's input norm. For block rows, each layer projects its own input, as
in any decoder. Rows 1..N-1 of a block hold masks. Every mask predicts the token at its own position.
Source: arXiv 2602.06036; z-lab/dflash model.py::DFlashDraftModel (PyPI dflash 0.1.0).

Axis letters: R requests, N block rows, K draft tokens, T flat tokens, L layers, KV heads, D head dim, F features,
V output vocabulary.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_weight import SCALES
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.draft import DRAFTS
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.models.layers import Attend, DecoderStack, Linear, PagedKV, RMSNorm
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TargetEnds
from dflash_runtime.models.weights import Weights, join_matrices


@DRAFTS.register("dflash")
class DFlashDraft:
    """A Qwen3-shaped DFlash draft. It uses the target's embedding and head unless it has its own."""

    follows_from_shapes: ClassVar[bool] = True
    samples_from_anchor: ClassVar[bool] = False

    def __init__(self, config: DraftConfig, weights: Weights, target: TargetEnds, placement: Placement) -> None:
        if config.sample_from_anchor and not self.samples_from_anchor:
            raise UnsupportedError(
                "sample_from_anchor is true, but DFlash predicts at masked positions only",
                id="draft-samples-from-anchor",
                field="sample_from_anchor",
                found=True,
                expected="false",
                hint="measure acceptance in the engine that the draft was trained for",
            )
        self.config = config
        self.target_ids = _target_ids(config, weights)
        self._embedding = weights[EMBEDDING] if config.has_own_width else target.embedding
        self._embedding_scale = config.input_embedding_scale
        if config.has_target_scale and not config.has_own_width:
            # The target rounds its scale to the dtype of its rows.
            self._embedding_scale *= float(torch.tensor(target.embedding_scale, dtype=self._embedding.dtype))
        self._kernels = kernels = placement.kernels
        # A head in FP8 is the draft's own rounding of the target's.
        has_head = config.has_own_width or config.has_reduced_vocab or f"lm_head{SCALES}" in weights
        self._head = Linear.read(weights, HEAD.removesuffix(".weight"), kernels) if has_head else target.head
        self._features = Linear.read(weights, "fc", kernels)
        self._feature_norm = RMSNorm(weights["hidden_norm.weight"], config.rms_norm_eps, kernels)
        self._decoder = self._read_layers(weights, replace(config, rope=_without_partial(config.rope)), placement)
        self._context = _stack_context([layer.attention.key_value for layer in self._decoder.layers])
        self._key_norms = torch.stack([layer.attention.key_norm for layer in self._decoder.layers])

    def _read_layers(self, weights: Weights, config: DraftConfig, placement: Placement) -> DecoderStack:
        return DecoderStack(weights, "", config, placement)

    def write_context(self, features: Tensor, positions: Tensor, cache: PagedKV, slots: Tensor) -> None:
        """See `drafts.draft.Draft`."""
        config = self.config
        hidden = self._feature_norm.sum(self._features.parts(features), features.dtype)
        projected = self._context(hidden).view(-1, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        cos, sin = self._decoder.rope.rows(positions)
        self._kernels.context_kv_store(
            projected, self._key_norms, config.rms_norm_eps, cos, sin, cache.keys, cache.values, slots
        )

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        """See `drafts.draft.Draft`."""
        num_drafts = block_ids.shape[1] - 1 if num_drafts is None else num_drafts
        logits = self._score(self._denoise(block_ids, positions, attend, num_drafts))
        return logits.view(len(block_ids), num_drafts, -1)

    def _denoise(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int) -> Tensor:
        """Return the hidden states of the first masks of each block, [R * K, hidden]."""
        num_blocks, block = block_ids.shape
        wanted = None
        if num_drafts < block - 1:  # otherwise selecting rows costs a launch and saves little
            rows = torch.arange(num_blocks * block, device=block_ids.device).view(num_blocks, block)
            wanted = rows[:, 1 : 1 + num_drafts].flatten()
        hidden, _ = self._decoder(self._embed(block_ids), positions.flatten(), attend, wanted=wanted)
        # Flatten the blocks into one matrix: a batched product would read the head once per block.
        return hidden if wanted is not None else hidden.view(num_blocks, block, -1)[:, 1:].flatten(0, 1)

    def _embed(self, block_ids: Tensor) -> Tensor:
        """[R, N] -> [R * N, hidden]."""
        return _scale(self._embedding[block_ids.flatten()], self._embedding_scale)

    def _score(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V'] of hidden states [T, hidden]."""
        logits = _scale(self._head(hidden), self.config.output_multiplier * self.config.logit_scale)
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits


def _without_partial(rope: RopeConfig) -> RopeConfig:
    """Return the rope over every dimension of a head, without `partial_rotary_factor`.

    Trainers copy that key from the target's config, and train with rope over every dimension.
    Source: NVIDIA/Model-Optimizer dflash.md; z-lab/dflash#170.
    """
    return replace(rope, params={key: item for key, item in rope.params.items() if key != "partial_rotary_factor"})


def _scale(rows: Tensor, factor: float) -> Tensor:
    """Multiply rows by a factor, without a launch if the factor is 1."""
    return rows if factor == 1 else rows * factor


def _stack_context(projections: list[Linear]) -> Linear:
    """Return one projection to the K and V of every layer, [L * 2 * KV * D, hidden]: all layers read the same rows."""
    biases = [projection.bias for projection in projections if projection.bias is not None]
    weight = join_matrices([projection.weight for projection in projections])
    return Linear(weight, torch.cat(biases) if biases else None, projections[0].kernels)


def _target_ids(config: DraftConfig, weights: Weights) -> Tensor | None:
    """Return the target id of each draft id, [V] int64, or None if draft and target have the same vocabulary.

    The file stores offsets: target id = draft id + d2t[draft id].

    Raises:
        CheckpointError: a target id is outside the target's vocabulary, or two draft ids have the same target id.
    """
    if not config.has_reduced_vocab:
        return None
    offsets = weights[DRAFT_TO_TARGET].to(torch.int64)
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(outside):
        raise CheckpointError(
            id="map-outside-vocabulary",
            field=DRAFT_TO_TARGET,
            found=int(outside[0]),
            expected=f"target ids in [0, {config.vocab_size}), each stored as an offset from its draft id",
            hint="dflash validate DRAFT --level weights",
        )
    target_ids, counts = ids.unique(return_counts=True)
    if len(target_ids) < len(ids):
        twice = int(target_ids[counts > 1][0])
        both = (ids == twice).nonzero()[:2, 0].tolist()
        raise CheckpointError(
            f"{DRAFT_TO_TARGET}: draft ids {both[0]} and {both[1]} both map to target id {twice}",
            id="map-repeats-id",
            field=DRAFT_TO_TARGET,
            found=both,
            expected="each target id once",
            hint="dflash validate DRAFT --level weights",
        )
    return ids
