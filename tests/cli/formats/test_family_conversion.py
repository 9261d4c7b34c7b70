"""Conversions of DFlash 2 and DSpark between their dialects, what is written, and vLLM's updaters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.formats.detection import detect_from
from dflash_cli.formats.dflash2 import update_dflash2
from dflash_cli.formats.dialect import Format, all_formats, get_writable
from dflash_cli.formats.dspark import update_dspark
from dflash_runtime.draft_config import DraftConfig, MarkovConfig, Verifier
from dflash_runtime.errors import LossyConversion
from dflash_testing import checkpoints as support
from dflash_testing.checkpoints import REDUCED, REMOVED, SMALL
from dflash_testing.command_line import invoke
from dflash_testing.dialects import named_dialect, read_parsed
from dflash_testing.families import (
    CONVOLVED,
    FAMILIES,
    MARKOV,
    dflash2_native,
    dflash2_speculators,
    dspark_native,
    dspark_speculators,
    write_draft,
)
from dflash_testing.refusals import refuses

PATH = Path("config.json")
NAMES = list(FAMILIES)
WORDS = ("native", "speculators", "vllm", "sglang")


def with_target(config: DraftConfig, dialect: Format) -> DraftConfig:
    named = None if "verifier" in dialect.unstated else Verifier(name_or_path="acme/target")
    return replace(config, verifier=named, num_target_layers=4)


def sparks() -> st.SearchStrategy[dict[str, Any]]:
    """Configs of DSpark drafts in each dialect."""
    own = st.fixed_dictionaries(
        {
            "markov_rank": st.integers(0, 5),
            "markov_head_type": st.sampled_from(["vanilla", "gated", "rnn"]),
            "enable_confidence_head": st.booleans(),
            "sample_from_anchor": st.booleans(),
        }
    )
    return st.builds(
        lambda make, keys, has_token: make(**keys, confidence_head_with_markov=has_token and keys["markov_rank"] > 0),
        st.sampled_from([dspark_native, dspark_speculators]), own, st.booleans(),
    )  # fmt: skip


def convolved() -> st.SearchStrategy[dict[str, Any]]:
    """Configs of DFlash 2 drafts in each dialect."""
    own = st.fixed_dictionaries(
        {
            "conv_kernel_size": st.integers(1, 4),
            "conv_group_size": st.sampled_from([1, 2, 8, 16]),
            "selector_rank": st.integers(1, 40),
            "selector_top_k": st.integers(1, 32),
        }
    )
    return st.builds(lambda make, keys: make(**keys), st.sampled_from([dflash2_native, dflash2_speculators]), own)


class TestConversion:
    @settings(max_examples=200, deadline=None)
    @given(config=st.one_of(sparks(), convolved()), word=st.sampled_from(["native", "speculators"]))
    def test_round_trips_through_either_dialect_are_lossless(self, config: dict[str, Any], word: str) -> None:
        source = read_parsed(config).config
        dialect = get_writable(word, source.family)
        stated = with_target(source, dialect)
        written = json.loads(json.dumps(dialect.write_config(stated, {})))
        assert detect_from(written, frozenset(), PATH).format.name == dialect.name
        parsed = dialect.read_config(written, PATH)
        assert (parsed.config, parsed.has_unknown_layout) == (stated, False)
        assert json.loads(json.dumps(dialect.write_config(parsed.config, parsed.carried))) == written

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("word", WORDS)
    def test_a_draft_is_converted_and_back_byte_by_byte(self, name: str, word: str, tmp_path: Path) -> None:
        source = write_draft(tmp_path / "source", FAMILIES[name]())
        target = support.make_target(tmp_path / "target")
        named = ("--target", target, "--target-name", "acme/target")
        there, back = tmp_path / "there", tmp_path / "back"
        for command in ((source, there, "--to", word), (there, back, "--to", name.partition("-")[2] or "native")):
            done = invoke("convert", *command, *named)
            assert done.code == 0, done.err
        first, last = open_draft(source), open_draft(back)
        assert replace(first.config, num_target_layers=4) == replace(last.config, num_target_layers=4)
        before, after = (load_file(path / "model.safetensors") for path in (source, back))
        assert {key: value.tobytes() for key, value in before.items()} == {
            key: value.tobytes() for key, value in after.items()
        }

    def test_a_reduced_vocabulary_of_dspark_is_kept(self, tmp_path: Path) -> None:
        target = support.make_target(tmp_path / "target")
        source = write_draft(tmp_path / "source", dspark_speculators(REDUCED), REDUCED)
        for to, code in (("vllm", 0), ("speculators", 0), ("native", 5), ("sglang", 5)):
            out = tmp_path / to
            done = invoke("convert", source, out, "--to", to, "--target", target)
            assert done.code == code, done.err
            if code == 0:
                assert open_draft(out).config.draft_vocab_size == 12

    @pytest.mark.parametrize("word", WORDS)
    def test_dflash2_refuses_a_reduced_vocabulary(self, word: str) -> None:
        config = replace(read_parsed(dflash2_native()).config, draft_vocab_size=12)
        dialect = get_writable(word, "dflash2")
        with refuses(LossyConversion, field="draft_vocab_size", found=12):
            dialect.write_config(with_target(config, dialect), {})

    @pytest.mark.parametrize(
        ("word", "family", "changes", "field"),
        [
            ("vllm", "dspark", {"markov": MarkovConfig(rank=3, head_type="gated")}, "markov_head_type"),
            ("vllm", "dspark", {"output_multiplier": 2.0}, "output_multiplier"),
            ("vllm", "dflash2", {"logit_scale": 2.0}, "logit_scale"),
            ("sglang", "dspark", {"markov": None}, "markov_rank"),
            ("sglang", "dspark", {"markov": MarkovConfig(rank=3, top_k=5)}, "dspark_draft_topk"),
            ("sglang", "dspark", {"output_multiplier": 2.0}, "output_multiplier"),
            ("sglang", "dflash2", {"input_embedding_scale": 2.0}, "input_embedding_scale"),
            ("speculators", "dflash2", {"output_multiplier": 2.0}, "output_multiplier"),
            ("speculators", "dspark", {"has_sinks": True}, "has_sinks"),
        ],
    )
    def test_a_dialect_refuses_settings_that_its_readers_ignore(
        self, word: str, family: str, changes: dict[str, Any], field: str
    ) -> None:
        dialect = get_writable(word, family)
        source = with_target(read_parsed(FAMILIES[family]()).config, dialect)
        dialect.write_config(source, {})
        with refuses(LossyConversion, field=field):
            dialect.write_config(replace(source, **changes), {})

    def test_sglang_refuses_a_state_that_starts_late(self) -> None:
        dialect = get_writable("sglang", "dspark")
        rnn = replace(read_parsed(dspark_native()).config, markov=MarkovConfig(rank=3, head_type="rnn"))
        dialect.write_config(with_target(rnn, dialect), {})
        with refuses(LossyConversion, "rnn-state", field="markov_head_type"):
            dialect.write_config(replace(with_target(rnn, dialect), sample_from_anchor=False), {})

    def test_vllm_applies_the_scales_of_dflash2(self) -> None:
        dialect = get_writable("vllm", "dflash2")
        scales: dict[str, Any] = {
            "input_embedding_scale": 2.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 20.0,
        }
        config = with_target(replace(read_parsed(dflash2_native()).config, **scales), dialect)
        assert dialect.write_config(config, {})["dflash_config"].items() >= scales.items()

    def test_lossy_drops_scales_alone(self, tmp_path: Path) -> None:
        source = write_draft(tmp_path / "source", dflash2_native(output_multiplier=0.5))
        target = support.make_target(tmp_path / "target")
        command = ("convert", source, tmp_path / "out", "--to", "speculators", "--target", target)
        assert invoke(*command).code == 5
        assert invoke(*command, "--allow-lossy").code == 0
        assert open_draft(tmp_path / "out").config.output_multiplier == 1

    @pytest.mark.parametrize("family", ["dflash2", "dspark"])
    def test_a_dialect_without_the_family_is_refused(self, family: str, tmp_path: Path) -> None:
        source = write_draft(tmp_path / "source", FAMILIES[family]())
        target = support.make_target(tmp_path / "target")
        done = invoke("convert", source, tmp_path / "out", "--to", "mlx", "--target", target)
        assert done.code == 5
        assert "native or sglang or speculators or vllm" in done.err

    def test_every_engine_dialect_of_dflash_has_one_for_each_family(self) -> None:
        for word in WORDS:
            assert {item.family for item in all_formats() if (item.word or item.name) == word} == {
                "dflash", "dflash2", "dspark",
            }  # fmt: skip


class TestWhatIsWritten:
    def test_every_reader_finds_its_keys_in_a_native_dspark_config(self) -> None:
        dialect = named_dialect("dspark")
        found = dialect.write_config(with_target(read_parsed(dspark_native()).config, dialect), {})
        assert found["architectures"] == ["Qwen3DSparkModel"]
        assert found.items() >= {**MARKOV, "dspark_bonus_anchor": False, "block_size": 4}.items()
        head = {key: value for key, value in MARKOV.items() if key != "sample_from_anchor"}
        assert found["dflash_config"].items() >= head.items()

    @pytest.mark.parametrize("name", ["dspark", "dspark-vllm", "dspark-sglang"])
    def test_a_layout_is_not_written_where_vllm_refuses_it(self, name: str) -> None:
        """vLLM 0.27 to 0.33 stop at `dflash_config.sample_from_anchor: true`."""
        dialect, config = named_dialect(name), dspark_native()
        config["dflash_config"] |= {"sample_from_anchor": config.pop("sample_from_anchor")}
        found = dialect.write_config(with_target(read_parsed(config).config, dialect), {})
        assert (found["sample_from_anchor"], found["dspark_bonus_anchor"]) == (True, False)
        assert not {"sample_from_anchor", "dspark_bonus_anchor"} & found["dflash_config"].keys()

    def test_speculators_names_its_kind_and_number(self) -> None:
        for layout, number in ((True, 4), (False, 3)):
            dialect = named_dialect("dspark-speculators")
            config = with_target(read_parsed(dspark_native(sample_from_anchor=layout)).config, dialect)
            found = dialect.write_config(config, {})
            assert (found["speculators_model_type"], found["sample_from_anchor"]) == ("dspark", layout)
            assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == number
        dialect = named_dialect("dflash2-speculators")
        found = dialect.write_config(with_target(read_parsed(dflash2_native()).config, dialect), {})
        assert found["speculators_model_type"] == "dflash2"
        assert found.items() >= CONVOLVED.items()


class TestUpdaters:
    def test_dflash2(self) -> None:
        seen: dict[str, Any] = {"layer_types": ["full_attention"]}
        update_dflash2(dflash2_speculators(), seen)
        assert seen["architectures"] == ["DFlash2DraftModel"]
        assert seen["dflash_config"].items() >= {**CONVOLVED, "target_layer_ids": [0, 2], "mask_token_id": 31}.items()

    @pytest.mark.parametrize("anchor", [True, False, REMOVED])
    def test_dspark(self, anchor: Any) -> None:
        """Names, values and defaults as in vLLM 0.33: a missing layout means fill-in."""
        seen: dict[str, Any] = {}
        update_dspark(dspark_speculators(sample_from_anchor=anchor, use_aux_hidden_state=True), seen)
        is_first = anchor is True
        assert seen == {
            "architectures": ["Qwen3DSparkModel"],
            "sample_from_anchor": is_first,
            "dspark_bonus_anchor": not is_first,
            "eagle_aux_hidden_state_layer_ids": [1, 3],
            "target_layer_ids": [0, 2],
            "draft_vocab_size": SMALL.draft_vocab,
            "mask_token_id": 31,
            "markov_rank": 3,
            "markov_head_type": "vanilla",
            "block_size": 4,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "use_aux_hidden_state": True,
        }

    def test_dspark_keeps_a_name_that_vllm_knows(self) -> None:
        seen: dict[str, Any] = {}
        update_dspark(dspark_speculators(architectures=["Qwen3OmniDSparkModel"]), seen)
        assert seen["architectures"] == ["Qwen3OmniDSparkModel"]
