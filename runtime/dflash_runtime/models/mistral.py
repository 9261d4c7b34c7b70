"""Mistral decoders. Source: huggingface/transformers models/mistral/modeling_mistral.py."""

from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS


@TARGETS.register("mistral")
class MistralTarget(DecoderTarget):
    """A Mistral decoder: Llama's layers, all of them over a window where the config has one."""
