"""The text part of a multimodal model: the same class of transformers, without its parts for images and audio.

These parts are removed while the model is made, before it has weights, so that their weights are never read.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

OTHER_PARTS = re.compile(
    r"(.*\.)?(visual|vision_tower|vision_model|vision_encoder|vision_embedder|vision_adapter|vision_projection"
    r"|perception_emb_norm|embed_vision|audio|audio_tower|embed_audio|multi_modal_projector|connector|mm_projector|mlp1|patch_merge_mlp"
    r"|merger|projector|aligner)\."
)
"""Names of tensors outside the text part, for estimates of bytes. The model decides which tensors are read."""

TAKEN_OUT = "taken_out"
"""Attribute of a model with the names of its removed parts."""


def model_class(config: "PretrainedConfig") -> type["PreTrainedModel"] | None:
    """Return the class that runs the text part of a wrapper, or None if transformers has a text-only class for it."""
    from transformers.models.auto.auto_factory import _get_model_class
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    text = config.get_text_config(decoder=True)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found: Any = _get_model_class(config, mapping)
    if mapping is MODEL_FOR_CAUSAL_LM_MAPPING and found.config_class is type(text):
        return None
    whole: type[PreTrainedModel] = found
    return whole if text is config else _without_other_parts(whole)


def causal_part(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the causal language model inside a wrapper, with its head, or the model itself if it is not a wrapper."""
    inner: Any = model.get_decoder()
    return inner if model.get_output_embeddings() is None and inner.get_output_embeddings() is not None else model


def text_tensors(infos: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint that belong to its text part, judged by their names."""
    return {info.name: info for info in infos if not OTHER_PARTS.match(info.name)}


def is_taken_out(model: nn.Module, name: str, *, is_wrapped: bool) -> bool:
    """Whether a tensor belongs to a part that is not loaded on purpose.

    With `is_wrapped` the config is a wrapper's, and transformers' class for the text alone lacks such parts.
    """
    removed = getattr(model, TAKEN_OUT, None)
    if removed is None:
        return is_wrapped and OTHER_PARTS.match(name) is not None
    return name.startswith(tuple(f"{part}." for part in removed))


def _without_other_parts(whole: type["PreTrainedModel"]) -> type["PreTrainedModel"]:
    def make(self: Any, config: Any, *given: Any, **options: Any) -> None:
        whole.__init__(self, config, *given, **options)
        object.__setattr__(self, TAKEN_OUT, tuple(_take_out(self)))

    # transformers finds the code of a class by its module.
    return type(whole.__name__, (whole,), {"__init__": make, "__module__": whole.__module__})


def _take_out(model: Any) -> Iterable[str]:
    """Remove each part with weights that is not the decoder, its head or a wrapper of them, and yield its name."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    path = next(name for name, module in model.named_modules() if module is decoder).split(".")
    for depth, kept in enumerate(path):
        owner = model.get_submodule(".".join(path[:depth]))
        for name, child in list(owner.named_children()):
            if name != kept and child is not head and child.state_dict():
                setattr(owner, name, None)
                yield ".".join([*path[:depth], name])
