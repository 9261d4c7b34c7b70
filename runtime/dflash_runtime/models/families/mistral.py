"""Mistral decoders. Source: huggingface/transformers models/mistral/modeling_mistral.py."""

from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS


@TARGETS.register("mistral")
class MistralTarget(DecoderTarget):
    """A Mistral decoder: Llama's layers. A window in its config applies to all of them."""
