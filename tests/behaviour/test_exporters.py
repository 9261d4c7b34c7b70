"""The exporter of a native checkpoint: how it is recognised, and how its config is read.

The values are from published configs and the exporters' sources. The sizes are small.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import Overrides, open_draft, override_causality
from dflash_cli.formats.detection import Detection, detect_from
from dflash_cli.formats.dialect import ParsedConfig
from dflash_cli.formats.unserved import refuse_unserved
from dflash_runtime.errors import LossyConversion, UnsupportedError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.dialects import MIXED, automodel, mlx, model_optimizer, specforge, zlab, zlab_010
from dflash_testing.refusals import refuses

PATH = Path("config.json")


def read(config: dict[str, Any]) -> tuple[Detection, ParsedConfig]:
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
    _, parsed = read(config)
    found = parsed.config
    assert (found.windows, found.causal) == (windows, causal)
    assert (found.block_size, found.mask_token_id, found.target_layer_ids) == (4, 31, (0, 2))


def published(layers: int, depth: int, taps: list[int], mask: int, **changes: Any) -> dict[str, Any]:
    """A config with the keys of a published config that decide how it is read."""
    config = support.native_config(
        auto_map={"AutoModel": "dflash.DFlashDraftModel"}, num_hidden_layers=layers, num_target_layers=depth,
        block_size=16, vocab_size=248320, is_causal=support.REMOVED, layer_types=["full_attention"] * layers,
        dflash_config={"mask_token_id": mask, "target_layer_ids": taps},
    )  # fmt: skip
    return {**config, **changes}


SWA = ["sliding_attention"] * 4 + ["full_attention"]
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int | None, ...], tuple[bool, ...]]] = {
    "Qwen3-8B": (published(5, 36, [1, 9, 17, 25, 33], 151669), (None,) * 5, (False,) * 5),
    "Qwen3.5-4B, tied": (
        published(5, 32, [1, 8, 15, 22, 29], 248070, tie_word_embeddings=True, rope_theta=10000000),
        (None,) * 5,
        (False,) * 5,
    ),
    "Qwen3.6-27B": (
        published(
            5, 64, [1, 16, 31, 46, 61], 248070, layer_types=SWA, sliding_window=2048, use_sliding_window=True
        ),
        (2048,) * 4 + (None,),
        (True,) * 4 + (False,),
    ),
    "Qwen3.5-35B, more layers than taps": (
        published(8, 40, [1, 10, 19, 28, 37], 248070),
        (None,) * 8,
        (False,) * 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    config, windows, causal = PUBLISHED[name]
    found, parsed = read(config)
    assert found.format.name == "native"
    assert (parsed.config.windows, parsed.config.causal) == (windows, causal)
    assert list(parsed.config.target_layer_ids) == config["dflash_config"]["target_layer_ids"]
    assert parsed.config.num_draft_tokens == 15


def test_an_exporters_default_is_said() -> None:
    _, parsed = read(specforge())
    assert [note.id for note in parsed.notes] == ["causality-not-stated"]
    assert parsed.config.causal == (False, False)


def test_an_unmarked_specforge_export_is_read_as_native_with_a_note() -> None:
    config = specforge()
    del config["dflash_config"]["attention_mode"]
    found, parsed = read(config)
    assert (found.format.name, parsed.config.causal) == ("native", (True, False))
    assert [note.id for note in parsed.notes] == ["causality-not-stated"]


@pytest.mark.parametrize(("key", "value"), [("attention_mode", "mla"), ("attention_modes", ["gqa", "mla"])])
def test_latent_attention_is_refused(key: str, value: Any) -> None:
    config = specforge()
    config["dflash_config"][key] = value
    _, parsed = read(config)
    with refuses(UnsupportedError, "unserved-setting", field=key):
        refuse_unserved(parsed.unserved)


class TestJetSpec:
    """Automodel's JetSpec recipe trains causal layers, and one of its two causality keys says so."""

    def source(self, tmp_path: Path) -> Path:
        return support.write_checkpoint(tmp_path / "source", automodel(causal=True), support.body_arrays())

    def test_is_read_as_engines_do_with_a_note(self, tmp_path: Path) -> None:
        draft = open_draft(self.source(tmp_path))
        assert draft.config.causal == (False, False)
        assert [note.id for note in draft.parsed.notes] == ["causality-contradicts"]

    @pytest.mark.parametrize("junk", [{}, [], "no"])
    def test_a_second_key_of_another_type_is_a_contradiction(self, junk: object, tmp_path: Path) -> None:
        config = automodel(causal=True) | {"is_causal": False}
        config["dflash_config"]["causal"] = junk
        draft = open_draft(support.write_checkpoint(tmp_path / "source", config, support.body_arrays()))
        assert [note.id for note in draft.parsed.notes] == ["causality-contradicts"]

    def test_causal_full_layers_are_noted(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "draft", is_causal=True)
        assert [note.id for note in open_draft(path).parsed.notes] == ["causality-of-full-layers"]
        sliding = support.make_native(tmp_path / "sliding", support.Shape(windows=(16, 16)), is_causal=True)
        assert open_draft(sliding).parsed.notes == ()

    def test_is_not_converted_until_the_user_decides(self, tmp_path: Path) -> None:
        outcome = invoke("convert", self.source(tmp_path), tmp_path / "out", "--to", "native")
        assert outcome.code == 5
        assert "dflash_config.causal" in outcome.err
        assert "--causality causal" in outcome.err

    @pytest.mark.parametrize(("choice", "is_causal"), [("causal", True), ("non-causal", False)])
    def test_the_choice_is_written_in_both_places(self, tmp_path: Path, choice: str, is_causal: bool) -> None:
        source = self.source(tmp_path)
        outcome = invoke("convert", source, tmp_path / "out", "--to", "native", "--causality", choice)
        assert outcome.code == 0, outcome.err
        written = open_draft(tmp_path / "out")
        assert written.config.causal == (is_causal, is_causal)
        assert written.checkpoint.config["is_causal"] is written.checkpoint.config["dflash_config"]["causal"]
        assert not written.parsed.has_doubtful_causality


class TestOverride:
    @pytest.mark.parametrize(
        ("choice", "expected"),
        [("causal", (True, True)), ("non-causal", (False, False)), ("layer-types", (True, False))],
    )
    def test_every_choice(self, choice: Any, expected: Any) -> None:
        _, parsed = read(specforge())
        assert override_causality(parsed, choice).config.causal == expected

    def test_opening_takes_it(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "draft", MIXED, is_causal=support.REMOVED)
        assert open_draft(path).config.causal == (True, False)
        draft = open_draft(path, overrides=Overrides("non-causal"))
        assert draft.config.causal == (False, False)
        assert [note.id for note in draft.parsed.notes] == ["causality-given"]

    def test_no_key_of_the_exporter_overrules_the_choice(self, tmp_path: Path) -> None:
        """Mixed layers leave causality unstated, so the result must not look like an export of SpecForge."""
        source = support.write_checkpoint(tmp_path / "source", specforge(), support.body_arrays())
        outcome = invoke("convert", source, tmp_path / "out", "--to", "native", "--causality", "layer-types")
        assert outcome.code == 0, outcome.err
        assert open_draft(tmp_path / "out").config.causal == (True, False)

    def test_what_the_result_cannot_state_is_still_refused(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "draft")
        outcome = invoke(
            "convert", path, tmp_path / "out", "--to", "speculators", "--target-name", "a/b", "--causality", "causal"
        )
        assert outcome.code == LossyConversion.exit_code
        assert "speculators" in outcome.err


@pytest.mark.parametrize("make", [zlab, zlab_010, specforge, model_optimizer, automodel, mlx])
def test_each_becomes_plain_native_that_reads_the_same(make: Any, tmp_path: Path) -> None:
    source = support.write_checkpoint(tmp_path / "source", make(), support.body_arrays())
    support.convert(source, tmp_path / "out", "native")
    before, after = open_draft(source), open_draft(tmp_path / "out")
    assert replace(after.config, dtype=before.config.dtype) == before.config
    assert after.detection.format.name == "native"
    written = after.checkpoint.config
    assert written["block_size"] == written["dflash_config"]["block_size"]
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
    assert written["layer_types"].count("sliding_attention") == sum(item is not None for item in after.config.windows)
