"""Early launches: on GPUs that support it, the setup of a kernel overlaps with the previous kernel.

This shortens the gap between two short kernels: 2% of a step with 16 rows, 4% with 8
(docs/measurements/decode-steps.md). Until its wait, a kernel may read only data that the previous kernel does not
write: weights, lengths, page tables, slots and rotations. A kernel that reads nothing of the previous kernel may run
beside it, and waits at its end (`row_product.py`). Source: CUDA programming guide, "Programmatic Dependent Launch".
"""

from functools import lru_cache

import torch

from dflash_kernels.launch import jit, tl


@jit
def wait_for_launches_before(IS_EARLY: tl.constexpr):
    """Wait until all earlier launches are done. Every kernel that is launched early must call this.

    Without the wait a kernel could count as finished while an earlier kernel still runs.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_launch_begin(IS_EARLY: tl.constexpr):
    """Let the next launch start its setup now. Call this after the wait, so that at most two launches overlap.

    Use it in short kernels and before short kernels. Two overlapping matrix products compete for shared memory and
    both become slower.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache
def early(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with an early launch, for this device."""
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}
