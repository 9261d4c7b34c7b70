"""Load weights onto a device, and stack projections that read the same rows.

A checkpoint has `q_proj`, `k_proj`, `v_proj` and `gate_proj`, `up_proj`. A model gets `qkv_proj` and `gate_up_proj`, so
that each needs one product. Stacking happens while tensors are loaded, and needs extra memory for one layer's parts
only. A layer's experts become two tensors; see `expert_stacks.py`.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo
from dflash_runtime.checkpoint.layout import FUSED
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.placement import Placement

Weights = Mapping[str, Tensor]
Arrange = Callable[[str, Tensor], Tensor]
"""Returns a tensor, by its name, in the layout that a model reads."""

_STACK_OF = {part: stack for stack, parts in FUSED.items() for part in parts}


def loaded_bytes(infos: Iterable[TensorInfo], dtype: torch.dtype) -> int:
    """Return the bytes of tensors after loading, with floating point tensors in the dtype of the run."""
    return sum(info.num_elements * dtype.itemsize if info.is_floating else info.num_bytes for info in infos)


def load_weights(
    checkpoint: Checkpoint,
    names: Iterable[str],
    placement: Placement,
    as_stored: str | None = None,
    arrange: Arrange | None = None,
) -> Weights:
    """Read tensors onto the device, convert floating point tensors to the dtype of the run, and stack projections.

    The device converts, which costs the host neither time nor memory. Tensors with the prefix `as_stored` keep their
    dtype. With `arrange` each tensor is arranged before the next one is read: memory may not hold all of them twice.
    """
    wanted = list(names)
    tensors = (
        (name, tensor.to(placement.dtype) if tensor.is_floating_point() and not _begins(name, as_stored) else tensor)
        for name, tensor in checkpoint.load_many(wanted, str(placement.device))
    )
    if arrange is not None:
        tensors = ((name, arrange(name, tensor)) for name, tensor in tensors)
    shapes = {name: checkpoint.tensors[name].shape for name in wanted}
    return stack_projections(stack_experts(tensors, shapes))


def with_wide_norms(weights: Weights) -> Weights:
    """Return the weights of norms in float32 at least, in which transformers multiplies the norms of some families."""
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if _is_norm(name) else tensor
        for name, tensor in weights.items()
    }


def _is_norm(name: str) -> bool:
    return "norm" in name.removesuffix(".weight").rpartition(".")[2]


def _begins(name: str, prefix: str | None) -> bool:
    return prefix is not None and name.startswith(prefix)


def stack_projections(tensors: Iterable[tuple[str, Tensor]]) -> Weights:
    """Names and tensors in any order -> weights in which the parts of each stack in `FUSED` are one tensor.

    `qkv_proj` has the rows of queries, then keys, then values; `gate_up_proj` has the rows of gate, then up. The parts
    of an incomplete stack keep their own names.
    """
    weights: dict[str, Tensor] = {}
    waiting: dict[str, dict[str, tuple[str, Tensor]]] = {}  # stacked name -> part -> its own name and tensor
    for name, tensor in tensors:
        part = next((part for part in _STACK_OF if part in name), None)
        if part is None:
            weights[name] = tensor
            continue
        stack = _STACK_OF[part]
        stacked = name.replace(part, stack)
        waiting.setdefault(stacked, {})[part] = (name, tensor)
        if len(waiting[stacked]) == len(FUSED[stack]):
            parts = waiting.pop(stacked)
            weights[stacked] = torch.cat([parts[item][1] for item in FUSED[stack]])
    for parts in waiting.values():
        weights.update(parts.values())
    return weights
