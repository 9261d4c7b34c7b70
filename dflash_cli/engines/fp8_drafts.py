"""Rules about drafts in FP8: which matrices each engine multiplies with their scales."""

import re
from collections.abc import Iterator

from dflash_cli.rules.rule import Problem, check
from dflash_cli.rules.subject import Subject
from dflash_cli.rules.themes.tensors import WEIGHTS
from dflash_runtime.checkpoint.fp8_format import E4M3
from dflash_runtime.checkpoint.layout import HEAD

ATTENTION_INPUT = re.compile(r"(.*\.)?self_attn\.(q|k|v|qkv)_proj\.weight")
FIX = "dflash convert SRC {{out}} --to {engine} --quantize fp8 # from the plain draft; keeps q, k, v and the head"


@check(
    "S44",
    effect="vLLM multiplies k and v of the context without scales and stops; it also stops at scales of a head",
    fix=FIX.format(engine="vllm"),
    source="vLLM 0.33.0 models/qwen3_dflash.py, _build_context_kv_buffers; vllm-project/vllm#51581",
    engines=("vllm",),
    outcome="stops",
)
def vllm_gets_plain_queries_keys_values_and_head(subject: Subject) -> Iterator[Problem]:
    """The projections q, k and v and the head of a draft for vLLM are not in FP8."""
    yield from _in_fp8(subject, has_head=True)


@check(
    "S45",
    effect="SGLang reads q, k and v of a draft without their scales, so nearly nothing is accepted",
    fix=FIX.format(engine="sglang"),
    source="SGLang 0.5.23 models/dflash.py, DFlashAttention and load_weights",
    engines=("sglang",),
    outcome="drops",
)
def sglang_gets_plain_queries_keys_and_values(subject: Subject) -> Iterator[Problem]:
    """The projections q, k and v of a draft for SGLang are not in FP8. It leaves out a draft's head."""
    yield from _in_fp8(subject, has_head=False)


def _in_fp8(subject: Subject, *, has_head: bool) -> Iterator[Problem]:
    tensors = (subject.tensors or {}).items()
    names = sorted(
        name for name, info in tensors
        if info.dtype == E4M3 and (ATTENTION_INPUT.fullmatch(name) or (has_head and name.endswith(HEAD)))
    )  # fmt: skip
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Problem(WEIGHTS, f"{names[0]}{more} in FP8")
