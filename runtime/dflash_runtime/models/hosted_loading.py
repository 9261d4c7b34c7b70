"""Load the model of a hosted target with transformers, whatever runs it then: from safetensors, nothing made up."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.layout import TARGET_LEFTOVERS
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import TargetConfig
from dflash_runtime.errors import CheckpointError, TensorMismatch, UnsupportedError
from dflash_runtime.models.placement import Placement

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
    """A target's model on its device, with the attention that has this name in transformers.

    Raises:
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
            )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, OSError, ImportError) as error:
        raise CheckpointError(f"transformers does not load this target: {first_line(error)}", path=path) from error
    model, info = loaded
    wrong = {name: (str(list(found)), str(list(wanted))) for name, found, wanted in info["mismatched_keys"]}
    if info["missing_keys"] or wrong:
        raise TensorMismatch(missing=sorted(info["missing_keys"]), wrong=wrong, path=path)
    surplus = sorted(name for name in info["unexpected_keys"] if not TARGET_LEFTOVERS.match(name))
    if surplus:
        raise unsupported(config, f"transformers does not apply {', '.join(surplus[:5])}, {len(surplus)} in all")
    placed: PreTrainedModel = model.to(placement.device).eval()
    return placed


@contextmanager
def _quietly() -> Iterator[None]:
    """Only our console writes to the terminal."""
    from transformers.utils import logging as their_logging

    verbosity, has_bar = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity(logging.CRITICAL)
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(verbosity)
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
