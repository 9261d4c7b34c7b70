"""Qwen3 decoders with experts. Source: huggingface/transformers models/qwen3_moe/modeling_qwen3_moe.py."""

from typing import ClassVar

from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS


@TARGETS.register("qwen3_moe")
class Qwen3MoeTarget(DecoderTarget):
    """A Qwen3 decoder in which some or all layers have experts instead of one feed-forward."""

    has_head_norms: ClassVar[bool] = True
