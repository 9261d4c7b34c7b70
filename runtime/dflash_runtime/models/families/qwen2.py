"""Qwen2 and Qwen2.5 decoders. Source: huggingface/transformers models/qwen2/modeling_qwen2.py."""

from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.target import TARGETS
from dflash_runtime.target_config import TargetConfig


@TARGETS.register("qwen2")
class Qwen2Target(DecoderTarget):
    """A Qwen2 decoder: its query, key and value projections always have a bias."""

    @classmethod
    def biased_projections(cls, config: TargetConfig) -> str:
        return "qkv"
