"""The text part of a multimodal model: the same class of transformers, without the parts that see and hear.

They are taken out while the model is made, before it has any weights, so that theirs are never read.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from dflash_runtime.checkpoint.files import TensorInfo

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

OTHER_PARTS = re.compile(
    r"(.*\.)?(visual|vision_tower|vision_model|vision_encoder|vision_embedder|vision_adapter|vision_projection"
    r"|perception_emb_norm|embed_vision|audio|audio_tower|embed_audio|multi_modal_projector|connector|mm_projector|mlp1|patch_merge_mlp)\."
)
"""How tensors begin that are no text's, for counting them; which are read follows from the model itself."""

TAKEN_OUT = "taken_out"
"""Attribute of a model: the names of its parts that were taken out."""


def model_class(config: "PretrainedConfig") -> type["PreTrainedModel"] | None:
    """The class that runs the text part of a wrapper; None where transformers has one among those for text alone."""
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
    """The causal language model that a wrapper holds whole, with its head; or else the model itself."""
    inner: Any = model.get_decoder()
    return inner if model.get_output_embeddings() is None and inner.get_output_embeddings() is not None else model


def text_tensors(infos: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint that are the text's, as far as names tell."""
    return {info.name: info for info in infos if not OTHER_PARTS.match(info.name)}


def is_taken_out(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a part that was taken out."""
    return name.startswith(tuple(f"{part}." for part in getattr(model, TAKEN_OUT, ())))


def _without_other_parts(whole: type["PreTrainedModel"]) -> type["PreTrainedModel"]:
    def make(self: Any, config: Any, *given: Any, **options: Any) -> None:
        whole.__init__(self, config, *given, **options)
        object.__setattr__(self, TAKEN_OUT, tuple(_take_out(self)))

    # transformers finds the code of a class by its module.
    return type(whole.__name__, (whole,), {"__init__": make, "__module__": whole.__module__})


def _take_out(model: Any) -> Iterable[str]:
    """Take out what has weights and is neither the decoder, nor its head, nor around them."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    path = next(name for name, module in model.named_modules() if module is decoder).split(".")
    for depth, kept in enumerate(path):
        owner = model.get_submodule(".".join(path[:depth]))
        for name, child in list(owner.named_children()):
            if name != kept and child is not head and child.state_dict():
                setattr(owner, name, None)
                yield ".".join([*path[:depth], name])
