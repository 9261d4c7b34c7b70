"""Resolve the engine config into what will run: device, dtype, kernels, limits, features."""

from dataclasses import replace
from typing import cast

import torch

from dflash_kernels.launch_config import HAS_TRITON, MAX_GRID
from dflash_kernels.suite import REFERENCE, KernelChoice, Kernels, pick_kernels
from dflash_runtime.config import DraftConfig, EngineConfig, TargetConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.limits import Limits

MIN_CAPABILITY = (8, 0)

KERNEL_ROWS, REFERENCE_ROWS = 8192, 2048
"""Rows of a step with prompts by default. More of them fill a GPU better: 32 prompts of 512 tokens take 379 ms, not 409
(docs/measurements/prefill.md). Reference attention holds all scores of a prompt's rows at once."""


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
        # By its number: what "cuda" names is whichever device is current when it is used.
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
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


def rows_of_a_step(config: EngineConfig, kernels: Kernels) -> int:
    """Most rows of a step with prompts."""
    return config.max_batched_tokens or (KERNEL_ROWS if kernels.name == "triton" else REFERENCE_ROWS)


def resolve_num_drafts(config: EngineConfig, draft: DraftConfig | None) -> int:
    """K: what is asked for, by default as many tokens as the draft was trained for.

    Raises:
        UsageError: more than those.
    """
    trained = draft.num_draft_tokens if draft is not None else 0
    num_draft_tokens = trained if config.num_draft_tokens is None else config.num_draft_tokens
    if num_draft_tokens > trained:
        raise UsageError(
            f"{num_draft_tokens} speculative tokens, expected at most {trained}: "
            + ("no draft is given" if draft is None else f"the draft was trained for blocks of {trained + 1}")
        )
    return num_draft_tokens


def resolve_limits(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, kernels: Kernels = REFERENCE
) -> Limits:
    """K, the longest text and the batch sizes, from the engine config and what the checkpoints allow."""
    num_draft_tokens = resolve_num_drafts(config, draft)
    served = target.max_position_embeddings
    if draft is not None and num_draft_tokens:
        served = min(served, draft.max_position_embeddings)
    max_model_len = config.max_model_len or served
    if max_model_len > served:
        raise UsageError(f"max_model_len {max_model_len}, expected at most {served}, the positions that the pair has")
    num_kv_heads = max(count for item in (target, draft) if item is not None for count, _ in item.kv_shapes)
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
        max_batched_tokens=rows_of_a_step(config, kernels),
    )
