"""Changes to the plain softmax of attention, and the scale of its scores."""

import math
from dataclasses import dataclass

from torch import Tensor

from dflash_kernels.kv.kv_format import KVScales
from dflash_kernels.launch import check_tensors, require


@dataclass(frozen=True, slots=True)
class Softmax:
    """Changes to the plain softmax of attention: a cap of the scores, and attention sinks.

    The cap replaces scores by `cap * tanh(scores / cap)`. A sink, `sinks` [H], is one more score per query head in the
    sum of weights. It has no value.
    Sources: Gemma Team 2024, "Gemma 2"; OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card".
    """

    cap: float | None = None
    sinks: Tensor | None = None


PLAIN = Softmax()


def check_softmax(softmax: Softmax, query: Tensor) -> None:
    """Raise ValueError if the kernels cannot use this softmax with queries [..., H, D]."""
    require(softmax.cap is None or softmax.cap > 0, "softmax.cap", "a number above 0")
    if softmax.sinks is not None:
        check_tensors(query, softmax.sinks)
        has_one_per_head = softmax.sinks.shape == query.shape[-2:-1]
        require(has_one_per_head and softmax.sinks.is_contiguous(), "softmax.sinks", "one per query head, contiguous")


def cap_of_products(softmax: Softmax, head_dim: int, scales: KVScales) -> float | None:
    """Return the cap of unscaled scores. The kernels scale the products of queries and keys after the cap."""
    return None if softmax.cap is None else softmax.cap * math.sqrt(head_dim) / scales.key


def factor_of_products(head_dim: int, scales: KVScales) -> float:
    """Return the factor that turns products of queries and keys into scores in base 2."""
    return math.log2(math.e) * scales.key / math.sqrt(head_dim)
