"""Qwen3.5 decoders with experts: a routed feed-forward and a shared one in every layer. Source:
huggingface/transformers models/qwen3_5_moe/modeling_qwen3_5_moe.py.
"""

from dflash_runtime.models.families.qwen3_5 import Qwen35Target
from dflash_runtime.models.target import TARGETS


@TARGETS.register("qwen3_5_moe")
@TARGETS.register("qwen3_5_moe_text")
class Qwen35MoeTarget(Qwen35Target):
    """A Qwen3.5 decoder with experts."""
