"""A feed-forward of many experts, a few of which a router chooses for each row.

Axis letters: T rows, E experts, C chosen of them, F inner width. Source: huggingface/transformers
models/qwen3_moe/modeling_qwen3_moe.py, integrations/moe.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.activation import silu_mul_ref
from dflash_runtime.config import ExpertsConfig
from dflash_runtime.models.weights import Weights

ALIGNMENT = 16
"""Bytes of which torch's grouped product wants each row of a factor to be a multiple."""

ONE_LAUNCH = (9, 10)
"""Major compute capabilities on which it is one launch. On others it copies the groups' ends to the host and loops."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum over the chosen experts of down(silu(gate(x)) * up(x)), by the router's scores."""

    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 F, hidden], the gate's rows first
    down: Tensor  # [E, hidden, F]
    num_chosen: int
    has_normalised_scores: bool

    @classmethod
    def read(cls, weights: Weights, name: str, config: ExpertsConfig) -> "Experts":
        router = weights[f"{name}.gate.weight"]
        gate_up, down = (weights[f"{name}.experts.{part}_proj.weight"] for part in ("gate_up", "down"))
        return cls(router, gate_up, down, config.num_chosen, config.has_normalised_scores)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> parts [1, T, hidden]."""
        chosen, scores = self.choose(hidden)
        compute = self.grouped if self.is_grouped else self.one_by_one
        return compute(hidden, chosen, scores)[None]

    @property
    def is_grouped(self) -> bool:
        """Whether torch has a grouped product of weights like these."""
        widths = (self.gate_up.shape[-1], self.down.shape[-1])
        is_aligned = all(width * self.down.element_size() % ALIGNMENT == 0 for width in widths)
        return self.down.is_cuda and self.down.dtype == torch.bfloat16 and is_aligned

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        return self.is_grouped and torch.cuda.get_device_capability(self.down.device)[0] in ONE_LAUNCH

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of each row's experts, the likeliest first, and their scores, both [T, C]."""
        logits = functional.linear(hidden, self.router)
        scores, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
        if self.has_normalised_scores:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return chosen, scores.to(logits.dtype)

    def one_by_one(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Expert by expert; which ones are chosen is looked at on the host."""
        total = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            inner = silu_mul_ref(functional.linear(hidden[rows], self.gate_up[expert]))
            total.index_add_(0, rows, functional.linear(inner, self.down[expert]) * scores[rows, places, None])
        return total

    def grouped(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """All experts in two products of rows sorted by expert; nothing here looks at a value on the host.

        Whether torch does is what `follows_from_shapes` says.
        """
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(
            experts, torch.arange(len(self.router), device=experts.device), right=True, out_int32=True
        )
        inner = silu_mul_ref(
            functional.grouped_mm(hidden[order // self.num_chosen], self.gate_up.transpose(1, 2), offs=ends)
        )
        outputs = functional.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        placed = torch.empty_like(outputs).index_copy_(0, order, outputs * scores.flatten()[order, None])
        return placed.view(*chosen.shape, -1).sum(dim=1)
