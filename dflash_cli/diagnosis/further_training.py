"""How much a little more training would gain: near nothing for a draft that is read as in training.

Training has minimised the loss under the right reading. So a step along the gradient of some texts hardly lowers the
loss of other texts. Under a wrong reading, or with damaged values, the same step lowers it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.layers import Linear
from dflash_runtime.models.weights import Weights

FROZEN = (EMBEDDING, HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT)
"""Tensors that drafts share with their targets, or that training does not change."""

LENGTHS = tuple(2.0**-power for power in range(1, 10))
"""Lengths of a step, as shares of the size of each tensor."""

Loss = Callable[[Weights, int], Tensor]
"""The training loss of weights on one half of the texts, 0 or 1."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A target's embedding and head with reference kernels, which have gradients."""

    embedding: Tensor
    head: Linear
    embedding_scale: float


@dataclass(frozen=True, slots=True)
class Trainable:
    """A draft under a reading. `build` makes it from other weights, with reference kernels."""

    config: DraftConfig
    weights: Weights
    build: Callable[[Weights], Draft]


def training_gain(weights: Weights, loss: Loss) -> float:
    """The share of the loss that one step saves on the texts that did not choose its direction.

    The step goes along the gradient of all values, or of one factor per row. The better of both counts.
    """
    saved, before = [0.0, 0.0], 0.0
    for half in (0, 1):
        gradients = _gradients(weights, lambda changed, half=half: loss(changed, half))  # type: ignore[misc]
        with torch.no_grad():
            start = float(loss(weights, 1 - half))
            before += start
            for index, direction in enumerate((_all_values, _row_factors)):
                steps = {name: direction(weights[name], item) for name, item in gradients.items()}
                lowest = _lowest(weights, steps, lambda changed, half=half: float(loss(changed, 1 - half)))  # type: ignore[misc]
                saved[index] += max(0.0, start - lowest)
    return max(saved) / before if before else 0.0


def pulls(weights: Weights, loss: Loss) -> Weights:
    """Each value times its gradient. The sum over a part tells how the loss changes if the part is scaled."""
    return {name: item * weights[name] for name, item in _gradients(weights, lambda changed: loss(changed, 0)).items()}


def _gradients(weights: Weights, loss: Callable[[Weights], Tensor]) -> dict[str, Tensor]:
    names = [name for name, item in weights.items() if item.is_floating_point() and name not in FROZEN]
    # Tensors of inference mode lack gradients; their copies have them.
    leaves = {name: weights[name].detach().clone().requires_grad_(True) for name in names}
    found = torch.autograd.grad(loss({**weights, **leaves}), list(leaves.values()), allow_unused=True)
    return {name: item for name, item in zip(names, found, strict=True) if item is not None}


def _all_values(tensor: Tensor, gradient: Tensor) -> Tensor:
    return gradient * tensor.float().square().sum().to(gradient.dtype)


def _row_factors(tensor: Tensor, gradient: Tensor) -> Tensor:
    product = gradient * tensor
    return (product.sum(dim=-1, keepdim=True) if product.dim() > 1 else product) * tensor


def _lowest(weights: Weights, steps: dict[str, Tensor], loss: Callable[[Weights], float]) -> float:
    """The lowest loss along the steps, from the longest step to the shortest."""
    sizes = [float(step.float().norm() / weights[name].float().norm().clamp(min=1e-9)) for name, step in steps.items()]
    size = (sum(item * item for item in sizes) / max(1, len(sizes))) ** 0.5
    found: list[float] = []
    for length in LENGTHS if size > 0 else ():
        moved = {name: weights[name] - (length / size) * step for name, step in steps.items()}
        found.append(loss({**weights, **moved}))
        if len(found) > 1 and found[-1] > found[-2]:
            break
    return min(found, default=float("inf"))


def halves(anchors: Sequence[tuple[int, int]], max_anchors: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Anchors of every other text, and anchors of the other texts, at most `max_anchors` together."""
    both = tuple([item for item in anchors if item[0] % 2 == half] for half in (0, 1))
    first, second = (found[:: max(1, -(-2 * len(found) // max_anchors))] for found in both)
    return first, second
