"""Targets of every family with published drafts: they are read, described, validated and served; run or refused.

tests/golden/target_configs.py writes the configs in tests/data/targets.
"""

import json
import re
import runpy
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError

from dflash_cli.checkpoints.opening import open_target, read_target
from dflash_cli.checkpoints.target_words import layers_in_words, ropes_in_words
from dflash_cli.terminal import documentation
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.hf_config import read_target_facts
from dflash_runtime.checkpoint.targets.hosted_config import open_decoder
from dflash_runtime.checkpoint.targets.layer_kinds import STATE_KINDS
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.checkpoint.targets.runs_here import TargetRuntime, how_it_runs, native_families
from dflash_runtime.errors import MISSING, DFlashError, InvalidConfig
from dflash_runtime.models.target import family_config, target_families
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.target_config import TargetConfig, TargetFacts
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.pairs import placement
from dflash_testing.paths import ROOT
from dflash_testing.published_pairs import read_table, write_headers
from dflash_testing.refusals import refuses

FOLDER = ROOT / "tests" / "data" / "targets"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TRUE_WARNINGS = {"P10", "P17", "S30"}
"""Rules that are right about some targets: a scaled embedding, a target that does not run here, a recurrent state."""

TAPPED_BY_SGLANG = {
    "gemma4", "glm5_next", "kimi_k3", "laguna", "lfm2", "llama", "muse_glimmer", "muse_spark", "qwen3_5", "qwen3_5_moe"
}  # fmt: skip
"""Some targets with taps in SGLang 0.5.23, most of them under the name of their multimodal model."""


@cache
def facts_of(name: str) -> TargetFacts:
    path = FOLDER / f"{name}.json"
    return read_target_facts(json.loads(path.read_text()), path)


def make_pair(home: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """Write a draft with taps at every depth, and the target's config with the weights that a draft shares."""
    facts = facts_of(name)
    home.mkdir(exist_ok=True)
    last = facts.num_layers - 2
    shape = support.Shape(
        hidden=facts.hidden_size,
        vocab=facts.vocab_size,
        draft_vocab=facts.vocab_size,
        mask=facts.vocab_size - 1,
        target_layers=facts.num_layers,
        taps=tuple(sorted({1, last // 3, last // 2, last})),
        theta=facts.rope.theta if facts.rope is not None else 10000.0,
    )
    reach = facts.max_position_embeddings or 4096
    draft = support.make_native(home / "dflash-draft", shape, max_position_embeddings=reach, **changes)
    rows = np.ones((facts.vocab_size, facts.hidden_size), dtype=np.float32)
    target = support.write_checkpoint(
        home / "target", config_of(name), {"model.embed_tokens.weight": rows, "lm_head.weight": rows}
    )
    return draft, target


def config_of(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def of_each_kind() -> list[str]:
    """Return one target for each kind of layer."""
    found: dict[str, str] = {}
    for name in NAMES:
        found = dict.fromkeys(facts_of(name).layer_kinds, name) | found
    return sorted(set(found.values()))


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_has_a_kind(name: str) -> None:
    facts = facts_of(name)
    assert len(facts.layer_kinds) == len(facts.windows) == facts.num_layers
    assert facts.num_heads == 4
    assert facts.rope is not None or facts.ropes or "rope" in facts.not_known
    stated = json.dumps(config_of(name))
    assert (facts.quantization is not None) == ("quantization_config" in stated)
    assert (facts.num_experts is not None) == any("experts" in part for part in facts.not_known)


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_pair_has_no_false_findings(name: str, tmp_path: Path) -> None:
    draft, target = make_pair(tmp_path, name)
    described = invoke("inspect", target)
    assert described.code == 0, described.err
    assert facts_of(name).model_type in described.out
    validated = invoke("validate", draft, "--target", target, "--json")
    assert validated.code == 0, validated.out
    assert {item["id"] for item in json.loads(validated.out)["findings"]} <= TRUE_WARNINGS
    served = invoke("serve-command", draft, "--target", target, "--engine", "vllm")
    assert served.code == 0, served.err


@pytest.mark.parametrize("name", NAMES)
def test_running_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """A native family accepts the config and then refuses the weights, because these checkpoints have only few."""
    draft, target = make_pair(tmp_path, name)
    source = open_target(target)
    with pytest.raises(DFlashError) as refused:
        load_target(source, placement(), "native")
    kind, is_native = source.facts.model_type, source.facts.model_type in target_families()
    is_read = isinstance(source.facts, TargetConfig) or (is_native and hasattr(target_families()[kind], "read_config"))
    if is_native and is_read:
        is_readable = source.facts.quantization in (None, "mxfp4")
        assert refused.value.id == ("tensor-mismatch" if is_readable else "quantization-without-weights")
    else:
        assert refused.value.id == ("target-not-run" if is_native else "target-without-native-family")
        assert refused.value.found == kind
    outcome = invoke("generate", "x", "-d", draft, "-t", target, "-n", "2", "--target-runtime", "native")
    assert outcome.code == refused.value.exit_code
    assert refused.value.message in outcome.err


@pytest.mark.parametrize("name", of_each_kind())
def test_a_tap_past_the_last_layer_is_an_error(name: str, tmp_path: Path) -> None:
    depth = facts_of(name).num_layers
    draft, target = make_pair(
        tmp_path,
        name,
        num_target_layers=None,
        dflash_config={"mask_token_id": 127, "target_layer_ids": [1, 2, 3, depth]},
    )
    outcome = invoke("validate", draft, "--target", target, "--json")
    assert outcome.code == 3
    (finding,) = [item for item in json.loads(outcome.out)["findings"] if item["severity"] == "error"]
    assert finding["location"].endswith("target_layer_ids")
    assert {str(depth), str(depth - 1)} <= set(re.findall(r"\d+", finding["message"]))


@pytest.mark.parametrize("name", of_each_kind())
def test_a_draft_is_converted_for_it(name: str, tmp_path: Path) -> None:
    draft, target = make_pair(tmp_path, name)
    request = ("convert", draft, tmp_path / "out", "--to", "speculators", "--target", target, "--target-name", "a/b")
    is_scaled = facts_of(name).embedding_scale != 1  # the native draft takes the scale, and speculators cannot state it
    assert invoke(*request, *(["--allow-lossy"] if is_scaled else [])).code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["architectures"] == config_of(name)["architectures"]


@pytest.mark.parametrize("name", of_each_kind())
def test_the_reference_code_is_not_recommended_for_a_recurrent_state(name: str, tmp_path: Path) -> None:
    draft, target = make_pair(tmp_path, name)
    outcome = invoke("validate", draft, "--target", target, "--engine", "transformers")
    assert ("S30" in outcome.out) == bool(set(STATE_KINDS) & set(facts_of(name).layer_kinds))


@pytest.mark.parametrize("name", NAMES)
def test_sglang_knows_a_target_by_its_wrapper_or_its_decoder(name: str, tmp_path: Path) -> None:
    """Rules find a wrapper's name or its decoder's, and find a quantised target whichever config states it."""
    draft, target = make_pair(tmp_path, name)
    outcome = invoke("validate", draft, "--target", target, "--engine", "sglang", "--json")
    found = {item["id"] for item in json.loads(outcome.out)["findings"]}
    assert ("S23" in found) == (facts_of(name).quantization is not None)
    assert not ("P07" in found and name.removeprefix("by_hand_") in TAPPED_BY_SGLANG)


def test_an_unknown_kind_of_layer_in_an_unknown_family(tmp_path: Path) -> None:
    target = support.make_target(
        tmp_path / "target", model_type="mystery", layer_types=["wavelet", "full_attention"] * 2
    )
    assert open_target(target).facts.layer_kinds == ("wavelet", "full") * 2
    outcome = invoke("inspect", target)
    assert outcome.code == 0
    assert "layers      4 layers: 2 wavelet, 2 full (layers 1, 3)" in outcome.out


@pytest.mark.parametrize(
    ("name", "change", "field", "found"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types", "1 names"),
        ("qwen3_next", {"layer_types": [1] * 48}, "layer_types", [1] * 48),
        ("qwen3_next", {"num_hidden_layers": 2**53}, "num_hidden_layers", 2**53),
        ("qwen3_next", {"model_type": ["qwen3_next"]}, "model_type", ["qwen3_next"]),
        ("qwen3_next", {"hidden_size": "64"}, "hidden_size", "64"),
        ("qwen3_next", {"num_hidden_layers": None, "layer_types": None}, "num_hidden_layers", MISSING),
        ("by_hand_nemotron_h", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern", "M*"),
        ("by_hand_mimo_v2", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern", "2 values"),
        ("by_hand_internvl", {"llm_config": "qwen3"}, "llm_config", "qwen3"),
    ],
)
def test_a_malformed_key_is_named(name: str, change: dict[str, Any], field: str, found: object, tmp_path: Path) -> None:
    draft, target = make_pair(tmp_path, name)
    support.write_config(target, {**config_of(name), **change})
    with refuses(InvalidConfig, field=field, found=found, path=target / "config.json") as refused:
        open_target(target)
    outcome = invoke("validate", draft, "--target", target)
    assert outcome.code == 3, outcome.out
    assert refused.value.message in outcome.err


ROPES = {"full_attention": {"rope_theta": 1}}
JUNK: tuple[Any, ...] = (None, True, 0, -1, 3, 2.5, "x", [], [1], ["a"], [[1]], {}, {"a": 1}, ROPES, 2**53)
UNSTATED = ("num_layers", "layer_types", "no_rope_layers", "rope_parameters", "quantization_config", "llm_config")


@pytest.mark.parametrize("name", of_each_kind())
def test_junk_under_any_key_is_read_or_refused(name: str) -> None:
    """Any value under any key of the model or its decoder, and under some missing keys, crashes nothing."""
    config = config_of(name)
    for home in ("", *(key for key, value in config.items() if isinstance(value, dict))):
        inner = config[home] if home else config
        for key in (*inner, *UNSTATED):
            for junk in JUNK:
                changed = {**inner, key: junk}
                with suppress(DFlashError):
                    facts = read_target({**config, home: changed} if home else changed, FOLDER / f"{name}.json")
                    assert layers_in_words(facts)
                    list(ropes_in_words(facts))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "qwen3_5_moe_fp8",
            [
                "model       qwen3_5_moe_text, in text_config of a multimodal model",
                "layers      60 layers: 45 linear, 15 full, every 4th",
                "rope        default, theta 10000, partial_rotary_factor 0.25, up to 32768 positions",
                "experts     256, 8 per token",
                "quantised   fp8 (e4m3)",
            ],
        ),
        (
            "gemma3",
            [
                "layers      26 layers: 22 sliding (window 4096), 4 full, every 6th",
                "rope        full: default, theta 1000000; sliding: default, theta 10000, up to 131072 positions",
                "vocabulary  128 ids, head tied to the embedding, embedding times 8",
            ],
        ),
        (
            "by_hand_llama4",
            [
                "layers      12 layers: 9 chunked (chunks of 8192), 3 full, every 4th",
                "rope        chunked: default, theta 1000000; none in full layers, up to 4096 positions",
            ],
        ),
        ("by_hand_kimi_k3", ["layers      12 layers: 9 linear, 3 latent, every 4th"]),
        ("by_hand_mimo_v2", ["layers      12 layers: 9 sliding (window 128), 3 full (layers 0, 5, 11)"]),
        ("by_hand_nemotron_h", ["layers      12 layers: 5 mamba, 5 feed-forward, 2 full (layers 3, 8)"]),
        ("lfm2", ["layers      16 layers: 12 convolution, 4 full (layers 2, 5, 10, 13)"]),
        ("laguna", ["layers      40 layers: 30 sliding (window 512), 10 full, every 4th from layer 0 on"]),
    ],
)
def test_inspect_prints_the_facts_of_a_target(name: str, lines: list[str], tmp_path: Path) -> None:
    _, target = make_pair(tmp_path, name)
    printed = invoke("inspect", target).out.splitlines()
    for line in lines:
        assert line in printed, printed
    config = json.loads(invoke("inspect", target, "--json").out)["config"]
    assert tuple(config["layer_kinds"]) == facts_of(name).layer_kinds
    assert config["num_experts"] == facts_of(name).num_experts


def test_two_targets_differ_in_one_line_on_their_layers(tmp_path: Path) -> None:
    _, first = make_pair(tmp_path / "one", "qwen3_5")
    _, second = make_pair(tmp_path / "two", "gemma3")
    lines = invoke("inspect", first, second).out.splitlines()
    (line,) = [line for line in lines if line.startswith("layers: ")]
    assert "48 linear, 16 full, every 4th in the first; 26 layers: 22 sliding (window 4096)" in line
    assert not any("windows" in line or "layer kinds" in line for line in lines)


def answers(source: TargetSource) -> list[tuple[str, str | None]]:
    """Return what `inspect` and `validate` say, and what `generate` does, each with a target's runtime or refusal."""
    said, done = how_it_runs(source), how_it_runs(source, refuse_native=family_config, read_decoder=open_decoder)
    return [(item.runtime or "refused", None if item.refusal is None else item.refusal.id) for item in (said, done)]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_gives_one_answer(name: str, tmp_path: Path) -> None:
    """The answer from recorded defaults equals the answer of transformers' own config class."""
    if pytest.importorskip("transformers").__version__ != "5.23.0":
        pytest.skip("recorded with transformers 5.23.0")
    tensors = {"model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (8, 8)), "model.x.weight_scale": ("F32", (1, 1))}
    for headers in ({}, tensors):
        target = tmp_path / str(len(headers))
        write_headers(target, config_of(name), headers)
        said, done = answers(open_target(target))
        assert said == done


CHANGES: tuple[dict[str, Any], ...] = (
    {"use_bidirectional_attention": True}, {"attention_chunk_size": 64}, {"attention_chunk_size": None},
    {"kv_lora_rank": 16}, {"layer_types": None}, {"hc_mult": 4}, {"v_head_dim": 4}, {"alibi": True},
)  # fmt: skip
"""Changes of a decoder's config by which another runtime may serve it."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_one_answer_for_changed_configs(change: dict[str, Any], tmp_path: Path) -> None:
    if pytest.importorskip("transformers").__version__ != "5.23.0":
        pytest.skip("recorded with transformers 5.23.0")
    for name in NAMES:
        config = config_of(name)
        key = next((key for key in ("text_config", "llm_config", "language_config") if key in config), None)
        changed = {**config, **change} if key is None else {**config, key: {**config[key], **change}}
        write_headers(tmp_path / name, changed, {})
        with suppress(InvalidConfig):
            said, done = answers(open_target(tmp_path / name))
            assert said == done or done[1] == "config-refused-by-transformers", name


@pytest.mark.slow
def test_one_answer_for_every_type_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != "5.23.0":
        pytest.skip("recorded with transformers 5.23.0")
    compared = 0
    for kind in recorded_types()["decoders"]:
        with suppress(DFlashError, StrictDataclassError):
            write_headers(tmp_path / kind, json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string()), {})
            said, done = answers(open_target(tmp_path / kind))
            assert said == done, kind
            compared += 1
    assert compared > 240


@pytest.mark.slow
def test_the_recorded_types_equal_the_output_of_the_script() -> None:
    if pytest.importorskip("transformers").__version__ == "5.23.0":
        script = runpy.run_path(str(ROOT / "scripts" / "transformers_types.py"))
        assert json.loads(script["render"]()) == recorded_types()


def test_native_families_are_found_without_importing_them() -> None:
    assert native_families().keys() == set(target_families())


def test_the_page_equals_the_output_of_the_script() -> None:
    """`python scripts/target_table.py` prints docs/reference/targets.md, which names a test for every target."""
    script = runpy.run_path(str(ROOT / "scripts" / "target_table.py"))
    assert set(script["TRIED"]) == set(get_args(TargetRuntime))
    assert {pair.target for pair in read_table()} <= set(NAMES)
    if pytest.importorskip("transformers").__version__ == "5.23.0":
        page = script["render"]()
        assert page == documentation.text("targets")
        assert "| none |\n" not in page, "a config that no test runs a model of"


@pytest.mark.slow
def test_the_configs_equal_the_output_of_the_script() -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != "5.23.0":
        pytest.skip("written with transformers 5.23.0")
    configs = runpy.run_path(str(ROOT / "tests" / "golden" / "target_configs.py"))["all_configs"]()
    assert sorted(configs) == NAMES
    assert {name: config_of(name) for name in NAMES} == configs


def test_kinds_of_layers_are_not_guessed(tmp_path: Path) -> None:
    """A window without a key for its layers leaves the kinds of the layers unknown."""
    path = support.make_target(tmp_path / "target", model_type="gemma2", sliding_window=64, layer_types=None,
                               use_sliding_window=None)  # fmt: skip
    facts = open_target(path).facts
    assert facts.layer_kinds == ()
    assert "4 layers, of kinds that the config does not state" in invoke("inspect", path).out
