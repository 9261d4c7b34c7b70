"""Resolve the engine config into what will run: device, dtype, kernels, limits, features, size of the page pool."""

import os
from dataclasses import replace
from typing import cast

import torch

from dflash_kernels.launch_config import HAS_TRITON, MAX_GRID
from dflash_kernels.suite import KernelChoice, Kernels, pick_kernels
from dflash_runtime.config import DraftConfig, EngineConfig, TargetConfig
from dflash_runtime.device.kv import bytes_per_token
from dflash_runtime.errors import CapacityError, UnsupportedError, UsageError
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.limits import Limits

MIN_CAPABILITY = (8, 0)

HOST_SHARE = 0.5
"""Share of the free memory that the KV cache may take on a machine without a GPU."""


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one; a GPU that is too old or absent is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {name!r} is not served (known: cpu, cuda)")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise UnsupportedError(f"device {name!r} not found: there are {torch.cuda.device_count()} CUDA devices")
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            raise UnsupportedError(
                f"{torch.cuda.get_device_name(device)}: compute capability is below 8.0, which is the least"
            )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels a run takes; see `pick_kernels` for what `auto` is.

    Raises:
        UnsupportedError: triton is asked for where it cannot run.
    """
    try:
        return pick_kernels(cast(KernelChoice, name), device, dtype)
    except ValueError as error:
        why = f"its kernels do not run on {device}" if HAS_TRITON else "it is not installed"
        raise UnsupportedError(f"--kernels {name}: {why}", hint="--kernels reference runs everywhere") from error


def apply_exclusions(
    config: EngineConfig, placement: Placement, num_draft_tokens: int
) -> tuple[EngineConfig, tuple[str, ...]]:
    """The config without features that exclude each other, and a warning naming both for each that was switched off."""
    warnings = []
    if config.is_async and placement.kernels.name == "reference" and placement.device.type == "cuda":
        config = replace(config, scheduling="sync")
        warnings.append(
            "asynchronous scheduling is off because of reference kernels on a GPU, which wait for it in every step"
        )
    if config.draft_sampling == "probabilistic" and num_draft_tokens == 0:
        config = replace(config, draft_sampling="greedy")
        warnings.append("probabilistic drafting is off because of plain decoding (-k 0), which drafts no tokens")
    if config.adaptive_width and not can_capture(config, placement.device, placement.kernels):
        config = replace(config, adaptive_width=False)
        warnings.append("adaptive width is off because of steps without CUDA graphs, whose times are not measured")
    return config, tuple(warnings)


def can_capture(config: EngineConfig, device: torch.device, kernels: Kernels) -> bool:
    """Whether decode steps are captured as CUDA graphs, as far as the models allow it."""
    return config.graphs and kernels.name == "triton" and device.type == "cuda"


def can_adapt(config: EngineConfig) -> bool:
    """Whether an engine with these settings drafts, in steps that are captured.

    Raises:
        UsageError, UnsupportedError: a device or kernels that do not exist here.
    """
    device = resolve_device(config.device)
    kernels = resolve_kernels(config.kernels, device, resolve_dtype(config.dtype, device))
    return config.num_draft_tokens != 0 and can_capture(config, device, kernels)


def resolve_limits(config: EngineConfig, target: TargetConfig, draft: DraftConfig | None) -> Limits:
    """K, the longest text and the batch sizes, from the engine config and what the checkpoints allow."""
    trained = draft.num_draft_tokens if draft is not None else 0
    num_draft_tokens = trained if config.num_draft_tokens is None else config.num_draft_tokens
    if num_draft_tokens > trained:
        raise UsageError(
            f"{num_draft_tokens} speculative tokens, expected at most {trained}: "
            + ("no draft is given" if draft is None else f"the draft was trained for blocks of {trained + 1}")
        )
    served = target.max_position_embeddings
    if draft is not None and num_draft_tokens:
        served = min(served, draft.max_position_embeddings)
    max_model_len = config.max_model_len or served
    if max_model_len > served:
        raise UsageError(f"max_model_len {max_model_len}, expected at most {served}, the positions that the pair has")
    num_kv_heads = max(item.num_kv_heads for item in (target, draft) if item is not None)
    if config.max_num_requests * num_kv_heads > MAX_GRID:
        raise UsageError(
            f"max_num_requests {config.max_num_requests}, expected at most {MAX_GRID // num_kv_heads}: attention runs "
            f"up to {MAX_GRID} requests times KV heads, of which there are {num_kv_heads}"
        )
    return Limits(
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len,
        max_num_requests=config.max_num_requests,
        vocab_size=target.vocab_size,
        max_batched_tokens=config.max_batched_tokens,
    )


def fit_num_pages(
    config: EngineConfig,
    target: TargetConfig,
    draft: DraftConfig | None,
    limits: Limits,
    placement: Placement,
) -> int:
    """Pages for every request at full length, or as many as the memory that is free after loading allows.

    Raises:
        CapacityError: memory does not hold a single request at its shortest, with the arithmetic.
    """
    if config.num_pages is not None:
        return config.num_pages
    configs = [item for item in (target, draft) if item is not None]
    token_bytes = sum(bytes_per_token(item, placement.dtype) for item in configs)
    page_bytes = config.page_size * token_bytes
    wanted = limits.max_num_requests * -(-limits.max_model_len // config.page_size) + 1
    budget = config.kv_memory_bytes
    if budget is None:
        budget = _free_bytes(placement.device, config.gpu_memory_utilization) - _scratch_bytes(config, limits)
    affordable = max(0, budget) // page_bytes
    needed = 1 + -(-(1 + limits.num_lookahead_tokens) // config.page_size)
    if affordable < needed:
        raise CapacityError(
            f"KV cache: one request needs {needed} pages of {config.page_size} tokens, {needed * page_bytes} bytes at "
            f"{token_bytes} bytes per token, but only {budget} bytes are free",
            hint="give the KV cache more memory with --kv-memory or --gpu-memory-utilization",
        )
    return min(wanted, affordable)


def _scratch_bytes(config: EngineConfig, limits: Limits) -> int:
    """Bytes that a step needs besides KV and weights: logits, and both models' distributions if drafts are sampled."""
    rows = limits.max_num_requests * limits.num_lookahead_tokens
    copies = 4 if config.draft_sampling == "probabilistic" else 2
    return rows * limits.vocab_size * 8 * copies


def _free_bytes(device: torch.device, utilization: float) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free - int(total * (1 - utilization))
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_SHARE)
