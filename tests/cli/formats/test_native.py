"""The native dialect: keys at both levels, causality, and configs that cannot be read or written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.formats.detection import detect_from
from dflash_cli.formats.dialect import all_formats
from dflash_cli.formats.fields import guess_taps
from dflash_cli.formats.unserved import refuse_unserved
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion, UnknownFormat, UnsupportedError, UsageError
from dflash_testing import checkpoints as support
from dflash_testing import dialects
from dflash_testing.dialects import named_dialect
from dflash_testing.families import FAMILIES
from dflash_testing.refusals import refuses

PATH = Path("config.json")
NATIVE = named_dialect("native")


def read(config: dict[str, Any]) -> DraftConfig:
    return NATIVE.read_config(config, PATH).config


def nested(**keys: Any) -> dict[str, Any]:
    return {"mask_token_id": 31, "target_layer_ids": [0, 2], **keys}


class TestReading:
    def test_canonical_fields(self) -> None:
        config = read(support.native_config())
        assert config.target_layer_ids == (0, 2)
        assert (config.block_size, config.num_draft_tokens, config.mask_token_id) == (4, 3, 31)
        assert config.causal == (False, False)
        assert config.windows == (None, None)
        assert config.rope.theta == 1000000.0
        assert (config.vocab_size, config.draft_vocab_size) == (32, 32)

    @pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers"])
    @pytest.mark.parametrize("place", ["top", "nested", "both"])
    def test_a_key_is_read_at_either_level(self, key: str, place: str) -> None:
        values = {"block_size": 4, "mask_token_id": 31, "target_layer_ids": [0, 2], "num_target_layers": 4}
        config = support.native_config()
        config.pop(key, None)
        config["dflash_config"].pop(key, None)
        if place != "nested":
            config[key] = values[key]
        if place != "top":
            config["dflash_config"][key] = values[key]
        assert read(config) == read(support.native_config())

    @pytest.mark.parametrize(("key", "other"), [("block_size", 8), ("mask_token_id", 30), ("target_layer_ids", [0, 3])])
    def test_a_contradiction_names_both_keys(self, key: str, other: Any) -> None:
        values: dict[str, Any] = {"block_size": 4, "mask_token_id": 31, "target_layer_ids": [0, 2]}
        config = support.native_config(**{key: values[key]})
        config["dflash_config"][key] = other
        with refuses(InvalidConfig, field=key, found={f"dflash_config.{key}": other, key: values[key]}):
            read(config)

    def test_both_tap_lists_must_agree(self) -> None:
        assert read(support.native_config(eagle_aux_hidden_state_layer_ids=[1, 3])).target_layer_ids == (0, 2)
        with refuses(InvalidConfig, field="eagle_aux_hidden_state_layer_ids", found=[0, 2]):
            read(support.native_config(eagle_aux_hidden_state_layer_ids=[0, 2]))

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 5e6, "rope_scaling": None},
            {"rope_theta": support.REMOVED, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
            {"rope_theta": 5000000, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
        ],
    )
    def test_either_rope_spelling(self, rope: dict[str, Any]) -> None:
        assert read(support.native_config(**rope)).rope.theta == 5e6

    def test_rope_by_layer_type(self) -> None:
        """transformers 5 may state rope by layer type. All layer types must state the same rope."""
        full, sliding = {"rope_theta": 5e6, "rope_type": "default"}, {"rope_theta": 1e4, "rope_type": "default"}
        keys = {"rope_theta": support.REMOVED, "rope_scaling": support.REMOVED}
        same = {"full_attention": full, "sliding_attention": dict(full)}
        assert read(support.native_config(**keys, rope_parameters=same)).rope.theta == 5e6
        with refuses(InvalidConfig, field="rope_parameters"):
            read(support.native_config(**keys, rope_parameters={**same, "sliding_attention": sliding}))

    def test_yarn_keeps_its_parameters(self) -> None:
        scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
        rope = read(support.native_config(rope_scaling=scaling)).rope
        assert rope.kind == "yarn"
        assert rope.params == {"factor": 64.0, "original_max_position_embeddings": 4096}

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_either_dtype_spelling(self, key: str) -> None:
        config = support.native_config(dtype=support.REMOVED) | {key: "bfloat16"}
        assert read(config).dtype == "bfloat16"

    def test_scales_from_either_home(self) -> None:
        config = support.native_config(output_multiplier=0.2)
        config["dflash_config"] |= {"input_embedding_scale": 2.0, "final_logit_softcapping": 20}
        found = read(config)
        assert (found.output_multiplier, found.input_embedding_scale, found.final_logit_softcapping) == (0.2, 2.0, 20.0)

    def test_missing_taps_shows_what_engines_would_guess(self) -> None:
        config = support.native_config(dflash_config={"mask_token_id": 31}, num_target_layers=36)
        with refuses(InvalidConfig, "no-tapped-layers", field="target_layer_ids", found=MISSING) as caught:
            read(config)
        assert "[1, 33]" in caught.value.message

    @pytest.mark.parametrize(
        ("depth", "layers", "expected"),
        [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (24, 8, [1, 4, 7, 10, 12, 15, 18, 21])],
    )
    def test_the_guess(self, depth: int, layers: int, expected: list[int]) -> None:
        assert guess_taps(depth, layers) == expected

    def test_unknown_keys_are_carried(self) -> None:
        config = support.native_config(use_cache=True)
        config["dflash_config"]["mask_token"] = "<mask>"
        carried = NATIVE.read_config(config, PATH).carried
        assert carried == {"attention_dropout": 0.0, "use_cache": True, "dflash_config.mask_token": "<mask>"}

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("mask_token_id", None),
            ("mask_token_id", True),
            ("mask_token_id", 32),
            ("target_layer_ids", [0, 4]),
            ("target_layer_ids", []),
            ("target_layer_ids", "0,2"),
            ("block_size", 1),
        ],
    )
    def test_values_out_of_range(self, key: str, value: Any) -> None:
        config = support.native_config(block_size=support.REMOVED)
        config["dflash_config"] = nested(block_size=4) | {key: value}
        with refuses(InvalidConfig, field=key) as caught:
            read(config)
        found = caught.value.found
        assert (list(found) if isinstance(found, tuple) else found) == value

    @pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rms_norm_eps", "vocab_size", "rope_theta"])
    def test_missing_sizes(self, key: str) -> None:
        with refuses(InvalidConfig, field=key, found=MISSING):
            read(support.native_config(**{key: support.REMOVED}))

    @pytest.mark.parametrize(
        "changes",
        [
            {"dflash_config": nested(sample_from_anchor=True)},
            {"dflash_config": nested(attention_value_scale=0.6)},
            {"dflash_config": nested(attention_mode="mla")},
            {"has_embed_tokens": True},
            {"dflash_config": nested(projector_type="hydra")},
            {"add_swa_attention_sink_bias": True},
            {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default", "rope_dim": 4}},
        ],
    )
    def test_unserved_settings(self, changes: dict[str, Any]) -> None:
        parsed = NATIVE.read_config(support.native_config(**changes), PATH)
        with refuses(UnsupportedError, "unserved-setting"):
            refuse_unserved(parsed.unserved)

    def test_an_unserved_setting_is_named_before_another_fault(self) -> None:
        with refuses(UnsupportedError, "unserved-setting", field="has_embed_tokens"):
            read(support.native_config(has_embed_tokens=True, block_size=support.REMOVED))

    def test_unserved_settings_are_named_in_one_line(self) -> None:
        scaled = nested(attention_value_scale=0.612)
        config = support.native_config(dflash_config=scaled, has_embed_tokens=True, add_swa_attention_sink_bias=True)
        with refuses(UnsupportedError, "unserved-setting") as caught:
            refuse_unserved(NATIVE.read_config(config, PATH).unserved)
        found = caught.value.message
        keys = ("add_swa_attention_sink_bias", "attention_value_scale", "has_embed_tokens")
        assert [key in found for key in keys] == [True] * 3

    def test_attention_sinks_are_read_inside_dflash_config(self) -> None:
        assert read(support.native_config(dflash_config=nested(attention_sink_bias=True))).has_sinks
        elsewhere = NATIVE.read_config(support.native_config(attention_sink_bias=True), PATH)
        assert "attention_sink_bias" in elsewhere.unserved
        with refuses(InvalidConfig, field="dflash_config.attention_sink_bias", found=1):
            read(support.native_config(dflash_config=nested(attention_sink_bias=1)))

    def test_settings_that_ask_for_nothing_are_read(self) -> None:
        """Trainers copy the last three keys from the target, and the tensors show the kind of draft."""
        nothing = nested(attention_sink_bias=False, attention_value_scale=1.0, projector_type="dflash")
        config = support.native_config(
            dflash_config=nothing, has_lm_head=False, rope_dim=8, use_qk_norm=False, num_experts=128, v_head_dim=4
        )
        assert read(config) == read(support.native_config())

    def test_partial_rope_is_said_to_be_the_targets(self) -> None:
        (note,) = NATIVE.read_config(support.native_config(partial_rotary_factor=0.25), PATH).notes
        assert note.id == "partial-rope"
        assert "0.25" in note


MIXED = support.Shape(windows=(16, None))


class TestCausality:
    @pytest.mark.parametrize(
        ("top", "inner", "windows", "expected"),
        [
            (support.REMOVED, None, (None, None), (False, False)),
            (support.REMOVED, None, (16, None), (True, False)),
            (support.REMOVED, None, (16, 16), (True, True)),
            (False, None, (16, None), (False, False)),
            (True, None, (None, None), (True, True)),
            (support.REMOVED, False, (16, 16), (False, False)),
            (support.REMOVED, True, (None, None), (True, True)),
            (False, True, (None, None), (False, False)),
        ],
    )
    def test_order(self, top: Any, inner: bool | None, windows: tuple[int | None, ...], expected: Any) -> None:
        config = support.native_config(support.Shape(windows=windows), is_causal=top)
        if inner is not None:
            config["dflash_config"]["causal"] = inner
        assert read(config).causal == expected

    def test_an_unstated_causality_of_a_sliding_layer_is_noted(self) -> None:
        parsed = NATIVE.read_config(support.native_config(MIXED, is_causal=support.REMOVED), PATH)
        assert [note.id for note in parsed.notes] == ["causality-not-stated"]

    def test_contradiction_is_noted(self) -> None:
        parsed = NATIVE.read_config(support.native_config(dflash_config=nested(causal=True)), PATH)
        assert [note.id for note in parsed.notes] == ["causality-contradicts"]

    def test_use_swa_puts_a_window_on_every_layer(self) -> None:
        config = support.native_config(dflash_config=nested(use_swa=True, swa_window_size=16, causal=False))
        assert read(config).windows == (16, 16)

    def test_a_window_from_use_swa_makes_no_layer_causal(self) -> None:
        """In vLLM 0.33, only a sliding layer of `layer_types` is causal by default."""
        config = support.native_config(
            dflash_config=nested(use_swa=True, swa_window_size=16), is_causal=support.REMOVED
        )
        assert (read(config).windows, read(config).causal) == ((16, 16), (False, False))

    def test_two_windows_contradict(self) -> None:
        config = support.native_config(MIXED, dflash_config=nested(use_swa=True, swa_window_size=8))
        with refuses(InvalidConfig, field="dflash_config.swa_window_size", found=8):
            read(config)

    def test_a_window_that_is_switched_off_is_an_error(self) -> None:
        with refuses(InvalidConfig, field="use_sliding_window"):
            read(support.native_config(MIXED, use_sliding_window=False))


class TestWriting:
    def test_keys_are_written_at_both_levels(self) -> None:
        written = NATIVE.write_config(read(support.native_config()), {})
        assert written["block_size"] == written["dflash_config"]["block_size"] == 4
        assert written["is_causal"] is False
        assert written["dflash_config"]["causal"] is False
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1000000
        assert written["rope_scaling"] is None
        assert written["tie_word_embeddings"] is False

    def test_yarn_is_written_in_both_spellings(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
        config = read(support.native_config(rope_scaling=scaling))
        written = NATIVE.write_config(config, {})
        assert written["rope_scaling"] == scaling
        assert written["rope_parameters"] == {"rope_theta": 1000000, **scaling}
        assert read(written) == config

    def test_mixed_layers_leave_causality_out(self) -> None:
        written = NATIVE.write_config(read(support.native_config(MIXED, is_causal=support.REMOVED)), {})
        assert "is_causal" not in written
        assert "causal" not in written["dflash_config"]
        assert written["layer_types"] == ["sliding_attention", "full_attention"]
        assert written["use_sliding_window"] is True

    @pytest.mark.parametrize(
        ("changes", "id", "found"),
        [
            ({"causal": (False, True), "windows": (16, None)}, "several-causalities", [False, True]),
            ({"windows": (16, 32)}, "several-windows", [16, 32]),
            ({"draft_vocab_size": 12}, "reduced-vocabulary", 12),
            ({"target_hidden_size": 24}, "other-width", 24),
        ],
    )
    def test_a_draft_it_cannot_state_is_refused(self, changes: dict[str, Any], id: str, found: Any) -> None:
        with refuses(LossyConversion, id, found=found):
            NATIVE.write_config(replace(read(support.native_config()), **changes), {})

    def test_depth_is_required(self) -> None:
        config = replace(read(support.native_config()), num_target_layers=None)
        with refuses(UsageError, "target-depth-unknown", field="num_target_layers"):
            NATIVE.write_config(config, {})


class TestDetection:
    def test_native(self) -> None:
        assert detect_from(support.native_config(), frozenset(), PATH).format.name == "native"

    def test_by_its_object_alone(self) -> None:
        config = support.native_config(architectures=["Something"])
        found = detect_from(config, frozenset(), PATH)
        assert (found.format.name, "dflash_config" in found.evidence) == ("native", True)

    def test_automodel(self) -> None:
        config = support.native_config(architectures=["Qwen3DFlashDraftModel"])
        assert detect_from(config, frozenset(), PATH).format.name == "automodel"

    def test_a_target_is_not_a_draft(self) -> None:
        with refuses(UnknownFormat, "not-a-draft", path=PATH):
            detect_from(support.target_config(), frozenset(), PATH)

    def test_relatives_are_asked_before_dflash(self) -> None:
        names = [item.name for item in all_formats()]
        assert names.index("domino") < names.index("speculators") < names.index("native")


@pytest.mark.parametrize("name", [item.name for item in all_formats() if item.writable])
def test_a_written_config_reads_back(name: str) -> None:
    """For every writable dialect, added ones included: reading a written config gives the same draft."""
    dialect = named_dialect(name)
    stated = FAMILIES[dialect.family]() if dialect.family in FAMILIES else support.native_config()
    source = detect_from(stated, frozenset(), PATH).format.read_config(stated, PATH).config
    config = replace(source, verifier=None) if "verifier" in dialect.unstated else dialects.with_verifier(source)
    written = json.loads(json.dumps(dialect.write_config(config, {})))
    parsed = dialect.read_config(written, PATH)
    assert parsed.config == config
    assert json.loads(json.dumps(dialect.write_config(parsed.config, parsed.carried))) == written


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dialect=st.sampled_from(["native", "speculators"]))
def test_junk_in_any_key_raises_an_error_for_the_user(data: st.DataObject, dialect: str) -> None:
    """For any value of any key, the reader returns a config or raises an error for the user."""
    from dflash_runtime.errors import DFlashError

    config = support.native_config() if dialect == "native" else support.speculators_config()
    inner = data.draw(st.sampled_from(["", *sorted(key for key, value in config.items() if isinstance(value, dict))]))
    container = config[inner] if inner else config
    container[data.draw(st.sampled_from(sorted(container)))] = data.draw(support.json_junk())
    try:
        found = detect_from(config, frozenset(), PATH)
        found.format.read_config(config, PATH)
    except DFlashError:
        pass


def test_opening_names_the_file(tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "draft", vocab_size=4)
    with refuses(InvalidConfig, field="mask_token_id", found=31, path=path / "config.json"):
        open_draft(path)
