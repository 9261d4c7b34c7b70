"""Choose device, dtype, kernels, limits and features from the engine config and the machine."""

from dataclasses import replace
from typing import cast

import torch

from dflash_kernels.fp8.fp8_weight import FP8
from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.launch_config import MAX_GRID
from dflash_kernels.suite import REFERENCE, KernelChoice, Kernels, pick_kernels
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.models.placement import Placement
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.limits import Limits, resolve_model_len, resolve_num_drafts
from dflash_runtime.target_config import TargetConfig

MIN_CAPABILITY = (8, 0)

KERNEL_ROWS, REFERENCE_ROWS = 8192, 2048
"""Default rows of a step with prompts. More rows fill a GPU better: 32 prompts of 512 tokens take 379 ms instead of
409 ms (docs/measurements/prefill.md). Reference attention holds all scores of a prompt's rows at once."""


def resolve_device(name: str) -> torch.device:
    """The device for `--device`. `auto` is the GPU if there is one, otherwise the CPU.

    Raises:
        UsageError: no device has this name.
        UnsupportedError: the device is absent, too old, or neither a CPU nor a CUDA GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(field="device", found=name, expected="auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(field="device", found=name, expected="cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise UnsupportedError(
                field="device", found=name, expected=f"one of {torch.cuda.device_count()} CUDA devices"
            )
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            found = f"{torch.cuda.get_device_name(device)} with compute capability {_capability(device)}"
            raise UnsupportedError(
                id="gpu-too-old", field="device", found=found, expected="compute capability 8.0 or higher",
                hint="--device cpu runs everywhere",
            )  # fmt: skip
        # With a number, because "cuda" means whichever device is current at each use.
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def device_of(name: str, rank: int, size: int) -> torch.device:
    """The device of one of `size` ranks: the GPU with the rank's number, or the CPU.

    Raises:
        UnsupportedError: there are fewer GPUs than ranks.
        UsageError: the config names one GPU for several ranks.
    """
    device = resolve_device(name)
    if size == 1 or device.type == "cpu":
        return device
    if ":" in name:
        expected = f"cuda or auto: {size} ranks use {size} GPUs"
        raise UsageError(field="device", found=name, expected=expected, hint="CUDA_VISIBLE_DEVICES chooses GPUs")
    if torch.cuda.device_count() < size:
        raise UnsupportedError(
            id="too-few-gpus", field="tensor_parallel_size", found=size,
            expected=f"at most {torch.cuda.device_count()}, the number of GPUs",
        )  # fmt: skip
    return resolve_device(f"cuda:{rank}")


def _capability(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for `--dtype`. `auto` is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_kv_dtype(name: str) -> torch.dtype | None:
    """The dtype of KV pages for `--kv-dtype`; None for `auto`, which is the dtype of the run."""
    return FP8 if name == "fp8" else None


def resolve_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for `--kernels`. `pick_kernels` chooses for `auto`.

    Raises:
        UnsupportedError: Triton kernels do not run on this device.
    """
    try:
        return pick_kernels(cast(KernelChoice, name), device, dtype)
    except ValueError as error:
        expected = f"kernels that run on {device}" if HAS_TRITON else "kernels without Triton, which is not installed"
        raise UnsupportedError(
            field="--kernels", found=name, expected=expected, hint="--kernels reference runs everywhere"
        ) from error


def apply_exclusions(
    config: EngineConfig, placement: Placement, num_draft_tokens: int
) -> tuple[EngineConfig, tuple[Notice, ...]]:
    """The config without features that exclude each other, and one warning per feature that is switched off."""
    warnings = []
    if config.is_async and placement.kernels.name == "reference" and placement.device.type == "cuda":
        config = replace(config, scheduling="sync")
        text = "asynchronous scheduling is off: reference kernels on a GPU wait for the device in every step"
        warnings.append(Notice(text, id="no-async-scheduling"))
    if config.is_async and config.is_lookup:
        config = replace(config, scheduling="sync")
        text = f"asynchronous scheduling is off: {config.drafting} looks up drafts in the tokens that steps committed"
        warnings.append(Notice(text, id="no-async-lookup"))
    if config.draft_sampling == "probabilistic" and config.is_lookup:
        config = replace(config, draft_sampling="greedy")
        text = f"probabilistic drafting is off: {config.drafting} looks up tokens instead of drawing them"
        warnings.append(Notice(text, id="no-probabilistic-lookup"))
    if config.draft_sampling == "probabilistic" and num_draft_tokens == 0:
        config = replace(config, draft_sampling="greedy")
        text = "probabilistic drafting is off: plain decoding (-k 0) drafts no tokens"
        warnings.append(Notice(text, id="no-probabilistic-drafting"))
    config, more = _exclude_widths(config, placement)
    return config, (*warnings, *more)


def _exclude_widths(config: EngineConfig, placement: Placement) -> tuple[EngineConfig, list[Notice]]:
    """The config without adaptive width or a row budget where the drafts or the steps do not allow it."""
    warnings = []
    if config.adaptive_width and config.num_tree_nodes:
        config = replace(config, adaptive_width=False)
        text = "adaptive width is off: it measures the times of blocks, and --tree verifies trees"
        warnings.append(Notice(text, id="no-adaptive-width-of-trees"))
    if config.adaptive_width and config.is_lookup:
        config = replace(config, adaptive_width=False)
        text = f"adaptive width is off: {config.drafting} drafts as many tokens as it finds"
        warnings.append(Notice(text, id="no-adaptive-lookup"))
    if config.row_budget and config.is_lookup:
        config = replace(config, row_budget=False)
        warnings.append(
            Notice(
                f"the row budget is off: {config.drafting} looks up tokens without probabilities", id="no-lookup-budget"
            )
        )
    if config.row_budget and not can_capture(config, placement.device, placement.kernels):
        config = replace(config, row_budget=False)
        text = "the row budget is off: it needs step times, which are measured only with CUDA graphs"
        warnings.append(Notice(text, id="no-row-budget"))
    if config.row_budget and config.adaptive_width:
        config = replace(config, adaptive_width=False)
        warnings.append(Notice("adaptive width is off: the row budget chooses the rows", id="no-width-beside-budget"))
    if config.adaptive_width and not can_capture(config, placement.device, placement.kernels):
        config = replace(config, adaptive_width=False)
        text = "adaptive width is off: it needs step times, which are measured only with CUDA graphs"
        warnings.append(Notice(text, id="no-adaptive-width"))
    return config, warnings


def can_capture(config: EngineConfig, device: torch.device, kernels: Kernels) -> bool:
    """Whether decode steps can be captured as CUDA graphs, if the models can."""
    return config.graphs and kernels.name == "triton" and device.type == "cuda"


def can_adapt(config: EngineConfig) -> bool:
    """Whether an engine with this config drafts blocks and captures its decode steps. Adaptive width needs both.

    Raises:
        UsageError, UnsupportedError: the device or the kernels do not exist on this machine.
    """
    device = resolve_device(config.device)
    kernels = resolve_kernels(config.kernels, device, resolve_dtype(config.dtype, device))
    is_fixed = config.num_draft_tokens == 0 or config.num_tree_nodes is not None
    return not is_fixed and can_capture(config, device, kernels)


def rows_of_a_step(config: EngineConfig, kernels: Kernels) -> int:
    """The most rows of a step with prompts."""
    return config.max_batched_tokens or (KERNEL_ROWS if kernels.name == "triton" else REFERENCE_ROWS)


def resolve_limits(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, kernels: Kernels = REFERENCE
) -> Limits:
    """K, the longest text and the batch sizes, from the engine config and the limits of the checkpoints.

    Raises:
        UsageError: the config asks for more than the checkpoints or the kernels allow.
    """
    num_draft_tokens = resolve_num_drafts(config, draft)
    max_model_len = resolve_model_len(config, target.max_position_embeddings, draft)
    num_kv_heads = max(count for item in (target, draft) if item is not None for count, _ in item.kv_shapes)
    if config.max_num_requests * num_kv_heads > MAX_GRID:
        expected = f"at most {MAX_GRID // num_kv_heads}: attention launches at most {MAX_GRID} requests times KV heads"
        raise UsageError(field="max_num_requests", found=config.max_num_requests, expected=expected)
    return Limits(
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len,
        max_num_requests=config.max_num_requests,
        vocab_size=target.vocab_size,
        max_batched_tokens=rows_of_a_step(config, kernels),
        num_tree_nodes=config.num_tree_nodes or 0 if num_draft_tokens else 0,
    )
