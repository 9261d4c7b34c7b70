"""Layers of Gemma 4 decoders: sliding and full layers with heads and rope of their own, norms around each sublayer, and
in some models experts beside the feed-forward.

Source: huggingface/transformers models/gemma4/modeling_gemma4.py.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, E experts, F inner width.
"""

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.mixtures.dense_beside import Dense
from dflash_kernels.norms.sandwich_norm import Beside
from dflash_kernels.suite import Kernels
from dflash_runtime.checkpoint.targets.layer_kinds import FULL, SLIDING
from dflash_runtime.models.experts import Experts
from dflash_runtime.models.gemma4_shapes import EXPERT_NORMS, NORMS, has_equal_kv
from dflash_runtime.models.layers import GATES, MLP, Attend, Attention, DecoderStack, Linear, RMSNorm, read_mlp
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.rope import RopeTable
from dflash_runtime.models.weights import Weights
from dflash_runtime.ranks.rank_group import Ranks
from dflash_runtime.target_config import TargetConfig


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """The experts of a layer, which read the residual stream that the dense feed-forward reads."""

    experts: Experts
    dense_norm: Tensor  # [hidden], of the dense feed-forward's output
    norm: Tensor  # [hidden], of the experts' output


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """Attention and feed-forward, each between two norms. The caller applies the first norm and the last one."""

    attention: Attention
    kind: str
    mlp: MLP
    beside: ExpertsBeside | None
    attention_norm: Tensor  # [hidden], of the attention's output
    mlp_norm: Tensor  # [hidden], of the feed-forward's output
    outer: Tensor  # [N, hidden], norms of the rows for the feed-forward, and for the experts and their router
    scale: Tensor  # [1]

    @classmethod
    def read(cls, weights: Weights, name: str, config: TargetConfig, kernels: Kernels) -> "GemmaLayer":
        layer = int(name.rpartition(".")[2])
        _, after_attention, before_mlp, after_mlp = (weights[f"{name}.{norm}.weight"] for norm in NORMS)
        mlp = read_mlp(weights, f"{name}.mlp", config, kernels)
        assert isinstance(mlp, MLP)
        beside, outer = None, [before_mlp]
        if config.experts is not None:
            before, after_dense, after = (weights[f"{name}.{norm}.weight"] for norm in EXPERT_NORMS)
            outer += [before, weights[f"{name}.router.scale"].to(before.dtype) * config.hidden_size**-0.5]
            beside = ExpertsBeside(_read_experts(weights, name, config, kernels), after_dense, after)
        return cls(
            _read_attention(weights, f"{name}.self_attn", config, layer, kernels),
            SLIDING if config.windows[layer] is not None else FULL,
            mlp,
            beside,
            after_attention,
            after_mlp,
            torch.stack(outer),
            weights[f"{name}.layer_scalar"],
        )

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        return self.beside is None or self.beside.experts.follows_from_shapes

    def feed_forward(self, normed: Tensor, ranks: Ranks) -> tuple[Tensor, Beside | None]:
        """Normalised rows [N, T, hidden] -> parts of the feed-forward's output, and the output of the experts."""
        if self.beside is None:
            return ranks.total(self.mlp(normed[0])), None
        own, (dense_rows, expert_rows, seen) = self.beside, normed
        if isinstance(self.mlp.gate_up.weight, Tensor) and isinstance(self.mlp.down.weight, Tensor):
            dense = Dense(dense_rows, self.mlp.gate_up.weight, self.mlp.down.weight, self.mlp.gate)
            chosen, scores, parts = own.experts.choose_beside(seen, dense)
        else:
            chosen, scores = own.experts.choose(seen)
            parts = self.mlp(dense_rows)
        experts = own.experts.compute(expert_rows, chosen, scores)
        return ranks.total(parts), Beside(ranks.total(experts), own.dense_norm, own.norm)


class GemmaStack(DecoderStack):
    """The layers of a Gemma 4 decoder, with a rope for each kind of layer."""

    def __init__(self, weights: Weights, prefix: str, config: TargetConfig, placement: Placement) -> None:
        self.ranks = placement.ranks
        kernels, layers = placement.kernels, range(config.num_layers)
        self.gemma_layers = [GemmaLayer.read(weights, f"{prefix}layers.{index}", config, kernels) for index in layers]
        names = [*(f"layers.{index}.{NORMS[0]}" for index in layers), "norm"]
        self.norms = [RMSNorm(weights[f"{prefix}{name}.weight"], config.rms_norm_eps, kernels) for name in names]
        sizes = {layer.kind: layer.attention.head_dim for layer in self.gemma_layers}
        self.ropes = {
            kind: RopeTable(config.ropes[kind], size, config.max_position_embeddings, placement)
            for kind, size in sizes.items()
        }

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        return all(layer.follows_from_shapes for layer in self.gemma_layers)

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        taps: Container[int] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `DecoderStack`."""
        turns = {kind: rope.rows(positions) for kind, rope in self.ropes.items()}
        outputs: dict[int, Tensor] = {}
        normed, residual = self.norms[0](hidden), hidden
        last = len(self.gemma_layers) - 1
        kept = wanted if last not in taps else None
        for index, layer in enumerate(self.gemma_layers):
            norm = self.norms[index + 1]
            join = norm.kernels.sandwich_norm
            mixed = layer.attention(index, normed, *turns[layer.kind], attend)
            if index == last and kept is not None:
                mixed, residual = mixed[kept], residual[kept]
            parts = self.ranks.total(layer.attention.output.parts(mixed))
            inputs, residual = join(parts, residual, layer.attention_norm, layer.outer, norm.eps)
            parts, beside = layer.feed_forward(inputs, self.ranks)
            ahead, residual = join(parts, residual, layer.mlp_norm, norm.weight[None], norm.eps, layer.scale, beside)
            normed = ahead[0]
            if index in taps:
                outputs[index] = residual
        return normed if wanted is None or kept is not None else normed[wanted], outputs


def _read_attention(weights: Weights, name: str, config: TargetConfig, layer: int, kernels: Kernels) -> Attention:
    """Read a layer's attention. Scores are not divided, so the query norm has the factor that our attention divides by.

    Values have a norm without a weight. If values are keys, the projection computes both once.
    """
    num_kv, size = config.kv_shapes[layer]
    if has_equal_kv(config, layer):
        joined = torch.cat([weights[f"{name}.{part}_proj.weight"] for part in "qk"])
    else:
        joined = weights[f"{name}.qkv_proj.weight"]
    query_norm, key_norm = (weights[f"{name}.{part}_norm.weight"] for part in "qk")
    norms = (query_norm * size**0.5, key_norm, torch.ones_like(key_norm))
    counts = (config.num_heads, num_kv, num_kv)
    return Attention(
        Linear(joined, kernels=kernels),
        Linear.read(weights, f"{name}.o_proj", kernels),
        torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)]),
        config.rms_norm_eps,
        config.num_heads,
        num_kv,
        size,
        kernels,
    )


def _read_experts(weights: Weights, name: str, config: TargetConfig, kernels: Kernels) -> Experts:
    assert config.experts is not None
    return Experts(
        weights[f"{name}.router.proj.weight"],
        weights[f"{name}.experts.gate_up_proj.weight"],
        weights[f"{name}.experts.down_proj.weight"],
        config.experts.num_chosen,
        config.experts.has_normalised_scores,
        kernels,
        gate=GATES[config.hidden_act],
        factors=weights[f"{name}.router.per_expert_scale"],
    )
