"""Experts of hosted targets: a function that transformers' code calls, so that routing needs no host.

transformers' modules of experts call a function by its name in `ExpertsInterface`. Ours uses our kernels for every
module with which they agree in a comparison after loading. For other modules it uses transformers' grouped product,
for example for experts with biases. Neither reads on the host which experts are chosen.

Axis letters: T rows, E experts, C chosen experts per row, F inner width.
"""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_kernels.suite import Kernels
from dflash_runtime.models.agreement import agree, random_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS = "draft_experts"
"""The name of our experts function in transformers."""

GROUPED = "grouped_mm"
"""transformers' own function without reads on the host."""

_KERNELS = "_dflash_kernels"
"""The attribute that marks a module with experts in our kernels."""

NUM_ROWS, NUM_CHOSEN = 5, 2
"""Rows, and chosen experts of each row, in the comparison."""


@cache
def register_experts() -> None:
    """Register our experts function with transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, _run)


def use_our_experts(model: "PreTrainedModel", kernels: Kernels) -> tuple[int, int]:
    """Let a model's modules of experts call our function.

    Returns the number of modules that our kernels compute, and the number of all modules.
    """
    modules = list(_experts_of(model))
    if not modules:
        return 0, 0
    register_experts()
    model.set_experts_implementation(EXPERTS)
    taken = [module for module in modules if _is_computed(module, kernels)]
    for module in taken:
        setattr(module, _KERNELS, kernels)
    return len(taken), len(modules)


def _experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module that calls a function of `ExpertsInterface`."""
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield module


def _run(module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """The function that transformers calls: [T, hidden], chosen and scores [T, C] -> [T, hidden]."""
    kernels: Kernels | None = getattr(module, _KERNELS, None)
    return _run_grouped(module, hidden, chosen, scores) if kernels is None else _sum(module, hidden, chosen, scores)


def _run_grouped(module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    out: Tensor = ALL_EXPERTS_FUNCTIONS[GROUPED](module, hidden, chosen, scores)
    return out


def _sum(module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    return _compute(module, getattr(module, _KERNELS), hidden, chosen, scores)


def _compute(module: Any, kernels: Kernels, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Compute experts with our kernels, [T, hidden]. Scores may be wider than `hidden`."""
    wide = scores if scores.dtype == torch.float32 else scores.to(hidden.dtype)
    parts = kernels.experts(hidden, module.gate_up_proj, module.down_proj, chosen.contiguous(), wide.contiguous())
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _is_computed(module: Any, kernels: Kernels) -> bool:
    """Whether our kernels give the same result as transformers' function for random rows and random experts."""
    if not _has_our_layout(module):
        return False
    num_experts, width, _ = module.down_proj.shape
    hidden = random_like(module.down_proj, (NUM_ROWS, width))
    num_chosen = min(NUM_CHOSEN, num_experts)
    first = torch.arange(NUM_ROWS, device=hidden.device)[:, None] * num_chosen
    chosen = (first + torch.arange(num_chosen, device=hidden.device)) % num_experts
    scores = random_like(hidden, (NUM_ROWS, num_chosen)).sigmoid()
    try:
        ours = _compute(module, kernels, hidden, chosen, scores)
        theirs = _run_grouped(module, hidden, chosen, scores)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):  # sizes that a kernel does not take
        return False
    return agree(ours, theirs)


def _has_our_layout(module: Any) -> bool:
    """Whether a module has rows of the gate, then rows of `up`, without biases. The comparison tests the activation."""
    if module.is_transposed or module.has_bias or not module.has_gate or not module.is_concatenated:
        return False
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return False
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dtype != down.dtype:
        return False
    return gate_up.dim() == down.dim() == 3 and gate_up.shape[1] == 2 * down.shape[2] and not down.is_meta
