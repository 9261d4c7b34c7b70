"""Estimate the memory of a run from headers, with the functions that size a running engine."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from dflash_kernels.launch_config import MAX_GRID
from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
from dflash_runtime.device.capacity.memory import (
    fit_num_pages,
    fit_num_snapshots,
    scratch_bytes,
    text_bytes,
    wanted_pages,
)
from dflash_runtime.device.capacity.memory_parts import GpuFit, LayerKV, MemoryParts, RecurrentMemory
from dflash_runtime.device.setup.loading import PairPlan, plan_pair
from dflash_runtime.device.storage.kv import bytes_per_token
from dflash_runtime.device.storage.recurrent import snapshot_bytes, state_bytes
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError
from dflash_runtime.target_config import TargetConfig

ANY_GPU = torch.device("cuda", 0), replace(REFERENCE, name="triton")
"""A GPU with Triton kernels, for plans on a machine that may lack both. Sizes depend on the names alone."""

UNLIMITED = 2**62
"""Bytes of memory that hold every pair."""


def plan_for_gpu(target: TargetSource, draft: DraftLike, config: EngineConfig) -> PairPlan:
    """The plan of a pair on a GPU, which this machine need not have. Raises the errors of `plan_pair`."""
    return plan_pair(target, draft, config, machine=ANY_GPU)


def estimate_memory(plan: PairPlan, *, draft: str, target: str, gpu_bytes: int | None = None) -> MemoryParts:
    """The parts of the memory of a run. `draft` and `target` are the names that the user gave.

    The cache of a target that keeps its own cache is measured after loading, so `not_counted` names it, and the number
    of requests that fit is left out.
    """
    config, limits, placement = plan.config, plan.limits, plan.placement
    unlimited = replace(config, kv_memory_bytes=UNLIMITED)
    num_pages = fit_num_pages(unlimited, *plan.sizes[1:])
    num_snapshots = fit_num_snapshots(unlimited, *plan.sizes[1:])
    models = [item for item in (plan.target, plan.draft) if item is not None]
    token_bytes = sum(bytes_per_token(item, placement.page_dtype) for item in models)
    recurrent = None
    if plan.target.recurrence is not None:
        recurrent = RecurrentMemory(
            num_layers=len(plan.target.recurrence.layers),
            request_bytes=state_bytes(plan.target.recurrence, limits.num_lookahead_tokens, placement.dtype),
            num_snapshots=num_snapshots,
            snapshot_bytes=snapshot_bytes(plan.target.recurrence, placement.dtype),
        )
    has_own_cache = plan.target.own_cache is not None
    pages_of_one = (wanted_pages(config, limits) - 1) // limits.max_num_requests
    parts = {
        "target": plan.weights.target,
        "draft": plan.weights.draft,
        "kv_pages": num_pages * config.page_size * token_bytes,
        "states": text_bytes(plan.target, limits, placement.dtype),
        "snapshots": num_snapshots * recurrent.snapshot_bytes if recurrent is not None else 0,
        "steps": scratch_bytes(*plan.sizes),
    }
    return MemoryParts(
        draft=draft,
        target=target,
        target_runtime=plan.runtime,
        dtype=placement.dtype_name,
        kv_dtype=placement.page_dtype_name,
        max_model_len=limits.max_model_len,
        max_num_requests=limits.max_num_requests,
        num_draft_tokens=limits.num_draft_tokens,
        num_lookahead_tokens=limits.num_lookahead_tokens,
        page_size=config.page_size,
        num_pages=num_pages,
        layers=tuple(_layers(plan)),
        token_bytes=token_bytes,
        request_bytes=pages_of_one * config.page_size * token_bytes
        + (recurrent.request_bytes if recurrent is not None else 0),
        parts=parts,
        total_bytes=sum(parts.values()),
        recurrent=recurrent,
        gpu=None if gpu_bytes is None or has_own_cache else _fit(plan, gpu_bytes),
        not_counted=("the target's own cache",) if has_own_cache else (),
    )


def _layers(plan: PairPlan) -> Iterator[LayerKV]:
    """The KV of both models, by kind of layer. Pages have the width of the widest layer for every layer."""
    roles: tuple[tuple[Literal["target", "draft"], TargetConfig | DraftConfig | None], ...]
    roles = ("target", plan.target), ("draft", plan.draft)
    for role, config in roles:
        if config is None or (isinstance(config, TargetConfig) and config.own_cache is not None):
            continue
        size = bytes_per_token(config, plan.placement.page_dtype)
        for window, count in Counter(config.windows[layer] for layer in config.kv_layers).items():
            yield LayerKV(
                model=role, window=window, num_layers=count, token_bytes=size * count // len(config.kv_layers)
            )


def _fit(plan: PairPlan, gpu_bytes: int) -> GpuFit:
    """The most requests at full length for which the runtime would give every request all its pages."""
    usable = int(gpu_bytes * plan.config.gpu_memory_utilization)
    most = MAX_GRID // max(count for item in (plan.target, plan.draft) if item for count, _ in item.kv_shapes)
    found = bisect_left(range(1, most + 1), True, key=lambda count: not _holds(plan, usable, count))
    return GpuFit(gpu_bytes=gpu_bytes, usable_bytes=usable, most_requests=found)


def _holds(plan: PairPlan, usable: int, num_requests: int) -> bool:
    limits = replace(plan.limits, max_num_requests=num_requests)
    given = plan.target, plan.draft, limits, plan.placement
    withheld = scratch_bytes(plan.config, *given) + text_bytes(plan.target, limits, plan.placement.dtype)
    left = usable - plan.weights.target - plan.weights.draft - withheld
    if left <= 0:
        return False
    try:
        config = replace(plan.config, kv_memory_bytes=left)
        return fit_num_pages(config, *given) == wanted_pages(config, limits)
    except CapacityError:
        return False
