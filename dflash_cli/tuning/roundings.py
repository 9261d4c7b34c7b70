"""Number formats as roundings: values are rounded to a format and kept in the dtype of the run.

This shows a format's effect on acceptance without kernels for the format. It does not show the effect on step times.
Weights are rounded to the nearest value without calibration. Calibrated methods (GPTQ, AWQ) should do at least as well.

Axis letters: T rows, KV heads of keys and values, D head dim, S slots, L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_cli.tuning.what_if import KV_FORMATS, WEIGHT_FORMATS
from dflash_kernels.attention.row_attention import attend_in_turn
from dflash_kernels.kv.rope_store import HALVES, KVPlace, Turn
from dflash_kernels.suite import Kernels
from dflash_runtime.models.weights import Weights

GROUP = 128
"""Number of weights of a row with a common scale in int4, as in GPTQ and AWQ checkpoints."""

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

NOT_ROUNDED = (
    "embed_tokens", "lm_head", "markov_w1", "codebook", "base_kernel", "confidence_head", "conv1d", "mlp.gate.",
    "shared_expert_gate", "in_proj_a.", "in_proj_b.", "in_proj_ba.",
)  # fmt: skip
"""Parts of names of tensors that quantised checkpoints do not round: embeddings, heads, rows that are looked up by
token, convolutions, routers, and gates of recurrent layers. Engines compute the confidence head in float32.
Sources: vllm-project/llm-compressor examples/quantization_w8a8_fp8/qwen3_5_moe.py, ModelCloud/GPTQModel."""

Rounding = Callable[[Tensor], Tensor]
"""Values [..., N] -> the nearest values of a format, in the same dtype. Scales are over the last axis."""


def to_bfloat16(values: Tensor) -> Tensor:
    """Round to bfloat16."""
    return values.to(torch.bfloat16).to(values.dtype)


def to_fp8(values: Tensor) -> Tensor:
    """Round to FP8 (e4m3) with a scale of 1. Larger values become 448, the largest value of the format."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(values.dtype)


def to_scaled_fp8(values: Tensor) -> Tensor:
    """Round to FP8 (e4m3) with a scale for each row: the row's largest value becomes 448."""
    scales = _scales(values, FP8_MAX)
    return (to_fp8((values / scales).float()) * scales).to(values.dtype)


def to_int8(values: Tensor) -> Tensor:
    """Round to whole numbers from -127 to 127, with a scale for each row."""
    return _to_whole(values, 127)


def to_int4(values: Tensor) -> Tensor:
    """Round to whole numbers from -7 to 7, with a scale for each `GROUP` values of a row."""
    width = values.shape[-1]
    group = GROUP if width % GROUP == 0 else width
    return _to_whole(values.unflatten(-1, (-1, group)), 7).flatten(-2)


def _to_whole(values: Tensor, largest: int) -> Tensor:
    scales = _scales(values, largest)
    return ((values / scales).float().round() * scales).to(values.dtype)


def _scales(values: Tensor, largest: float) -> Tensor:
    """Return the float32 divisor of each row that makes its largest value `largest`; 1 for a row of zeros."""
    scales = values.abs().amax(dim=-1, keepdim=True).float() / largest
    return torch.where(scales > 0, scales, torch.ones_like(scales))


WEIGHTS: Mapping[str, Rounding] = dict(zip(WEIGHT_FORMATS, (to_bfloat16, to_scaled_fp8, to_int8, to_int4), strict=True))
KV: Mapping[str, Rounding] = dict(zip(KV_FORMATS, (to_bfloat16, to_fp8, to_scaled_fp8, to_int8), strict=True))


def round_weights(weights: Weights, name: str) -> Weights:
    """Return the weights with every matrix rounded except NOT_ROUNDED. Norms and biases do not change."""
    return {key: WEIGHTS[name](tensor) if _is_rounded(key, tensor) else tensor for key, tensor in weights.items()}


def _is_rounded(key: str, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 1 and not any(part in key for part in NOT_ROUNDED)


def round_kv(kernels: Kernels, name: str) -> Kernels:
    """Return the kernels with keys and values rounded before they are stored or read.

    Queries are not rounded. The work depends on shapes only, so steps can be captured as CUDA graphs.
    """
    rounding = KV[name]

    def kv_store(keys: Tensor, values: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        return kernels.kv_store(rounding(keys), rounding(values), *place)

    def rope_store(
        parts: Tensor, head_norms: Tensor | None, eps: float, cos: Tensor, sin: Tensor, num_kv: int,
        place: KVPlace | None, turn: Turn = HALVES,
    ) -> Tensor:  # fmt: skip
        rows = kernels.rope_store(parts, head_norms, eps, cos, sin, num_kv, None, turn)
        rows = torch.cat((rows[:, : -2 * num_kv], rounding(rows[:, -2 * num_kv :])), dim=1)
        if place is not None:
            kernels.kv_store(rows[:, -2 * num_kv : -num_kv], rows[:, -num_kv:], *place)
        return rows

    def context_kv_store(*arguments: Any) -> None:
        kernels.context_kv_store(*arguments)
        *_, key_cache, value_cache, slots = arguments
        written = slots.clamp(min=0)  # dropped rows use slot 0: no request uses its page
        for cache in (key_cache, value_cache):
            pages, offsets = written // cache.shape[2], written % cache.shape[2]
            cache[:, pages, offsets] = rounding(cache[:, pages, offsets])

    return replace(
        kernels, kv_store=kv_store, rope_store=rope_store, context_kv_store=context_kv_store,
        row_attention=partial(attend_in_turn, rope_store, kernels.block_attention),
    )  # fmt: skip
