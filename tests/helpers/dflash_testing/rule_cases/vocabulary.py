"""Faults in the reduced vocabulary."""

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, Case, add, edit, top, without

CASES = [
    Case(rule="M01", message="missing, although draft_vocab_size is 12", dialect=SPEC, config=top(draft_vocab_size=12)),
    Case(
        rule="M01", message="missing, although d2t is there", severity="warning", dialect=SPEC, shape=support.REDUCED,
        tensors=without("t2d"),
    ),
    Case(rule="M01", message="found 33, expected at most", dialect=SPEC, config=top(draft_vocab_size=33)),
    Case(
        rule="M02", message="whole vocabulary of 32", dialect=SPEC, engines="vllm",
        tensors=add("d2t", 32, dtype=np.int64),
    ),
    Case(
        rule="M02", message="whole vocabulary", severity="warning", dialect=SPEC,
        tensors=add("d2t", 32, dtype=np.int64),
    ),
    Case(
        rule="M03", message="[31], expected [32]", dialect=SPEC, shape=support.REDUCED,
        tensors=add("t2d", 31, dtype=bool),
    ),
    Case(
        rule="M04", message="I32, expected I64", severity="warning", dialect=SPEC, shape=support.REDUCED,
        tensors=edit("d2t", lambda item: item.astype(np.int32)),
    ),
    Case(
        rule="M04", message="F32, expected BOOL", dialect=SPEC, shape=support.REDUCED, tensors=add("t2d", 32),
    ),
]  # fmt: skip
