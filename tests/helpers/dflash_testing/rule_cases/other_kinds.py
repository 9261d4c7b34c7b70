"""Cases of the rules on drafts of other kinds than DFlash."""

from typing import Any

import numpy as np

from dflash_testing.kinds import ADAFLASH, DOMINO
from dflash_testing.rule_cases.base import Case, nested

GRU = "prefix_gru.weight_hh_l0"


def with_tensor(name: str, *shape: int) -> Any:
    return lambda arrays: arrays.update({name: np.zeros(shape, dtype=np.float32)})


CASES = [
    Case(rule="D01", key="dflash_config.gru_hidden_dim", names=("missing",), config=nested(projector_type="domino")),
    Case(
        rule="D01", key="dflash_config.emb_dim", names=("'five'",), config=nested(**{**DOMINO, "emb_dim": "five"})
    ),
    Case(
        rule="D02", key="dflash_config.gru_depth", names=("gru_depth",), severity="info",
        config=nested(**DOMINO, gru_depth=2),
    ),
    Case(rule="D03", at="model.safetensors", names=(GRU,), config=nested(**DOMINO)),
    Case(
        rule="D04", at="model.safetensors:prefix_gru.bias", names=("prefix_gru.bias",), config=nested(**DOMINO),
        tensors=with_tensor("prefix_gru.bias", 4),
    ),
    Case(
        rule="D05", at=f"model.safetensors:{GRU}", names=("18", "6"), config=nested(**DOMINO),
        tensors=with_tensor(GRU, 4, 4),
    ),
    Case(
        rule="D06", key="architectures", names=("length head",), severity="warning", engines="sglang",
        config=nested(**ADAFLASH),
    ),
]  # fmt: skip
