"""Who exported a native checkpoint, by what that is known, and how each exporter's habits are read.

The values are those of published configs and of the exporters' sources; the sizes are small.
"""

from pathlib import Path
from typing import Any

import pytest

import support
from dflash_cli.formats.base import Detection, Reading, detect_from
from dflash_cli.loading import open_draft, override_causality
from dflash_runtime.errors import LossyConversion, UnsupportedError

PATH = Path("config.json")
MIXED = support.Shape(windows=(16, None))
NESTED: dict[str, Any] = {"mask_token_id": 31, "target_layer_ids": [0, 2]}
UNSTATED = {"is_causal": support.REMOVED}


def zlab(**changes: Any) -> dict[str, Any]:
    """April 2026: code beside the weights, block size at the top level, both rope keys, no causality."""
    auto_map = {"AutoModel": "dflash.DFlashDraftModel"}
    return support.native_config(**{"auto_map": auto_map, "max_window_layers": 2, **UNSTATED, **changes})


def zlab_010(**changes: Any) -> dict[str, Any]:
    """Release 0.1.0: block size nested, rope in transformers 5's form only."""
    nested = {**NESTED, "block_size": 4}
    rope = {"rope_theta": support.REMOVED, "rope_scaling": support.REMOVED}
    modern = {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}}
    config = support.native_config(MIXED, **{**UNSTATED, **rope, **modern, "block_size": support.REMOVED, **changes})
    return {**config, "dflash_config": nested}


def specforge(**changes: Any) -> dict[str, Any]:
    """Both rope spellings, no code, no causality; the newer ones name their attention."""
    rope = {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    config = support.native_config(MIXED, **{**UNSTATED, **rope, **changes})
    return {**config, "dflash_config": {**NESTED, "attention_mode": "gqa"}}


def model_optimizer(**changes: Any) -> dict[str, Any]:
    """All layers full, the window inside dflash_config, torch_dtype."""
    nested = {**NESTED, "use_swa": True, "swa_window_size": 16, "causal": False}
    removed = {"use_sliding_window": support.REMOVED, "dtype": support.REMOVED, **UNSTATED}
    config = support.native_config(**{**removed, "torch_dtype": "bfloat16", "sliding_window": 16, **changes})
    return {**config, "dflash_config": nested}


def automodel(**nested: Any) -> dict[str, Any]:
    """Its own architecture, block size in both places."""
    config = support.native_config(architectures=["Qwen3DFlashDraftModel"])
    return {**config, "dflash_config": {**NESTED, "block_size": 4, **nested}}


def mlx(**changes: Any) -> dict[str, Any]:
    """Everything at the top level."""
    return support.native_config(
        **{"dflash_config": support.REMOVED, "mask_token_id": 31, "target_layer_ids": [0, 2], **changes}
    )


def read(config: dict[str, Any]) -> tuple[Detection, Reading]:
    found = detect_from(config, frozenset({"fc.weight"}), PATH)
    return found, found.format.read_config(config, PATH)


@pytest.mark.parametrize(
    ("config", "name", "evidence"),
    [
        (zlab(), "native", "architectures names DFlashDraftModel"),
        (zlab_010(), "native", "architectures names DFlashDraftModel"),
        (specforge(), "specforge", "dflash_config.attention_mode is 'gqa'"),
        (model_optimizer(), "model-optimizer", "dflash_config.use_swa is True"),
        (automodel(), "automodel", "architectures names Qwen3DFlashDraftModel"),
        (mlx(), "mlx", "block_size, mask_token_id, target_layer_ids at the top level, and no dflash_config"),
    ],
)
def test_the_verdict_says_what_decided(config: dict[str, Any], name: str, evidence: str) -> None:
    found, _ = read(config)
    assert (found.format.name, found.evidence) == (name, evidence)


@pytest.mark.parametrize(
    ("config", "windows", "causal"),
    [
        (zlab(), (None, None), (False, False)),
        (zlab_010(), (16, None), (True, False)),
        (specforge(), (16, None), (False, False)),
        (model_optimizer(), (16, 16), (False, False)),
        (automodel(), (None, None), (False, False)),
        (mlx(), (None, None), (False, False)),
    ],
    ids=["z-lab April", "z-lab 0.1.0", "SpecForge", "Model-Optimizer", "Automodel", "MLX"],
)
def test_each_is_read_as_it_was_trained(config: dict[str, Any], windows: Any, causal: Any) -> None:
    _, reading = read(config)
    found = reading.config
    assert (found.windows, found.causal) == (windows, causal)
    assert (found.block_size, found.mask_token_id, found.target_layer_ids) == (4, 31, (0, 2))


def test_an_exporters_default_is_said() -> None:
    _, reading = read(specforge())
    assert any("as this exporter trains them" in note for note in reading.notes)


def test_an_unmarked_specforge_export_is_read_as_native_with_a_note() -> None:
    config = specforge()
    del config["dflash_config"]["attention_mode"]
    found, reading = read(config)
    assert (found.format.name, reading.config.causal) == ("native", (True, False))
    assert any("--causality non-causal" in note for note in reading.notes)


def test_latent_attention_is_refused() -> None:
    config = specforge()
    config["dflash_config"]["attention_mode"] = "mla"
    with pytest.raises(UnsupportedError, match="attention_mode 'mla'"):
        read(config)


class TestJetSpec:
    """Automodel's JetSpec recipe trains causal layers and says so in one of two places."""

    def source(self, tmp_path: Path) -> Path:
        return support.write_checkpoint(tmp_path / "source", automodel(causal=True), support.body_arrays())

    def test_is_read_as_engines_do_with_a_note(self, tmp_path: Path) -> None:
        draft = open_draft(self.source(tmp_path))
        assert draft.config.causal == (False, False)
        assert any("contradict each other" in note for note in draft.reading.notes)

    def test_is_not_converted_until_the_user_decides(self, tmp_path: Path) -> None:
        outcome = support.invoke("convert", self.source(tmp_path), tmp_path / "out", "--to", "native")
        assert outcome.code == 5
        assert "is_causal and dflash_config.causal contradict" in outcome.err
        assert "--causality causal" in outcome.err

    @pytest.mark.parametrize(("choice", "is_causal"), [("causal", True), ("non-causal", False)])
    def test_the_choice_is_written_in_both_places(self, tmp_path: Path, choice: str, is_causal: bool) -> None:
        source = self.source(tmp_path)
        outcome = support.invoke("convert", source, tmp_path / "out", "--to", "native", "--causality", choice)
        assert outcome.code == 0, outcome.err
        written = open_draft(tmp_path / "out")
        assert written.config.causal == (is_causal, is_causal)
        assert written.checkpoint.config["is_causal"] is written.checkpoint.config["dflash_config"]["causal"]
        assert not written.reading.has_doubtful_causality


class TestOverride:
    @pytest.mark.parametrize(
        ("choice", "expected"),
        [("causal", (True, True)), ("non-causal", (False, False)), ("layer-types", (True, False))],
    )
    def test_every_choice(self, choice: Any, expected: Any) -> None:
        _, reading = read(specforge())
        assert override_causality(reading, choice).config.causal == expected

    def test_opening_takes_it(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "draft", MIXED, is_causal=support.REMOVED)
        assert open_draft(path).config.causal == (True, False)
        draft = open_draft(path, causality="non-causal")
        assert draft.config.causal == (False, False)
        assert draft.reading.notes == ("attention is read as non-causal, by --causality",)

    def test_what_the_result_cannot_state_is_still_refused(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "draft")
        outcome = support.invoke(
            "convert", path, tmp_path / "out", "--to", "speculators", "--verifier", "a/b", "--causality", "causal"
        )
        assert outcome.code == LossyConversion.exit_code
        assert "full layers are never causal" in outcome.err


@pytest.mark.parametrize("make", [zlab, zlab_010, specforge, model_optimizer, automodel, mlx])
def test_each_becomes_plain_native_that_reads_the_same(make: Any, tmp_path: Path) -> None:
    source = support.write_checkpoint(tmp_path / "source", make(), support.body_arrays())
    support.convert(source, tmp_path / "out", "native")
    before, after = open_draft(source), open_draft(tmp_path / "out")
    assert after.config == before.config
    assert after.detection.format.name in ("native", "specforge")
    written = after.checkpoint.config
    assert written["block_size"] == written["dflash_config"]["block_size"]
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
    assert written["layer_types"].count("sliding_attention") == sum(item is not None for item in after.config.windows)
