"""Every case of this folder."""

from dflash_testing.rule_cases import (
    attention,
    config,
    engines,
    families,
    gguf,
    other_kinds,
    pair,
    tensors,
    vocabulary,
    weights,
)
from dflash_testing.rule_cases.base import Case

CASES: list[Case] = [
    *config.CASES,
    *attention.CASES,
    *tensors.CASES,
    *vocabulary.CASES,
    *pair.CASES,
    *engines.CASES,
    *families.CASES,
    *weights.CASES,
    *other_kinds.CASES,
    *gguf.CASES,
]
