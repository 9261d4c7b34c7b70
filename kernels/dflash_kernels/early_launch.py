"""Launches that are set up while the one before still runs, where the GPU can do that.

It takes what setting up costs out of the gap between two short kernels: 2% of a step with 16 rows, 4% with 8
(docs/measurements/decode-steps.md). Before it waits a kernel reads only what none of those writes that let the next
begin: weights, lengths, page tables, slots and rotations. Source: CUDA programming guide, "Programmatic Dependent
Launch".
"""

from functools import lru_cache

import torch

from dflash_kernels.launch_config import jit, tl


@jit
def wait_for_launches_before(IS_EARLY: tl.constexpr):
    """Block until everything queued before is done. Every kernel launched early does this, whatever it does then.

    One that ended without it would count as done while what came before it still runs.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_launch_begin(IS_EARLY: tl.constexpr):
    """Have the launch queued next set up while this one runs. After the wait, so that no three of them overlap.

    For kernels that are short, or followed by a short one: a product set up beside another takes its room, and that
    makes both slower.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch: what the kernel is told, and what the launcher is."""
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}
