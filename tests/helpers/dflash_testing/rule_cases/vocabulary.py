"""Faults in the reduced vocabulary."""

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, Case, add, edit, top, without

CASES = [
    Case(
        rule="M01", at="model.safetensors:d2t", names=("missing", "draft_vocab_size", "12"), dialect=SPEC,
        config=top(draft_vocab_size=12),
    ),
    Case(
        rule="M01", at="model.safetensors:t2d", names=("missing",), severity="warning", dialect=SPEC,
        shape=support.REDUCED,
        tensors=without("t2d"),
    ),
    Case(rule="M01", key="draft_vocab_size", names=("33",), dialect=SPEC, config=top(draft_vocab_size=33)),
    Case(
        rule="M02", at="model.safetensors:d2t", names=("32",), dialect=SPEC, engines="vllm",
        tensors=add("d2t", 32, dtype=np.int64),
    ),
    Case(
        rule="M02", at="model.safetensors:d2t", names=("32",), severity="warning", dialect=SPEC,
        tensors=add("d2t", 32, dtype=np.int64),
    ),
    Case(
        rule="M03", at="model.safetensors:t2d", names=("[31]", "[32]"), dialect=SPEC, shape=support.REDUCED,
        tensors=add("t2d", 31, dtype=bool),
    ),
    Case(
        rule="M04", at="model.safetensors:d2t", names=("I32", "I64"), severity="warning", dialect=SPEC,
        shape=support.REDUCED,
        tensors=edit("d2t", lambda item: item.astype(np.int32)),
    ),
    Case(
        rule="M04", at="model.safetensors:t2d", names=("F32",), dialect=SPEC, shape=support.REDUCED,
        tensors=add("t2d", 32),
    ),
]  # fmt: skip
