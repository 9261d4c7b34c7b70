"""DFlash 2 and DSpark in the native and the speculators dialect: keys, tensors, layouts, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from dflash_cli.checkpoints.description import describe
from dflash_cli.checkpoints.opening import Overrides, open_draft
from dflash_cli.formats.detection import detect_from
from dflash_runtime.draft_config import ConvolutionConfig, MarkovConfig, SelectorConfig
from dflash_runtime.errors import (
    InvalidConfig,
    TensorMismatch,
    UnknownFormat,
    UnsupportedError,
    UsageError,
)
from dflash_testing import checkpoints as support
from dflash_testing.checkpoints import REMOVED
from dflash_testing.command_line import invoke
from dflash_testing.dialects import read_parsed
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


class TestReading:
    @pytest.mark.parametrize("name", NAMES)
    def test_each_dialect_is_detected_by_its_keys(self, name: str) -> None:
        found = detect_from(FAMILIES[name](), frozenset(), PATH).format
        assert (found.name, found.difference) == (name, "")
        assert found.read_config(FAMILIES[name](), PATH).config.family == name.partition("-")[0]

    @pytest.mark.parametrize("config", [dflash2_native(), dflash2_speculators()])
    def test_dflash2(self, config: dict[str, Any]) -> None:
        found = read_parsed(config).config
        assert found.convolution == ConvolutionConfig(kernel_size=2, group_size=4)
        assert found.selector == SelectorConfig(rank=3, top_k=4)
        assert (found.block_size, found.num_draft_tokens, found.markov) == (4, 3, None)

    @pytest.mark.parametrize("config", [dspark_native(), dspark_speculators()])
    def test_dspark(self, config: dict[str, Any]) -> None:
        found = read_parsed(config).config
        assert found.markov == MarkovConfig(rank=3)
        assert (found.has_confidence, found.confidence_reads_token) == (True, True)
        assert (found.sample_from_anchor, found.block_size, found.num_draft_tokens) == (True, 4, 4)

    @pytest.mark.parametrize("make", [dspark_native, dspark_speculators])
    def test_a_fill_in_block_drafts_a_token_less_than_it_has_rows(self, make: Any) -> None:
        found = read_parsed(make(sample_from_anchor=False)).config
        assert (found.sample_from_anchor, found.block_size, found.num_draft_tokens) == (False, 4, 3)

    @pytest.mark.parametrize("place", ["top", "nested", "both"])
    @pytest.mark.parametrize("key", [*CONVOLVED, *MARKOV, "mask_token_id", "block_size", "target_layer_ids"])
    def test_a_native_key_may_be_in_either_place(self, key: str, place: str) -> None:
        config = dflash2_native() if key in CONVOLVED else dspark_native()
        nested = config["dflash_config"]
        value = nested.pop(key, config.pop(key, None)) if key != "block_size" else config.pop(key)
        nested.pop(key, None)
        moved = {**config, **({key: value} if place != "nested" else {})}
        moved["dflash_config"] = {**nested, **({key: value} if place != "top" else {})}
        whole = dflash2_native() if key in CONVOLVED else dspark_native()
        assert read_parsed(moved).config == read_parsed(whole).config

    @pytest.mark.parametrize(
        ("key", "other"),
        [
            ("mask_token_id", "dspark_noise_token_id"), ("mask_token_id", "pard_token"),
            ("mask_token_id", "ptd_token_id"), ("block_size", "dspark_block_size"),
            ("target_layer_ids", "dspark_target_layer_ids"), ("markov_rank", "dspark_markov_rank"),
            ("markov_head_type", "dspark_markov_head_type"),
        ],
    )  # fmt: skip
    def test_every_other_spelling_of_dspark(self, key: str, other: str) -> None:
        config = dspark_native()
        config[other] = config["dflash_config"].pop(key, None) if key in config["dflash_config"] else config.pop(key)
        assert read_parsed(config).config == read_parsed(dspark_native()).config
        config[key] = config[other] if isinstance(config[other], str | list) else config[other] + 1
        if config[key] != config[other]:
            with refuses(InvalidConfig, field=key):
                read_parsed(config)

    @pytest.mark.parametrize("key", [*CONVOLVED, "markov_rank"])
    @pytest.mark.parametrize("dialect", ["native", "speculators"])
    def test_a_missing_setting_is_named(self, key: str, dialect: str) -> None:
        family = "dflash2" if key in CONVOLVED else "dspark"
        make = FAMILIES[family if dialect == "native" else f"{family}-speculators"]
        with refuses(InvalidConfig, field=key):
            read_parsed(make(**{key: REMOVED}))

    @pytest.mark.parametrize(
        ("key", "value"), [("conv_kernel_size", 0), ("conv_group_size", 3), ("selector_rank", "a"),
                           ("selector_top_k", 33), ("markov_head_type", "deep"), ("markov_rank", -1),
                           ("sample_from_anchor", 1), ("enable_confidence_head", "yes")],
    )  # fmt: skip
    def test_a_wrong_setting_is_named(self, key: str, value: Any) -> None:
        make = dflash2_native if key in CONVOLVED else dspark_native
        with refuses(InvalidConfig, field=key):
            read_parsed(make(**{key: value}))

    @pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
    def test_every_head(self, kind: str) -> None:
        found = read_parsed(dspark_native(markov_head_type=kind, dspark_draft_topk=5)).config
        assert found.markov == MarkovConfig(rank=3, head_type=kind, top_k=5)

    @pytest.mark.parametrize("make", [dspark_native, dspark_speculators])
    def test_rank_0_is_no_head(self, make: Any) -> None:
        found = read_parsed(make(markov_rank=0, confidence_head_with_markov=False)).config
        assert (found.markov, found.confidence_reads_token) == (None, False)

    def test_no_confidence_unless_a_native_file_states_it(self) -> None:
        assert not read_parsed(dspark_native(enable_confidence_head=REMOVED)).config.has_confidence
        assert read_parsed(dspark_speculators(enable_confidence_head=REMOVED)).config.has_confidence

    def test_scales_of_dflash2(self) -> None:
        scales: dict[str, Any] = {
            "input_embedding_scale": 2.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 20.0,
        }
        found = read_parsed(dflash2_native(**scales)).config
        assert {key: getattr(found, key) for key in scales} == scales
        assert not read_parsed(dflash2_native()).config.has_target_scale  # the target's raw rows, as in z-lab 0.1.0

    def test_a_padded_vocabulary_and_logit_scale(self) -> None:
        found = read_parsed(dspark_native(logit_scale=0.5, draft_vocab_size=12)).config
        assert (found.logit_scale, found.draft_vocab_size, found.vocab_size) == (0.5, 12, 32)

    def test_an_exporters_projector_is_the_familys_own(self) -> None:
        config = dspark_native()
        config["dflash_config"] |= {"projector_type": "dspark", "attention_mode": "gqa"}
        assert not read_parsed(config).unserved
        config["dflash_config"]["projector_type"] = "other"
        assert set(read_parsed(config).unserved) == {"projector_type"}

    @pytest.mark.parametrize(
        ("architecture", "name"),
        [("Gemma4DSparkModel", "dspark-variant"), ("DSparkMiniMaxDraftModel", "dspark-variant"),
         ("DFlash2BeamDraftModel", "beam")],
    )  # fmt: skip
    def test_other_layers_are_refused_by_name(self, architecture: str, name: str) -> None:
        config = (dspark_native() if "DSpark" in architecture else dflash2_native()) | {"architectures": [architecture]}
        found = detect_from(config, frozenset(), PATH).format
        assert found.name == name
        with refuses(UnknownFormat, "relative-of-dflash", found=name):
            found.read_config(config, PATH)

    @pytest.mark.parametrize(
        "architecture", ["Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel", "Qwen3DFlashDraftModel"]
    )
    def test_every_name_of_a_plain_dspark_draft(self, architecture: str) -> None:
        config = dspark_native(architectures=[architecture])
        assert detect_from(config, frozenset(), PATH).format.name == "dspark"

    @pytest.mark.parametrize(
        "architecture", ["DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "Qwen3DFlash2DraftModel", "DFlashDraftModel"]
    )
    def test_every_name_of_a_plain_dflash2_draft(self, architecture: str) -> None:
        config = {**dflash2_native(), "architectures": [architecture]}
        assert detect_from(config, frozenset(), PATH).format.name == "dflash2"

    @pytest.mark.parametrize(
        ("name", "config"),
        [
            ("dspark", support.native_config(architectures=["Qwen3DSparkModel"])),
            ("dspark", support.native_config(dflash_config={"projector_type": "dspark"})),
            ("dspark", support.native_config(markov_rank=0)),
            ("dspark", support.native_config(dspark_noise_token_id=31)),
            ("dflash2", support.native_config(architectures=["DFlash2DraftModel"])),
            ("dflash2", support.native_config(dflash_config={"conv_kernel_size": 2})),
            ("dspark-speculators", support.speculators_config(speculators_model_type="dspark")),
            ("dflash2-speculators", support.speculators_config(speculators_model_type="dflash2")),
        ],
    )
    def test_any_mark_is_enough(self, name: str, config: dict[str, Any]) -> None:
        assert detect_from(config, frozenset(), PATH).format.name == name


class TestLayout:
    @pytest.mark.parametrize("make", [dspark_native, dspark_speculators])
    def test_a_missing_key_is_unknown(self, make: Any) -> None:
        assert read_parsed(make(sample_from_anchor=REMOVED)).has_unknown_layout
        assert read_parsed(make(sample_from_anchor=None)).has_unknown_layout
        assert not read_parsed(make()).has_unknown_layout

    @pytest.mark.parametrize("is_bonus", [True, False])
    def test_the_bonus_anchor_is_the_opposite(self, is_bonus: bool) -> None:
        found = read_parsed(dspark_native(sample_from_anchor=REMOVED, dspark_bonus_anchor=is_bonus))
        assert (found.has_unknown_layout, found.config.sample_from_anchor) == (False, not is_bonus)

    def test_both_keys_may_not_agree(self) -> None:
        assert read_parsed(dspark_native(dspark_bonus_anchor=False)).config.sample_from_anchor
        with refuses(InvalidConfig, field="dspark_bonus_anchor", found=True):
            read_parsed(dspark_native(dspark_bonus_anchor=True))

    @pytest.fixture
    def unknown(self, tmp_path: Path) -> Path:
        return write_draft(tmp_path / "draft", dspark_native(sample_from_anchor=REMOVED))

    @pytest.mark.parametrize("layout", ["anchor-first", "fill-in"])
    def test_the_option_states_it(self, unknown: Path, layout: Any, tmp_path: Path) -> None:
        with refuses(UnsupportedError, "layout-not-stated", field="sample_from_anchor"):
            open_draft(unknown).check_runnable()
        draft = open_draft(unknown, overrides=Overrides(layout=layout))
        draft.check_runnable()
        assert draft.config.sample_from_anchor == (layout == "anchor-first")
        target = support.make_target(tmp_path / "target")
        for number, to in enumerate(("native", "speculators", "vllm", "sglang")):
            out = tmp_path / str(number)
            refused = invoke("convert", unknown, out, "--to", to, "--target", target)
            assert (refused.code, "--layout" in refused.err) == (5, True)
            done = invoke("convert", unknown, out, "--to", to, "--target", target, "--layout", layout)
            assert done.code == 0, done.err
            assert not open_draft(out).parsed.has_unknown_layout
            assert open_draft(out).config.sample_from_anchor == (layout == "anchor-first")

    def test_other_drafts_have_one_layout(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "draft")
        with refuses(UsageError, "layout-of-other-family", field="--layout", found="fill-in"):
            open_draft(path, overrides=Overrides(layout="fill-in"))

    def test_inspect_names_it(self, unknown: Path) -> None:
        assert describe(unknown).has_unknown_layout
        config = json.loads(invoke("inspect", unknown, "--json").out)["config"]
        assert (config["num_draft_tokens"], config["sample_from_anchor"], config["block_size"]) == (None, None, 4)
        assert "not stated" in invoke("inspect", unknown).out

    @pytest.mark.parametrize("command", ["generate", "eval-acceptance", "bench", "tune"])
    def test_no_command_runs_a_guess(self, unknown: Path, command: str, tmp_path: Path) -> None:
        target = support.make_target(tmp_path / "target")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt_token_ids": [4, 5, 6]}\n')
        outcome = invoke(command, "-d", unknown, "-t", target, "-p", prompts)
        assert outcome.code == 5, outcome.err
        assert "--layout" in outcome.err


class TestTensors:
    @pytest.mark.parametrize("name", NAMES)
    def test_all_tensors_are_known(self, name: str, tmp_path: Path) -> None:
        path = write_draft(tmp_path / "draft", FAMILIES[name]())
        assert not open_draft(path).select_tensors().skip

    @pytest.mark.parametrize("kind", ["gated", "rnn"])
    def test_other_heads(self, kind: str, tmp_path: Path) -> None:
        path = write_draft(tmp_path / "draft", dspark_native(markov_head_type=kind))
        assert open_draft(path).select_tensors().load

    def test_every_fault_is_listed(self, tmp_path: Path) -> None:
        config = dflash2_native()
        arrays = support.body_arrays() | support.random_arrays(
            {"candidate_selector.predecessor_codebook": (32, 2), "markov_head.markov_w1.weight": (32, 3)}
        )
        path = support.write_checkpoint(tmp_path / "draft", config, arrays)
        with pytest.raises(TensorMismatch) as caught:
            open_draft(path).select_tensors()
        assert "candidate_selector.successor_codebook" in caught.value.missing
        assert list(caught.value.unexpected) == ["markov_head.markov_w1.weight"]
        assert "candidate_selector.predecessor_codebook" in caught.value.wrong

    def test_codebooks_may_have_the_suffix_of_transformers(self, tmp_path: Path) -> None:
        config = dflash2_native()
        plain = write_draft(tmp_path / "plain", config)
        arrays = {f"{name}.weight" if name.endswith("codebook") else name: array
                  for name, array in load_file(plain / "model.safetensors").items()}  # fmt: skip
        suffixed = support.write_checkpoint(tmp_path / "suffixed", config, arrays)
        assert set(open_draft(suffixed).select_tensors().load) == set(open_draft(plain).select_tensors().load)
        out, target = tmp_path / "out", support.make_target(tmp_path / "target")
        done = invoke("convert", suffixed, out, "--to", "native", "--target", target)
        assert done.code == 0, done.err
        assert load_file(out / "model.safetensors").keys() == load_file(plain / "model.safetensors").keys()
