"""The speculators dialect: what an engine sees, releases 0.5 to 0.9, causality, and what cannot be written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.formats.speculators import SPECULATORS, register_speculator, update_dflash
from dflash_cli.formats.speculators_updaters import find_updater
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import InvalidConfig, LossyConversion, UnknownFormat, UnsupportedError, UsageError
from dflash_testing import checkpoints as support
from dflash_testing.dialects import named_dialect

PATH = Path("config.json")
DIALECT = named_dialect("speculators")


def read(config: dict[str, Any]) -> DraftConfig:
    return DIALECT.read_config(config, PATH).config


def seen(body: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """What an engine sees of a config with these keys."""
    result = dict(body or {})
    update_dflash({"aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 7, **config}, result)
    return result


class TestUpdater:
    def test_numbers(self) -> None:
        found = seen(draft_vocab_size=32000)
        assert found == {
            "architectures": ["DFlashDraftModel"],
            "draft_vocab_size": 32000,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "dflash_config": {
                "mask_token_id": 7,
                "target_layer_ids": [1, 3, 4],
                "sample_from_anchor": False,
                "causal": False,
            },
        }

    def test_published_numbers(self) -> None:
        found = seen(aux_hidden_state_layer_ids=[2, 10, 18, 26, 34], mask_token_id=151669)
        assert found["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]

    def test_target_width_only_if_given(self) -> None:
        assert "target_hidden_size" not in seen(target_hidden_size=None)
        assert seen(target_hidden_size=64)["target_hidden_size"] == 64

    def test_it_fills_the_config_it_is_given(self) -> None:
        assert seen({"hidden_size": 16, "architectures": ["Other"]})["hidden_size"] == 16

    @pytest.mark.parametrize("flag", [True, False, None])
    def test_full_layers_are_never_causal(self, flag: bool | None) -> None:
        keys = {} if flag is None else {"sliding_window_non_causal": flag}
        assert seen({"layer_types": ["full_attention"] * 2}, **keys)["dflash_config"]["causal"] is False

    @pytest.mark.parametrize(("flag", "expected"), [(True, False), (False, True), (None, False)])
    def test_sliding_layers_follow_the_flag(self, flag: bool | None, expected: bool) -> None:
        keys = {} if flag is None else {"sliding_window_non_causal": flag}
        assert seen({"layer_types": ["sliding_attention"] * 2}, **keys)["dflash_config"]["causal"] is expected

    def test_layers_that_differ_have_no_common_causality(self) -> None:
        mixed = {"layer_types": ["sliding_attention", "full_attention"]}
        assert "causal" not in seen(mixed, sliding_window_non_causal=False)["dflash_config"]
        assert seen(mixed, sliding_window_non_causal=True)["dflash_config"]["causal"] is False

    def test_the_anchor_is_passed_on(self) -> None:
        assert seen(sample_from_anchor=True)["dflash_config"]["sample_from_anchor"] is True

    def test_the_embedding_cannot_be_tapped(self) -> None:
        with pytest.raises(UnsupportedError, match="0 taps the embedding"):
            seen(aux_hidden_state_layer_ids=[0, 2])

    @pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "mask_token_id"])
    def test_null_is_an_error(self, key: str) -> None:
        with pytest.raises(InvalidConfig, match=f"{key}: found None"):
            seen(**{key: None})

    def test_registry(self) -> None:
        assert SPECULATORS["dflash"] is update_dflash
        with pytest.raises(ValueError, match="registered twice"):
            register_speculator("dflash")(update_dflash)

    @pytest.mark.parametrize("name", ["medusa", None, ["dflash"]])
    def test_other_types_are_refused(self, name: object) -> None:
        with pytest.raises(UnknownFormat, match="is not DFlash"):
            find_updater(name)


def release_05(shape: support.Shape) -> tuple[dict[str, Any], support.Arrays]:
    """Release 0.5: embedding, head and identity maps in the file, no flag, a training setting."""
    config = support.speculators_config(
        shape,
        speculators_version="0.5.0",
        sliding_window_non_causal=support.REMOVED,
        sample_from_anchor=support.REMOVED,
        max_anchors=256,
    )
    target = support.target_arrays(shape)
    maps = {"d2t": np.zeros(shape.vocab, dtype=np.int64), "t2d": np.ones(shape.vocab, dtype=np.bool_)}
    copies = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    return config, {**support.body_arrays(shape), **maps, **copies}


class TestReading:
    def test_canonical_fields(self) -> None:
        config = read(support.speculators_config())
        assert config.target_layer_ids == (0, 2)
        assert config.verifier is not None
        assert config.verifier.name_or_path == "acme/target"
        assert config.causal == (False, False)

    def test_it_is_the_native_draft(self) -> None:
        native = named_dialect("native").read_config(support.native_config(), PATH).config
        spec = read(support.speculators_config(num_target_layers=4))
        assert replace(spec, verifier=None) == native

    def test_release_05(self, tmp_path: Path) -> None:
        config, arrays = release_05(support.SMALL)
        draft = open_draft(support.write_checkpoint(tmp_path / "draft", config, arrays))
        assert draft.config.is_causal is False
        assert set(draft.select_tensors().skip) == {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
        assert draft.parsed.carried["speculators.max_anchors"] == 256

    def test_release_06_with_sliding_layers(self) -> None:
        shape = support.Shape(windows=(16, None))
        assert read(support.speculators_config(shape, sliding_window_non_causal=False)).causal == (True, False)
        assert read(support.speculators_config(shape, sliding_window_non_causal=True)).causal == (False, False)
        absent = support.speculators_config(shape, sliding_window_non_causal=support.REMOVED)
        assert read(absent).causal == (False, False)

    def test_release_09_reduced(self, tmp_path: Path) -> None:
        draft = open_draft(support.make_speculators(tmp_path / "draft", support.REDUCED))
        assert draft.config.has_reduced_vocab
        plan = draft.select_tensors()
        assert {"lm_head.weight", "d2t"} <= set(plan.load)
        assert plan.skip == ("t2d",)

    def test_anchor_sampling_is_not_served(self) -> None:
        parsed = DIALECT.read_config(support.speculators_config(sample_from_anchor=True), PATH)
        assert "sample_from_anchor" in parsed.unserved

    def test_type_is_required(self) -> None:
        with pytest.raises(InvalidConfig, match="speculators_model_type: missing"):
            read(support.speculators_config(speculators_model_type=support.REMOVED))

    def test_a_leaked_is_causal_is_noted_and_not_carried(self) -> None:
        config = support.speculators_config()
        config["transformer_layer_config"]["is_causal"] = True
        parsed = DIALECT.read_config(config, PATH)
        assert parsed.config.is_causal is False
        assert "is_causal" not in parsed.carried
        assert any("is_causal" in note for note in parsed.notes)

    @pytest.mark.parametrize("key", ["draft_vocab_size", "block_size", "transformer_layer_config"])
    def test_required_keys(self, key: str) -> None:
        with pytest.raises(InvalidConfig, match=f"{key}: missing"):
            read(support.speculators_config(**{key: support.REMOVED}))


class TestWriting:
    def write(self, **changes: Any) -> dict[str, Any]:
        return DIALECT.write_config(replace(read(support.speculators_config()), **changes), {})

    def test_every_required_key(self) -> None:
        written = self.write()
        assert "model_type" not in written
        assert written["aux_hidden_state_layer_ids"] == [1, 3]
        assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
        assert written["speculators_config"]["verifier"] == {
            "name_or_path": "acme/target",
            "architectures": ["Qwen3ForCausalLM"],
        }

    @pytest.mark.parametrize(
        ("windows", "causal", "flag"),
        [
            ((None, None), (False, False), True),
            ((16, 16), (False, False), True),
            ((16, 16), (True, True), False),
            ((16, None), (True, False), False),
            ((16, None), (False, False), True),
        ],
    )
    def test_causality(self, windows: Any, causal: Any, flag: bool) -> None:
        written = self.write(windows=windows, causal=causal)
        assert written["sliding_window_non_causal"] is flag
        assert read(written).causal == causal

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"causal": (True, True)}, "full layers are never causal"),
            ({"windows": (16, 16), "causal": (True, False)}, "one flag"),
            ({"windows": (16, 32)}, "windows"),
            ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
            ({"output_multiplier": 2.0, "final_logit_softcapping": 5.0}, "output_multiplier, final_logit_softcapping"),
        ],
    )
    def test_what_it_cannot_state(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(LossyConversion, match=message):
            self.write(**changes)

    def test_the_target_is_named(self) -> None:
        with pytest.raises(UsageError, match="verifier"):
            self.write(verifier=None)
