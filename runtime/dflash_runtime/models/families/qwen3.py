"""Qwen3 dense decoders. Source: huggingface/transformers models/qwen3/modeling_qwen3.py."""

from typing import ClassVar

from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS


@TARGETS.register("qwen3")
class Qwen3Target(DecoderTarget):
    """A Qwen3 decoder: it normalises the queries and keys of each head."""

    has_head_norms: ClassVar[bool] = True
