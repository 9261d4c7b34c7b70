"""vLLM 0.24 to 0.33, SGLang 0.5.23 and z-lab 0.1.0 read the meant values from the configs that this project writes.

The readings come from the engines' own code, see tests/golden/engine_readings.py. A digest shows when a config has
changed since its readings were recorded. Then record the readings again.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import LossyConversion
from dflash_testing import checkpoints as support
from dflash_testing import dialects
from dflash_testing.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "engine_readings.json").read_text(encoding="utf-8"))
READINGS: list[dict[str, Any]] = RECORDED["readings"]
PAIRS = [(name, to) for to in ("native", "vllm", "sglang", "mlx", "speculators") for name in dialects.CASES]


def meant(config: DraftConfig) -> dict[str, Any]:
    """The draft in the words of the readings."""
    return {
        "architectures": ["DFlashDraftModel"],
        "taps": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        "windows": list(config.windows),
        "causal": list(config.causal),
        "rope": config.rope.to_parameters(),
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
        "serving": {"method": "dflash", "num_speculative_tokens": config.num_draft_tokens},
        "missing": [],
        "unexpected": [],
    }


@pytest.mark.parametrize(("name", "to"), PAIRS)
def test_engines_read_what_was_meant(name: str, to: str, tmp_path: Path) -> None:
    readings = [item for item in READINGS if (item["case"], item["to"]) == (name, to)]
    source = dialects.make_case(tmp_path / "source", name)
    if not readings:
        with pytest.raises(LossyConversion):
            support.convert(source, tmp_path / "out", to, verifier="acme/target")
        return
    support.convert(source, tmp_path / "out", to, verifier="acme/target")
    assert {item["config_sha256"] for item in readings} == {dialects.config_digest(tmp_path / "out")}
    expected = meant(open_draft(source).config)
    for item in readings:
        found, engine = item["reading"], item["reader"].replace(" ", "@")
        is_meant = found == {key: expected.get(key) for key in found}
        if not engine.startswith("vllm"):
            assert is_meant, engine
            continue
        request = ValidationPlan(draft=tmp_path / "out", engines=parse_engines(engine))
        (verdict,) = validate_draft(request).verdicts
        outcome = "stops" if "refused" in found else "serves" if is_meant else "drops"
        causal = [] if outcome == "stops" else found.get("causal", [False, False])
        assert (verdict.outcome, list(verdict.causal or ())) == (outcome, causal), engine


def test_every_engine_has_read() -> None:
    vllm = {f"vllm 0.{minor}.0" for minor in (24, 25, 26, 28, 33)}
    assert {item["reader"] for item in READINGS} == vllm | {"sglang 0.5.23", "z-lab 0.1.0"}
    assert len(READINGS) == 169
    assert RECORDED["provenance"]["versions"]["dflash"] == "0.1.0"


def test_mixed_layers_are_warned_about_where_vllm_misreads_them(tmp_path: Path) -> None:
    source = dialects.make_case(tmp_path / "source", "mixed")
    manifest = support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")
    assert any("vLLM 0.33 makes every layer causal" in warning for warning in manifest["warnings"])
