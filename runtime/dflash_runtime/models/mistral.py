"""Mistral decoders. Source: huggingface/transformers models/mistral/modeling_mistral.py."""

from dflash_runtime.models.dense_target import DenseTarget
from dflash_runtime.models.target import TARGETS


@TARGETS.register("mistral")
class MistralTarget(DenseTarget):
    """A Mistral decoder: Llama's layers, all of them over a window where the config has one."""
