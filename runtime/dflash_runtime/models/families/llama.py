"""Llama decoders. Source: huggingface/transformers models/llama/modeling_llama.py."""

from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS


@TARGETS.register("llama")
class LlamaTarget(DecoderTarget):
    """A Llama decoder. `attention_bias` and `mlp_bias` of its config add a bias to all projections of these parts."""
