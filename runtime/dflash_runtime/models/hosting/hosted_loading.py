"""Load the model of a target with transformers, from safetensors only. Refuse tensors that transformers would make up.

A hosted target is a target that transformers' code runs, over our pages or with its own cache.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_runtime.checkpoint.layout import unapplied_tensors
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.scaled_weights import is_of_activations
from dflash_runtime.checkpoint.quantised.stated_quantization import CONFIG_KEY
from dflash_runtime.checkpoint.quantised.target_quantization import Quantization, read_quantization
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.targets.hf_config import not_run
from dflash_runtime.checkpoint.targets.hosted_config import in_one_line
from dflash_runtime.errors import CheckpointError, TensorMismatch, UsageError
from dflash_runtime.models.hosting.hosted_quantization import (
    compare_weights,
    dequantised,
    leave_weights_in_place,
    unpacking_blocks,
    widen,
)
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.scale_values import check_all_scales
from dflash_runtime.models.text_part import causal_part, is_taken_out, model_class
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(source: TargetSource, config: TargetConfig, placement: Placement, attention: str) -> "PreTrainedModel":
    """Load a target's model onto its device or devices. `attention` is a name that transformers knows.

    Raises:
        UsageError: the device map does not cover every module.
        UnsupportedError: transformers would leave tensors out.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import hub_kernels

    hub_kernels._kernels_enabled = False  # with the package kernels installed, modelling code would fetch code
    path, quantization = source.checkpoint.path, read_quantization(source)
    if quantization is not None and quantization.is_unpacked:
        check_all_scales(source.checkpoint)
    is_fp8 = quantization is not None and quantization.method == "fp8"
    unpacking = unpacking_blocks(source.checkpoint, placement.dtype) if is_fp8 else nullcontext()
    with _explained(path, config, placement, attention), quietly(), unpacking:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        if quantization is not None and quantization.is_unpacked:
            _ask_to_unpack(settings)
        loaded: Any = (model_class(settings) or AutoModelForCausalLM).from_pretrained(
            path, config=settings, dtype=placement.dtype, attn_implementation=attention, trust_remote_code=False,
            use_safetensors=True, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
            **_device_arguments(placement, quantization),
        )  # fmt: skip
    model, info = loaded
    is_wrapped = settings.get_text_config(decoder=True) is not settings
    unread = [name for name in info["unexpected_keys"] if quantization is None or not is_of_activations(name)]
    _check_tensors(model, {**info, "unexpected_keys": unread}, config, source.checkpoint, is_wrapped=is_wrapped)
    if quantization is not None and quantization.is_unpacked:
        widen(model, placement.dtype)
        compare_weights(model, source.checkpoint, quantization.method)
    _check_dtype(model, config, placement.dtype)
    is_placed = placement.spread is not None or (quantization is not None and not quantization.is_unpacked)
    if quantization is not None and quantization.method == "compressed-tensors" and not is_placed:
        leave_weights_in_place(model)
    placed: PreTrainedModel = (model if is_placed else model.to(placement.device)).eval()
    return causal_part(placed)


@contextmanager
def _explained(path: Path, config: TargetConfig, placement: Placement, attention: str) -> Iterator[None]:
    """Turn errors of transformers in the block into our errors.

    Raises:
        UsageError: the device map does not cover every module.
        UnsupportedError: the model's code does not know `attention`.
        CheckpointError: transformers does not load the target for another reason.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, ImportError) as error:
        if isinstance(error, KeyError) and error.args == (attention,):
            why = "its code has its own list of attention functions"
            raise not_run(config.model_type, why, id="target-attention-not-asked") from error
        if placement.spread is not None and "device_map" in str(error):
            raise UsageError(
                f"--device-map: {first_line(error)}",
                id="device-map",
                field="--device-map",
                found=dict(placement.spread.modules or {}),
                expected="a device for every module",
                hint="--device-map auto chooses by itself",
            ) from error
        raise CheckpointError(
            f"transformers does not load this target: {first_line(error)}",
            id="target-not-loaded",
            path=path,
            found=first_line(error),
        ) from error


def _check_tensors(
    model: nn.Module, info: Mapping[str, Any], config: TargetConfig, checkpoint: Checkpoint, *, is_wrapped: bool
) -> None:
    """Require, from transformers' report on loading, that it found and applied every tensor.

    Raises:
        TensorMismatch: tensors are missing or misshapen; transformers would make them up.
        UnsupportedError: transformers would leave tensors out.
    """
    wrong = {name: (str(list(found)), str(list(wanted))) for name, found, wanted in info["mismatched_keys"]}
    if info["missing_keys"] or wrong:
        raise TensorMismatch(missing=sorted(info["missing_keys"]), wrong=wrong, path=checkpoint.path)
    unread = (name for name in info["unexpected_keys"] if not is_taken_out(model, name, is_wrapped=is_wrapped))
    surplus = unapplied_tensors(unread, stored=checkpoint.tensors, num_layers=config.num_layers)
    if surplus:
        why = f"transformers does not apply {len(surplus)} of its tensors: {', '.join(surplus[:5])}"
        raise not_run(config.model_type, why, id="tensors-not-applied")


def _check_dtype(model: Any, config: TargetConfig, dtype: torch.dtype) -> None:
    """Check the dtypes of loaded weights. Some quantizers choose their own; models may keep some weights wider.

    Raises:
        UnsupportedError: weights are narrower than the dtype of the run, or the embedding has another dtype.
    """
    narrow = [
        (name, parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize
    ]
    embedding = model.get_input_embeddings().weight.dtype
    wrong = [*narrow, *([] if embedding == dtype else [("its embedding", embedding)])]
    if wrong:
        name, found = wrong[0]
        why = f"this release of transformers loads {name} as {found}, not as {dtype}"
        raise not_run(config.model_type, why, id="target-loaded-in-another-dtype")


def _ask_to_unpack(settings: Any) -> None:
    """Ask transformers, in every place of the config that states a quantization, to dequantise while it loads."""
    for part in (settings, settings.get_text_config(decoder=True)):
        stated = getattr(part, CONFIG_KEY, None)
        if isinstance(stated, dict):
            setattr(part, CONFIG_KEY, dequantised(stated))


def parameter_of(module: nn.Module, name: str, device: torch.device) -> Tensor:
    """Return a parameter of a module on a device: a copy if it is on another device, or offloaded."""
    parameter = module.get_parameter(name)
    if not parameter.is_meta:
        return parameter.detach().to(device)
    from accelerate.utils import align_module_device

    with align_module_device(module, device):
        return module.get_parameter(name).detach().clone()


def _device_arguments(placement: Placement, quantization: Quantization | None) -> dict[str, Any]:
    """Return transformers' arguments for a placement. Weights that stay quantised are loaded onto their device."""
    spread = placement.spread
    if spread is None:
        return {"device_map": {"": placement.device}} if quantization and not quantization.is_unpacked else {}
    if spread.modules is not None:
        return {"device_map": dict(spread.modules)}
    return {"device_map": "auto", "max_memory": dict(spread.max_bytes or {})}


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers and accelerate inside the block: only our console writes to the terminal."""
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
    """Return the type and first line of an error of other code."""
    return f"{type(error).__name__}: {in_one_line(error)}"
