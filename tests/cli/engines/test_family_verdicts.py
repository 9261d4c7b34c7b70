"""Verdicts on DFlash 2 and DSpark drafts agree with vLLM's own code.

`LOADED` was recorded with the unchanged code of vLLM 0.33.0 on a CPU, as `tests/golden/engine_verdicts.py` runs it: the
config, the modules and the weights, with the method of each family. None: the code stops. Otherwise the layout that
its config object states, where vLLM takes a missing key for anchor-first.
"""

from pathlib import Path
from typing import Any

import pytest

from dflash_cli import validate
from dflash_testing.checkpoints import REMOVED, Json
from dflash_testing.families import FAMILIES, write_draft

LOADED: dict[str, tuple[str, Json, tuple[str, ...], bool | None]] = {
    "as it is": ("dspark", {}, (), True),
    "fill-in": ("dspark", {"sample_from_anchor": False}, (), False),
    "no layout": ("dspark", {"sample_from_anchor": REMOVED}, (), True),
    "nested layout": ("dspark", {"sample_from_anchor": False}, ("sample_from_anchor",), True),
    "gated": ("dspark", {"markov_head_type": "gated"}, (), None),
    "rnn": ("dspark", {"markov_head_type": "rnn"}, (), None),
    "nested rank": ("dspark", {}, ("markov_rank",), None),
    "nested confidence": ("dspark", {}, ("confidence_head_with_markov",), None),
    "no head": ("dspark", {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}, (),
                True),
    "SpecForge's name": ("dspark", {"architectures": ["DSparkDraftModel"]}, (), True),
    "DFlash's name": ("dspark", {"architectures": ["DFlashDraftModel"]}, (), None),
    "candidates": ("dspark", {"dspark_draft_topk": 3}, (), True),
    "speculators": ("dspark-speculators", {}, (), True),
    "speculators, fill-in": ("dspark-speculators", {"sample_from_anchor": False}, (), False),
    "speculators, no layout": ("dspark-speculators", {"sample_from_anchor": REMOVED}, (), False),
}  # fmt: skip
"""Case -> dialect, changed keys, keys moved into `dflash_config`, and the outcome."""


@pytest.mark.parametrize("case", LOADED)
def test_a_verdict_is_what_vllm_does(case: str, tmp_path: Path) -> None:
    name, changes, nested, layout = LOADED[case]
    config: dict[str, Any] = FAMILIES[name](**changes)
    for key in nested:
        config["dflash_config"][key] = config.pop(key)
    (verdict,) = validate(draft=str(write_draft(tmp_path / "draft", config)), engine=("vllm@0.33",)).verdicts
    stated = changes.get("sample_from_anchor", True)
    is_other = layout is not None and stated is not REMOVED and layout is not stated
    assert verdict.outcome == ("stops" if layout is None else "drops" if is_other else "serves")
