"""A feed-forward of many experts. A router chooses a few of them for each row.

Axis letters: T rows, E experts, C chosen of them, S shared experts, F inner width. Source: huggingface/transformers
models/qwen3_moe/modeling_qwen3_moe.py, models/gpt_oss/modeling_gpt_oss.py, integrations/moe.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rows, plain_rows
from dflash_kernels.mixtures.dense_beside import Dense
from dflash_kernels.mixtures.experts import Weight
from dflash_kernels.mixtures.fp8_experts import fp8_experts_ref
from dflash_kernels.mixtures.mxfp4 import Packed, pack, unpack
from dflash_kernels.products.activation import SILU, Gate, gate_ref
from dflash_kernels.suite import REFERENCE, Kernels
from dflash_runtime.models.weights import Weights, find_matrix
from dflash_runtime.target_config import ExpertsConfig

ALIGNMENT = 16
"""Torch's grouped product requires rows of a multiple of this many bytes."""

ONE_LAUNCH = (9, 10)
"""Major compute capabilities on which torch's grouped product is one launch. On others it loops on the host."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum over the chosen experts of down(gate(x) * up(x)), weighted by the router's scores.

    Packed weights stay packed. With shared experts, the last row of `router` is their common gate, and they are the
    last of the stacked experts.
    """

    router: Tensor  # [E, hidden], or [E + 1, hidden]
    gate_up: Weight | Fp8Weight  # [E + S, 2 F, hidden], the gate's rows first
    down: Weight | Fp8Weight  # [E + S, hidden, F]; in FP8 if `gate_up` is
    num_chosen: int
    has_normalised_scores: bool
    kernels: Kernels = REFERENCE
    num_shared: int = 0
    gate: Gate = SILU
    router_bias: Tensor | None = None  # [E]
    factors: Tensor | None = None  # [E], of the scores
    biases: tuple[Tensor, Tensor] | None = None  # of `gate_up` [E, 2 F] and of `down` [E, hidden]

    @classmethod
    def read(cls, weights: Weights, name: str, config: ExpertsConfig, kernels: Kernels, gate: Gate = SILU) -> "Experts":
        """Read a layer's experts. A clamped gate of their config replaces `gate`."""
        router = weights[f"{name}.gate.weight"]
        if config.num_shared:
            router = torch.cat((router, weights[f"{name}.shared_expert_gate.weight"]))
        names = [f"{name}.experts.{part}_proj" for part in ("gate_up", "down")]
        gate_up = _read_weight(weights, names[0], router.shape[1])
        down = _read_weight(weights, names[1], gate_up.shape[1] // 2)
        first, second = (weights.get(f"{each}.bias") for each in names)
        return cls(
            router,
            gate_up,
            down,
            config.num_chosen,
            config.has_normalised_scores,
            kernels,
            config.num_shared,
            gate=gate if config.clamp is None else Gate("clamped", config.clamp.alpha, config.clamp.limit),
            router_bias=weights.get(f"{name}.gate.bias"),
            biases=None if first is None or second is None else (first, second),
        )

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """See `Linear`. Experts read plain rows, as their router does."""
        return None

    def __call__(self, hidden: Rows) -> Tensor:
        """[T, hidden] -> parts [P, T, hidden]."""
        rows = plain_rows(hidden)
        return self.compute(rows, *self.choose(rows))

    def compute(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """As a call, with experts and scores that `choose` returned."""
        if self.is_grouped:
            return self.grouped(hidden, chosen, scores)
        return self.one_by_one(hidden, chosen, scores)[None]

    @property
    def is_grouped(self) -> bool:
        """Whether one call computes all experts: a kernel for FP8, or torch's grouped product for these weights."""
        if isinstance(self.down, Fp8Weight) or isinstance(self.gate_up, Fp8Weight):
            return self.kernels.name == "triton"
        widths = (self.gate_up.shape[-1], self.down.shape[-1])
        is_aligned = all(width * self.router.element_size() % ALIGNMENT == 0 for width in widths)
        return self.router.is_cuda and self.router.dtype == torch.bfloat16 and is_aligned

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        if isinstance(self.down, Fp8Weight):
            return self.is_grouped
        return self.is_grouped and torch.cuda.get_device_capability(self.router.device)[0] in ONE_LAUNCH

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's experts, most likely first and shared last, and their scores, both [T, C + S]."""
        return self.kernels.choose_experts(
            hidden,
            self.router,
            self.num_chosen,
            self.has_normalised_scores,
            self.num_shared,
            self.router_bias,
            self.factors,
        )

    def choose_beside(self, seen: Tensor, dense: Dense) -> tuple[Tensor, Tensor, Tensor]:
        """As `choose`, from the router's rows [T, hidden], with the parts [P, T, hidden] of a dense feed-forward."""
        return self.kernels.choose_beside(
            seen, self.router, self.num_chosen, self.has_normalised_scores, self.factors, dense
        )

    def one_by_one(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Run one expert after another, [T, hidden]. The host reads which experts are chosen."""
        if isinstance(self.gate_up, Fp8Weight) and isinstance(self.down, Fp8Weight):
            return fp8_experts_ref(hidden, self.gate_up, self.down, chosen, scores)[0]
        assert not isinstance(self.gate_up, Fp8Weight)
        assert not isinstance(self.down, Fp8Weight)
        total = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rows, columns = (chosen == expert).nonzero(as_tuple=True)
            first, second = (_plain(weight[expert], hidden.dtype) for weight in (self.gate_up, self.down))
            added = (None, None) if self.biases is None else tuple(bias[expert] for bias in self.biases)
            inner = gate_ref(functional.linear(hidden[rows], first, added[0]), self.gate)
            output = functional.linear(inner, second, added[1])
            total.index_add_(0, rows, output * scores[rows, columns, None])
        return total

    def grouped(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Run all experts at once, as parts [P, T, hidden], without reading a tensor's value on the host.

        For many rows this uses torch's products. `follows_from_shapes` says whether they read values on the host.
        """
        if isinstance(self.gate_up, Fp8Weight) and isinstance(self.down, Fp8Weight):
            return self.kernels.fp8_experts(hidden, self.gate_up, self.down, chosen, scores)
        assert not isinstance(self.gate_up, Fp8Weight)
        assert not isinstance(self.down, Fp8Weight)
        return self.kernels.experts(hidden, self.gate_up, self.down, chosen, scores, self.gate, self.biases)


def _read_weight(weights: Weights, name: str, width: int) -> Weight | Fp8Weight:
    """Return the stacked weight of a layer's experts, of `width` columns, packed if it has blocks."""
    if f"{name}_blocks" in weights:
        return pack(weights[f"{name}_blocks"], weights[f"{name}_scales"], width)
    return find_matrix(weights, name)


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    return unpack(weight, dtype) if isinstance(weight, Packed) else weight
