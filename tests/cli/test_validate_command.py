"""`dflash validate` as a command: output, exit codes, engines, JSON."""

import json
from pathlib import Path

import pytest

import support
from dflash_cli.checks.engines import parse_engines
from dflash_runtime.errors import UsageError


class TestCommand:
    def test_sound(self) -> None:
        outcome = support.invoke("validate", "tiny")
        assert outcome.code == 0
        assert outcome.out.endswith("0 errors, 0 warnings\n")
        assert "against tiny" in outcome.out

    def test_findings_exit_3(self, tmp_path: Path) -> None:
        draft = support.make_native(
            tmp_path / "draft", dflash_config={"mask_token_id": None, "target_layer_ids": [0, 2]}
        )
        outcome = support.invoke("validate", draft)
        assert outcome.code == 3
        assert "C12 error   config.json:dflash_config.mask_token_id: null" in outcome.out
        assert "no --target given" in outcome.err

    def test_strict(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", num_target_layers=support.REMOVED)
        assert support.invoke("validate", draft).code == 0
        assert support.invoke("validate", draft, "--strict").code == 3
        assert support.invoke("validate", draft, "--strict", "--ignore", "c11").code == 0

    def test_json_is_one_document(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", block_size=1)
        outcome = support.invoke("validate", draft, "--json")
        document = json.loads(outcome.out)
        assert outcome.code == 3
        assert document["schema_version"] == 1
        assert document["passed"] is False
        assert document["findings"][0]["id"] == "C03"

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--engine", "vlm"], "did you mean 'vllm'"),
            (["--engine", "vllm@new"], "no release of vllm"),
            (["--ignore", "X99"], "no rule X99"),
        ],
    )
    def test_usage(self, args: list[str], message: str) -> None:
        outcome = support.invoke("validate", "tiny", *args)
        assert outcome.code == 2
        assert message in outcome.err

    def test_engine_decides_severity(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft", sliding_window_non_causal=False)
        assert support.invoke("validate", draft).code == 0
        assert support.invoke("validate", draft, "--engine", "vllm@0.33").code == 3
        assert support.invoke("validate", draft, "--engine", "vllm@0.20").code == 0


def test_release_numbers() -> None:
    assert parse_engines("vllm, sglang@0.5.23")[1].release == (0, 5, 23)
    assert parse_engines("vllm@0.33")[0].release == (0, 33, 0)
    with pytest.raises(UsageError):
        parse_engines("trtllm")
