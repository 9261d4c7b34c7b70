"""The experts of a target: the reader never guesses, and names keys that are missing or contradict each other."""

from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.checkpoint.targets.experts_config import read_experts
from dflash_runtime.errors import InvalidConfig
from dflash_testing.refusals import refuses

PATH = Path("config.json")
PUBLISHED = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The keys of Qwen3-30B-A3B."""


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read_experts(PUBLISHED | changes, 4, PATH).layers == layers


def test_both_spellings_of_the_count() -> None:
    renamed = {key: value for key, value in PUBLISHED.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert read_experts(renamed, 4, PATH) == read_experts(PUBLISHED | renamed, 4, PATH)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_experts", {"num_experts": None}),
        ("num_experts", {"num_local_experts": 64}),
        ("num_experts", {"num_experts": "128"}),
        ("num_experts_per_tok", {"num_experts_per_tok": 129}),
        ("num_experts_per_tok", {"num_experts_per_tok": 0}),
        ("moe_intermediate_size", {"moe_intermediate_size": None}),
        ("norm_topk_prob", {"norm_topk_prob": None}),
        ("decoder_sparse_step", {"decoder_sparse_step": 0}),
        ("mlp_only_layers", {"mlp_only_layers": 3}),
        ("mlp_only_layers", {"mlp_only_layers": ["3"]}),
    ],
)
def test_a_missing_or_wrong_key_is_named(field: str, changes: dict[str, Any]) -> None:
    with refuses(InvalidConfig, field=field):
        read_experts(PUBLISHED | changes, 4, PATH)
