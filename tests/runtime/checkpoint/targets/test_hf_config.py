"""Rope in two spellings: different values are an error."""

from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.checkpoint.targets.rope_fields import read_rope
from dflash_runtime.errors import InvalidConfig
from dflash_testing.refusals import refuses

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}
PATH = Path("config.json")


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_fast", "mscale"])
def test_spellings_that_differ_are_refused(key: str) -> None:
    """Readers choose differently: transformers takes rope_scaling, vLLM takes rope_parameters."""
    one, other = {**YARN, key: 4}, {**YARN, key: 16}
    with refuses(InvalidConfig, field=key, found={f"rope_scaling.{key}": 4, f"rope_parameters.{key}": 16}):
        read_rope({"rope_theta": 1e6, "rope_scaling": one, "rope_parameters": other}, PATH)


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (YARN, {**YARN, "rope_theta": 1e6}),
        ({**YARN, "factor": 4}, YARN),
        (YARN, {"rope_theta": 1e6}),
        ({**YARN, "mscale": None}, {**YARN, "mscale": 1.0}),
        ({"type": "yarn", **{key: value for key, value in YARN.items() if key != "rope_type"}}, YARN),
        (None, YARN),
        ({"full_attention": YARN}, YARN),
    ],
)
def test_spellings_that_agree_are_joined(scaling: Any, parameters: Any) -> None:
    found = read_rope({"rope_theta": 1e6, "rope_scaling": scaling, "rope_parameters": parameters}, PATH)
    assert (found.theta, found.kind, found.params["factor"]) == (1e6, "yarn", 4)
