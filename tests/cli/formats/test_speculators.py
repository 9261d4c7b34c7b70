"""The speculators dialect: the config that an engine sees, releases 0.5 to 0.9, causality, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.formats.speculators import SPECULATORS, register_speculator, update_dflash
from dflash_cli.formats.speculators_updaters import find_updater
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion, UnknownFormat, UnsupportedError, UsageError
from dflash_testing import checkpoints as support
from dflash_testing.dialects import named_dialect
from dflash_testing.refusals import refuses

PATH = Path("config.json")
DIALECT = named_dialect("speculators")


def read(config: dict[str, Any]) -> DraftConfig:
    return DIALECT.read_config(config, PATH).config


def seen(body: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """The config that an engine sees for these keys."""
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
        with refuses(UnsupportedError, "embedding-tapped", field="aux_hidden_state_layer_ids", found=[0, 2]):
            seen(aux_hidden_state_layer_ids=[0, 2])

    @pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "mask_token_id"])
    def test_null_is_an_error(self, key: str) -> None:
        with refuses(InvalidConfig, field=key, found=None):
            seen(**{key: None})

    def test_registry(self) -> None:
        assert SPECULATORS["dflash"] is update_dflash
        with pytest.raises(ValueError, match="dflash"):
            register_speculator("dflash")(update_dflash)

    @pytest.mark.parametrize("name", ["medusa", None, ["dflash"]])
    def test_other_types_are_refused(self, name: object) -> None:
        with refuses(UnknownFormat, "other-speculators-type", field="speculators_model_type", found=name):
            find_updater(name)


def release_05(shape: support.Shape) -> tuple[dict[str, Any], support.Arrays]:
    """Release 0.5: an embedding, a head and identity maps in the file, no flag, and a training setting."""
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
        with refuses(InvalidConfig, field="speculators_model_type", found=MISSING):
            read(support.speculators_config(speculators_model_type=support.REMOVED))

    def test_a_stray_is_causal_is_noted_and_not_carried(self) -> None:
        config = support.speculators_config()
        config["transformer_layer_config"]["is_causal"] = True
        parsed = DIALECT.read_config(config, PATH)
        assert parsed.config.is_causal is False
        assert "is_causal" not in parsed.carried
        assert [note.id for note in parsed.notes] == ["causality-contradicts"]

    @pytest.mark.parametrize("key", ["draft_vocab_size", "block_size", "transformer_layer_config"])
    def test_required_keys(self, key: str) -> None:
        with refuses(InvalidConfig, field=key, found=MISSING):
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
        ("changes", "id", "field"),
        [
            ({"causal": (True, True)}, "causal-full-layers", "causal"),
            ({"windows": (16, 16), "causal": (True, False)}, "several-causalities", "causal"),
            ({"windows": (16, 32)}, "several-windows", "sliding_window"),
            ({"input_embedding_scale": 2.0}, "scale-ignored", "input_embedding_scale"),
            ({"output_multiplier": 2.0, "final_logit_softcapping": 5.0}, "scale-ignored", "output_multiplier"),
            ({"has_sinks": True}, "cannot-state", "has_sinks"),
        ],
    )
    def test_a_draft_it_cannot_state_is_refused(self, changes: dict[str, Any], id: str, field: str) -> None:
        with refuses(LossyConversion, id, field=field):
            self.write(**changes)

    def test_the_target_is_named(self) -> None:
        with refuses(UsageError, "verifier-unknown", field="verifier"):
            self.write(verifier=None)


@pytest.mark.parametrize(
    ("proposals", "named"),
    [
        ([{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 2}], "verifier_accept_k 2"),
        ([{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.5}], "accept_tolerance 0.5"),
        ([{"proposal_type": "greedy", "speculative_tokens": 3}] * 2, "1 further proposal_methods"),
        ([{"proposal_type": "greedy", "speculative_tokens": 3}], ""),
    ],
)
def test_ignored_settings_of_proposals_are_named(proposals: list[dict[str, Any]], named: str) -> None:
    config = support.speculators_config()
    config["speculators_config"]["proposal_methods"] = proposals
    assert "draft-tokens-differ" not in [note.id for note in DIALECT.read_config(config, PATH).notes]
    other = {**config, "block_size": config["block_size"] + 1}
    assert "draft-tokens-differ" in [note.id for note in DIALECT.read_config(other, PATH).notes]
    notes = DIALECT.read_config(config, PATH).notes
    found = [note for note in notes if note.id == "proposal-settings-ignored"]
    assert bool(found) == bool(named)
    assert all(named in note for note in found)
