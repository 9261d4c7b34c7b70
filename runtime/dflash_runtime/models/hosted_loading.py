"""Load the model of a hosted target with transformers, whatever runs it then: from safetensors, nothing made up."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.layout import TARGET_LEFTOVERS
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import TargetConfig
from dflash_runtime.errors import CheckpointError, TensorMismatch, UnsupportedError, UsageError
from dflash_runtime.models.placement import Placement, Spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter_config.json"
"""Where there is one, transformers loads the model that it names."""

SINKS = "sinks"
"""How tensors of attention sinks end."""


def check_hosted_headers(source: TargetSource, config: TargetConfig) -> None:
    """Refuse by files and headers alone what would be refused after loading, and what transformers would load instead.

    Raises:
        UnsupportedError: packed weights, attention sinks, or an adapter, which names a model of its own.
    """
    if (source.checkpoint.path / ADAPTER).exists():
        raise unsupported(config, f"an adapter ({ADAPTER}) beside the weights")
    refuse_packed(source.checkpoint.path, find_quantization(source.checkpoint))
    sinks = next((name for name in source.checkpoint.tensors if name.endswith(SINKS)), None)
    if sinks is not None:
        raise unsupported(config, f"attention sinks ({sinks})")


def load_model(source: TargetSource, config: TargetConfig, placement: Placement, attention: str) -> "PreTrainedModel":
    """A target's model on its device, or spread over several, with the attention that has this name in transformers.

    Raises:
        UsageError: a device map that does not say where every module lies.
        UnsupportedError: tensors that transformers would leave out.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    from transformers import AutoModelForCausalLM

    path = source.checkpoint.path
    try:
        with _quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=placement.dtype, attn_implementation=attention, trust_remote_code=False,
                use_safetensors=True, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
                **_spread_arguments(placement.spread),
            )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, OSError, ImportError) as error:
        if placement.spread is not None and "device_map" in str(error):
            raise UsageError(
                f"--device-map: {first_line(error)}", hint="--device-map auto chooses by itself"
            ) from error
        raise CheckpointError(f"transformers does not load this target: {first_line(error)}", path=path) from error
    model, info = loaded
    wrong = {name: (str(list(found)), str(list(wanted))) for name, found, wanted in info["mismatched_keys"]}
    if info["missing_keys"] or wrong:
        raise TensorMismatch(missing=sorted(info["missing_keys"]), wrong=wrong, path=path)
    surplus = sorted(name for name in info["unexpected_keys"] if not TARGET_LEFTOVERS.match(name))
    if surplus:
        raise unsupported(config, f"transformers does not apply {', '.join(surplus[:5])}, {len(surplus)} in all")
    placed: PreTrainedModel = (model if placement.spread is not None else model.to(placement.device)).eval()
    return placed


def parameter_of(module: nn.Module, name: str, device: torch.device) -> Tensor:
    """A parameter of a module on a device; a copy, where it lies elsewhere or is only fetched while it is used."""
    parameter = module.get_parameter(name)
    if not parameter.is_meta:
        return parameter.detach().to(device)
    from accelerate.utils import align_module_device

    with align_module_device(module, device):
        return module.get_parameter(name).detach().clone()


def _spread_arguments(spread: Spread | None) -> dict[str, Any]:
    """A spread in transformers' words."""
    if spread is None:
        return {}
    if spread.modules is not None:
        return {"device_map": dict(spread.modules)}
    return {"device_map": "auto", "max_memory": dict(spread.max_bytes or {})}


@contextmanager
def _quietly() -> Iterator[None]:
    """Only our console writes to the terminal."""
    from transformers.utils import logging as their_logging

    verbosity, has_bar = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    spreading = logging.getLogger("accelerate")
    spreading_level = spreading.level
    their_logging.set_verbosity(logging.CRITICAL)
    spreading.setLevel(logging.CRITICAL)
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(verbosity)
        spreading.setLevel(spreading_level)
        if has_bar:
            their_logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """What an error of another's code is quoted by."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"


def unsupported(config: TargetConfig, what: str) -> UnsupportedError:
    """A target that is refused for what it is."""
    return UnsupportedError(
        f"this runtime does not run {config.model_type or 'unnamed'} targets: {what}",
        hint="dflash validate and dflash serve-command work for it; measure acceptance in the engine that serves it",
    )
