"""`--to vllm`, `--to sglang`, `--to mlx`: configs that an engine serves as trained, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.formats.dialect import writable_formats
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_testing import checkpoints as support
from dflash_testing.command_line import Outcome, invoke

SLIDING = support.Shape(windows=(16, 16))
MIXED = support.Shape(windows=(16, None))
ENGINES = ("vllm", "sglang", "mlx")


@pytest.mark.parametrize(
    ("key", "value", "keeping"),
    [
        ("use_gemma_norm", True, {"sglang"}),
        ("is_neox_style", False, {"sglang", "vllm"}),
        ("rope_is_neox_style", False, {"sglang", "vllm"}),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_style_flags_are_written_only_if_every_reader_follows_them(
    key: str, value: bool, keeping: set[str], is_nested: bool, tmp_path: Path
) -> None:
    """The flags ask for norms of one plus the weight, and rope of neighbouring pairs. Without them a draft is noise."""
    config = support.native_config()
    (config["dflash_config"] if is_nested else config)[key] = value
    source = support.write_checkpoint(tmp_path / "source", config, support.body_arrays())
    for item in writable_formats("dflash"):
        out = tmp_path / item.name
        outcome = invoke("convert", source, out, "--to", item.name, "--target-name", "acme/target")
        assert outcome.code == (0 if item.name in keeping else 5), outcome.err
        if item.name not in keeping:
            assert f"{key} {json.dumps(value)}" in outcome.err
        else:
            read = key.removeprefix("rope_")  # the only name that vLLM reads, and only at the top level
            written = json.loads((out / "config.json").read_text())
            assert written[read] is value
            assert key == read or key not in written
            assert key not in written["dflash_config"]
            (verdict,) = validate_draft(ValidationPlan(draft=out, engines=parse_engines(item.name))).verdicts
            assert verdict.outcome == "serves"
    config = {**support.native_config(), key: not value}
    harmless = support.write_checkpoint(tmp_path / "harmless", config, support.body_arrays())
    assert invoke("convert", harmless, tmp_path / "out", "--to", "native").code == 0


def convert(path: Path, to: str, *more: str) -> tuple[Outcome, dict[str, Any]]:
    out = path.parent / "out"
    outcome = invoke("convert", path, out, "--to", to, *more)
    return outcome, json.loads((out / "config.json").read_text()) if outcome.code == 0 else {}


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize(
    ("shape", "is_causal"),
    [(support.SMALL, False), (support.SMALL, True), (SLIDING, False), (SLIDING, True), (MIXED, False)],
)
def test_every_key_that_a_reader_reads(to: str, shape: support.Shape, is_causal: bool, tmp_path: Path) -> None:
    outcome, written = convert(support.make_native(tmp_path / "source", shape, is_causal=is_causal), to)
    assert outcome.code == 0, outcome.err
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["is_causal"] is written["dflash_config"]["causal"] is is_causal
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["layer_types"] == [
        "full_attention" if window is None else "sliding_attention" for window in shape.windows
    ]
    assert written["use_sliding_window"] is (shape.windows != (None, None))
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
    assert written["vocab_size"] == 32
    assert open_draft(tmp_path / "out").config.causal == (is_causal, is_causal)


@pytest.mark.parametrize("to", ENGINES)
def test_mixed_layers_use_the_default_causality_of_all_engines(to: str, tmp_path: Path) -> None:
    outcome, written = convert(support.make_native(tmp_path / "source", MIXED, is_causal=support.REMOVED), to)
    assert outcome.code == 0
    assert "is_causal" not in written
    assert "causal" not in written["dflash_config"]


def test_flat_keys_for_mlx(tmp_path: Path) -> None:
    _, written = convert(support.make_native(tmp_path / "source"), "mlx")
    for key, value in (("target_layer_ids", [0, 2]), ("mask_token_id", 31), ("block_size", 4)):
        assert written[key] == written["dflash_config"][key] == value
    for key in ("model_type", "rope_theta", "tie_word_embeddings", "num_target_layers", "max_position_embeddings"):
        assert key in written  # bstnxbt/dflash-mlx has no defaults for these


def test_mlx_readers_of_windows_differ(tmp_path: Path) -> None:
    outcome, _ = convert(support.make_native(tmp_path / "source", SLIDING), "mlx")
    assert "warning: bstnxbt/dflash-mlx" in outcome.err


def test_mlx_has_no_bias(tmp_path: Path) -> None:
    outcome, _ = convert(support.make_native(tmp_path / "source", support.Shape(bias=True)), "mlx")
    assert outcome.code == 5
    assert "attention_bias" in outcome.err


class TestVllm:
    def test_a_reduced_head_stays(self, tmp_path: Path) -> None:
        source = support.make_speculators(tmp_path / "source", support.REDUCED, num_target_layers=4)
        outcome, written = convert(source, "vllm")
        assert outcome.code == 0, outcome.err
        assert (written["draft_vocab_size"], written["vocab_size"]) == (12, 32)
        support.assert_same_tensors(source, tmp_path / "out")
        before, after = open_draft(source).config, open_draft(tmp_path / "out").config
        assert (after.draft_vocab_size, after.vocab_size) == (before.draft_vocab_size, before.vocab_size)

    def test_a_target_of_another_width(self, tmp_path: Path) -> None:
        own = {"fc.weight": (16, 48), "embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16)}
        arrays = {**support.body_arrays(), **support.random_arrays(own)}
        config = support.native_config(target_hidden_size=24)
        source = support.write_checkpoint(tmp_path / "source", config, arrays)
        _, written = convert(source, "vllm")
        assert written["target_hidden_size"] == 24
        assert open_draft(tmp_path / "out").config.feature_size == 24

    @pytest.mark.parametrize("scale", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
    def test_scales(self, scale: str, tmp_path: Path) -> None:
        changes: dict[str, Any] = {scale: 2.0}
        source = support.make_native(tmp_path / "source", **changes)
        outcome, _ = convert(source, "vllm")
        assert outcome.code == 5
        assert f"{scale}: vLLM 0.33" in outcome.err
        outcome, written = convert(source, "vllm", "--allow-lossy")
        assert outcome.code == 0
        assert f"({scale})" in outcome.err
        assert scale not in written
        assert scale not in written["dflash_config"]

    @pytest.mark.parametrize(
        ("shape", "is_causal", "warned"),
        [(support.SMALL, False, False), (support.SMALL, True, False), (SLIDING, False, True)],
    )
    def test_release_024_without_windows_is_warned_about(
        self, shape: support.Shape, is_causal: bool, warned: bool, tmp_path: Path
    ) -> None:
        outcome, _ = convert(support.make_native(tmp_path / "source", shape, is_causal=is_causal), "vllm")
        assert ("vLLM 0.24" in outcome.err) is warned

    def test_mixed_windows_need_the_second_runner(self, tmp_path: Path) -> None:
        outcome, _ = convert(support.make_native(tmp_path / "source", MIXED), "vllm")
        assert "VLLM_USE_V2_MODEL_RUNNER=1" in outcome.err


class TestSglang:
    def test_a_reduced_head_is_refused_unless_it_is_the_targets(self, tmp_path: Path) -> None:
        source = support.make_speculators(tmp_path / "source", support.REDUCED)
        outcome, _ = convert(source, "sglang")
        assert outcome.code == 5
        assert "lm_head.weight" in outcome.err
        target = support.make_target(tmp_path / "target", support.REDUCED)
        outcome, written = convert(source, "sglang", "--target", str(target), "--allow-lossy")
        assert outcome.code == 0, outcome.err
        assert written["vocab_size"] == 32
        assert "draft_vocab_size" not in written
        assert set(Checkpoint(tmp_path / "out").tensors) == set(support.body_arrays())

    def test_a_target_of_another_width(self, tmp_path: Path) -> None:
        own = {"fc.weight": (16, 48), "embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16)}
        arrays = {**support.body_arrays(), **support.random_arrays(own)}
        source = support.write_checkpoint(tmp_path / "source", support.native_config(target_hidden_size=24), arrays)
        outcome, _ = convert(source, "sglang")
        assert outcome.code == 5
        assert "target_hidden_size 24" in outcome.err

    def test_two_of_three_scales(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "a", output_multiplier=0.5, final_logit_softcapping=20.0)
        _, written = convert(source, "sglang")
        assert written["dflash_config"]["output_multiplier"] == 0.5
        assert written["dflash_config"]["final_logit_softcapping"] == 20.0

    def test_the_third_is_refused(self, tmp_path: Path) -> None:
        outcome, _ = convert(support.make_native(tmp_path / "source", input_embedding_scale=2.0), "sglang")
        assert outcome.code == 5
        assert "input_embedding_scale: SGLang 0.5.23" in outcome.err


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_rope_keys_of_a_multimodal_target_are_left_out(to: str, tmp_path: Path) -> None:
    """SGLang would rotate a quarter of each head, but the draft was trained with a loader that ignores the key."""
    rope = {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2]}
    source = support.make_native(tmp_path / "source", rope_parameters=rope, partial_rotary_factor=0.25)
    outcome, written = convert(source, to)
    assert outcome.code == 0, outcome.err
    assert "warning: partial_rotary_factor, mrope_section" in outcome.err
    assert "partial_rotary_factor" not in written
    assert written["rope_parameters"] == {"rope_theta": 1000000, "rope_type": "default"}
    assert written["rope_scaling"] is None


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_another_activation_is_refused(to: str, tmp_path: Path) -> None:
    outcome, _ = convert(support.make_native(tmp_path / "source", hidden_act="gelu"), to)
    assert outcome.code == 5
    assert "hidden_act 'gelu'" in outcome.err
