"""The draft network and its training.

Axis letters: B sequences, T context positions, A anchors, N rows of a block, H hidden width, K tapped layers,
V the draft's output vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .settings import DraftRecipe, ModelShape, Settings
from .target import (
    Pace,
    Report,
    make_optimizer,
    maybe_compiled,
    set_learning_rate,
    tapped_features,
    training_precision,
)


class RMSNorm(nn.Module):
    """Qwen3's norm, with statistics in fp32 and the result in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(hidden.dtype)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of some positions, each [B, T, D]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> Rotary:
        """Tables for integer positions [B, T]."""
        steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions[..., None].float() * theta**-steps
        angles = torch.cat([angles, angles], dim=-1)
        return cls(angles.cos(), angles.sin())

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate heads [B, T, heads, D]."""
        low, high = heads.chunk(2, dim=-1)
        turned = torch.cat([-high, low], dim=-1)
        return (heads * self.cos[:, :, None] + turned * self.sin[:, :, None]).to(heads.dtype)


class Attention(nn.Module):
    """Attention with queries from block rows, and keys and values from context rows and block rows."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, rows: Tensor, context: Tensor, block_rope: Rotary, context_rope: Rotary, mask: Tensor) -> Tensor:
        """Rows [B, A*N, H] and context [B, T, H] -> [B, A*N, H]; mask [B, 1, A*N, T + A*N] of visible keys."""
        query = block_rope.rotate(self.q_norm(self._heads(self.q_proj(rows))))
        context_key = context_rope.rotate(self.k_norm(self._heads(self.k_proj(context))))
        block_key = block_rope.rotate(self.k_norm(self._heads(self.k_proj(rows))))
        value = self._heads(torch.cat([self.v_proj(context), self.v_proj(rows)], dim=1))
        key = torch.cat([context_key, block_key], dim=1)
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.repeat_interleave(repeats, dim=2).transpose(1, 2),
            value.repeat_interleave(repeats, dim=2).transpose(1, 2),
            attn_mask=mask,
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.shape.head_dim)


class MLP(nn.Module):
    """Qwen3's gated feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


class Layer(nn.Module):
    """One draft layer. Only block rows pass through it. Every layer reads the same context rows."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, rows: Tensor, context: Tensor, block_rope: Rotary, context_rope: Rotary, mask: Tensor) -> Tensor:
        """rows [B, A*N, H] -> [B, A*N, H]."""
        rows = rows + self.self_attn(self.input_layernorm(rows), context, block_rope, context_rope, mask)
        result: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return result


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint. The default is right. Other values are mistakes that load without an error."""

    causal_block: bool = False
    rope_theta: float | None = None
    mask_token_id: int | None = None


RIGHT_READING = Reading()


class Draft(nn.Module):
    """A DFlash draft with the parameter names of the flat checkpoint layout. Subclasses are its relatives.

    kind                  the name of the kind in checkpoints
    samples_from_anchor   every row predicts the token after it; otherwise each mask predicts its own token
    """

    kind = "dflash"
    samples_from_anchor = False

    def __init__(self, settings: Settings, recipe: DraftRecipe, mask_token_id: int) -> None:
        super().__init__()
        shape = replace(settings.shape, intermediate_size=recipe.intermediate_size)
        self.shape = shape
        self.block_size = settings.block_size
        self.mask_token_id = mask_token_id
        self.fc = nn.Linear(len(settings.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(self._make_layer(shape, settings.block_size) for _ in range(recipe.num_layers))
        self.windows = recipe.windows or (None,) * recipe.num_layers
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.apply(_initialise)

    def _make_layer(self, shape: ModelShape, block_size: int) -> Layer:
        return Layer(shape)

    @property
    def num_draft_tokens(self) -> int:
        """Rows of a block that predict a token, K."""
        return self.block_size - (not self.samples_from_anchor)

    def forward(
        self, features: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor, reading: Reading = RIGHT_READING
    ) -> Tensor:
        """Hidden states [B, A, K, H] of the rows that predict the tokens after each anchor.

        Takes features [B, T, K*H] of the sequences ids [B, T], positions of anchors [B, A], and the target's embedding
        [V, H]. All anchors of a sequence are computed at once. A block sees the context before its anchor and itself,
        but no other block.
        """
        batch, count = anchors.shape
        theta = reading.rope_theta or self.shape.rope_theta
        offsets = torch.arange(self.block_size, device=ids.device)
        block_positions = (anchors[..., None] + offsets).flatten(1)
        context_positions = torch.arange(ids.shape[1], device=ids.device)[None]
        block_rope = Rotary.at(block_positions, self.shape.head_dim, theta)
        context_rope = Rotary.at(context_positions, self.shape.head_dim, theta)
        masks = {
            window: block_mask(anchors, ids.shape[1], self.block_size, reading.causal_block, window)
            for window in set(self.windows)
        }
        context = self.hidden_norm(self.fc(features))
        rows = self._block_rows(ids, anchors, embedding, reading)
        for layer, window in zip(self.layers, self.windows, strict=True):
            rows = layer(rows, context, block_rope, context_rope, masks[window])
        hidden: Tensor = self.norm(rows).view(batch, count, self.block_size, -1)
        return hidden if self.samples_from_anchor else hidden[:, :, 1:]

    def loss(
        self, hidden: Tensor, head: Tensor, before: Tensor, labels: Tensor, targets: Tensor | None, decay: float
    ) -> tuple[Tensor, Tensor]:
        """Weighted loss, and the number of correct leading draft tokens [B, A].

        Takes hidden states [B, A, K, H], the head [V, H], the text's token before each position and its own token, both
        [B, A, K], and the target's logits [B, A, K, V] for kinds that learn from them. Labels may be -100: no loss. A
        wrong draft token makes all later ones useless, so the k-th one has the weight exp(-(k-1)/decay).
        """
        logits = F.linear(hidden, head)
        losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view(labels.shape)
        right = (logits.argmax(-1) == labels).int().cumprod(-1).sum(-1)
        return weighted_mean(losses, decay, labels >= 0), right

    def choose(self, hidden: Tensor, head: Tensor, anchor_ids: Tensor) -> Tensor:
        """Hidden states [B, A, K, H] and anchor tokens [B, A] -> greedy draft tokens as rows of the head [B, A, K]."""
        return F.linear(hidden, head).argmax(-1)

    def extra_keys(self) -> dict[str, object]:
        """Config keys that only this kind of draft has."""
        return {}

    def _block_rows(self, ids: Tensor, anchors: Tensor, embedding: Tensor, reading: Reading) -> Tensor:
        """The embedding of each anchor, followed by mask token embeddings: [B, A*N, H]."""
        mask_id = self.mask_token_id if reading.mask_token_id is None else reading.mask_token_id
        block = torch.full((*anchors.shape, self.block_size), mask_id, device=ids.device)
        block[..., 0] = ids.gather(1, anchors)
        return F.embedding(block.flatten(1), embedding)


def weighted_mean(losses: Tensor, decay: float, counted: Tensor | None = None) -> Tensor:
    """Mean of losses [..., K], the k-th with the weight exp(-(k-1)/decay). `counted` [..., K] leaves some out."""
    weights = torch.exp(-torch.arange(losses.shape[-1], device=losses.device) / decay).expand_as(losses)
    weights = weights if counted is None else weights * counted
    return (losses * weights).sum() / weights.sum()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def block_mask(
    anchors: Tensor, context_length: int, block_size: int, causal: bool, window: int | None = None
) -> Tensor:
    """Mask of visible keys per block row: anchors [B, A] -> [B, 1, A*N, T + A*N], context columns first.

    With a window of at least a block, a row sees context less than `window` positions before itself.
    """
    count = anchors.shape[1]
    before = torch.arange(context_length, device=anchors.device) < anchors[..., None]
    rows = torch.arange(count * block_size, device=anchors.device)
    inside = rows[:, None] // block_size == rows[None] // block_size
    if causal:
        inside = inside & (rows[None] <= rows[:, None])
    context_part = before.repeat_interleave(block_size, dim=1)
    if window is not None:
        positions = (anchors[..., None] + torch.arange(block_size, device=anchors.device)).flatten(1)
        distances = positions[..., None] - torch.arange(context_length, device=anchors.device)
        context_part = context_part & (distances < window)
    block_part = inside[None].expand(len(anchors), -1, -1)
    return torch.cat([context_part, block_part], dim=-1)[:, None]


@dataclass(frozen=True)
class Head:
    """Rows of the target's head that a draft may propose: weight [V, H] and target ids [V]."""

    weight: Tensor
    token_ids: Tensor

    @classmethod
    def full(cls, embedding: Tensor) -> Head:
        return cls(embedding, torch.arange(len(embedding), device=embedding.device))

    @classmethod
    def most_frequent(cls, embedding: Tensor, counts: Tensor, size: int, always: Sequence[int]) -> Head:
        """The `size` ids that the target wrote most often, with `always`, in ascending order."""
        ranked = counts.clone()
        ranked[list(always)] = counts.max() + 1
        token_ids = ranked.argsort(descending=True, stable=True)[:size].sort().values
        return cls(embedding[token_ids], token_ids)

    def label_table(self, vocab_size: int) -> Tensor:
        """Row of each target id [vocab_size]; -100, which the loss ignores, for ids without a row."""
        table = torch.full((vocab_size,), -100, device=self.token_ids.device)
        table[self.token_ids] = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return table


@dataclass(frozen=True)
class TextSet:
    """The target's continuations on the training device: ids [B, T] and prompt lengths [B]."""

    ids: Tensor
    prompt_lengths: Tensor
    new_tokens: int

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, size: int) -> TextSet:
        picks = torch.randint(0, len(self), (size,), device=self.ids.device)
        return replace(self, ids=self.ids[picks].long(), prompt_lengths=self.prompt_lengths[picks])

    def random_anchors(self, count: int, block_size: int) -> Tensor:
        """Random anchors [B, count] in the generated part, each with room for a whole block."""
        room = self.new_tokens - block_size + 1
        offsets = torch.randint(0, room, (len(self), count), device=self.ids.device)
        return self.prompt_lengths[:, None] + offsets


def block_labels(rows: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Tokens after each anchor: rows [B, T], anchors [B, A] -> [B, A, N-1]."""
    offsets = torch.arange(1, block_size, device=anchors.device)
    positions = anchors[..., None] + offsets
    return rows.gather(1, positions.flatten(1)).view_as(positions)


def draft_loss(
    draft: Draft,
    head: Tensor,
    embedding: Tensor,
    features: Tensor,
    ids: Tensor,
    anchors: Tensor,
    labels: Tensor,
    decay: float,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The draft's loss, and the mean number of correct leading draft tokens.

    Labels [B, A, K] are rows of head [V, H], or -100. `targets` has the target's logits [B, A, K, V], if the kind needs
    them.
    """
    before = block_labels(ids, anchors - 1, labels.shape[-1] + 1)
    hidden = draft(features, ids, anchors, embedding)
    loss, right = draft.loss(hidden, head, before, labels, targets, decay)
    return loss, right.float().mean()


def train_draft(
    draft: Draft,
    head: Head,
    target: PreTrainedModel,
    texts: TextSet,
    settings: Settings,
    recipe: DraftRecipe,
    report: Report,
) -> list[dict[str, float]]:
    """Train in place on random anchors in the target's own text -> the curve of loss and running acceptance."""
    device = texts.ids.device
    optimizer = make_optimizer(draft, recipe.learning_rate, recipe.weight_decay)
    compute_features = maybe_compiled(tapped_features, device)
    compute_loss = maybe_compiled(draft_loss, device)
    embedding = target.model.embed_tokens.weight.detach()
    label_table = head.label_table(settings.vocab_size)
    curve: list[dict[str, float]] = []
    count, step = Pace(recipe.steps, recipe.seconds).clock(), -1
    while (reached := count(step + 1)) < recipe.steps:
        step += 1
        set_learning_rate(optimizer, reached, recipe.steps, recipe.warmup_steps, recipe.learning_rate)
        batch = texts.batch(recipe.batch_size)
        anchors = batch.random_anchors(recipe.anchors_per_sequence, settings.block_size)
        labels = block_labels(label_table[batch.ids], anchors, settings.block_size)
        with training_precision(device):
            with torch.no_grad():
                features = compute_features(target, batch.ids, settings.target_layer_ids)
            loss, accepted = compute_loss(
                draft, head.weight, embedding, features, batch.ids, anchors, labels, recipe.loss_decay
            )
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 250 == 0 or count(step + 1) >= recipe.steps:
            point = {"step": step + 1, "loss": round(float(loss.detach()), 4), "accepted": round(float(accepted), 3)}
            curve.append(point)
            report(step + 1, f"loss {point['loss']:.3f}, {point['accepted']:.2f} accepted")
        elif step % 20 == 0:
            report(step + 1, "")
    return curve
