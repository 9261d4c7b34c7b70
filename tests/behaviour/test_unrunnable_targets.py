"""Targets that the runtime need not run are read, checked against and served; only running them is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.config import TargetConfig
from dflash_runtime.models.target import target_families
from dflash_testing import checkpoints as support
from dflash_testing.published_targets import TARGETS

NAMED = {
    "qwen3_5": ("layer_types linear_attention", "linear attention", "a gated query"),
    "qwen3_next": ("layer_types linear_attention", "experts (num_experts)"),
    "gpt_oss": ("experts (num_local_experts)",),
    "gemma3_text": ("another rope for each kind of layer (rope_parameters)", "scaled attention"),
    "gemma3_text before transformers 5": ("another rope for each kind of layer (rope_local_base_freq)",),
    "llama4": ("layer_types chunked_attention", "chunked attention", "experts"),
    "deepseek_v3": ("latent attention (kv_lora_rank)", "experts (n_routed_experts)"),
    "mixtral": ("experts (num_local_experts)",),
    "qwen3_moe": (),
    "granite": ("multipliers (embedding_multiplier)",),
    "lfm2": ("layer_types conv", "convolutions (conv_L_cache)"),
    "nemotron_h": ("state-space layers (ssm_state_size)",),
    "llama": (),
    "olmo2": (),
    "cohere": (),
}
"""Target -> what is said to be not known of it."""


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return support.make_native(tmp_path / "dflash-draft")


def make(path: Path, name: str) -> Path:
    """The target as a directory with its config and weights, as far as a draft borrows them."""
    arrays = {key: value for key, value in support.target_arrays().items() if "layers" not in key}
    return support.write_checkpoint(path, TARGETS[name], arrays)


@pytest.mark.parametrize("name", TARGETS)
def test_its_facts_are_read(name: str, tmp_path: Path) -> None:
    facts = open_target(make(tmp_path / "target", name)).facts
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (16, 4, 32)
    assert (facts.max_position_embeddings, facts.dtype) == (512, "bfloat16")
    assert 1 in facts.eos_token_ids
    text = "; ".join(facts.not_known)
    assert all(part in text for part in NAMED[name]), text
    assert isinstance(facts, TargetConfig) == (name in ("llama", "olmo2", "qwen3_moe"))


@pytest.mark.parametrize("name", TARGETS)
def test_inspect_describes_it(name: str, tmp_path: Path) -> None:
    outcome = support.invoke("inspect", make(tmp_path / "target", name))
    assert outcome.code == 0, outcome.err
    assert "4 layers, hidden size 16" in outcome.out
    assert all(part in outcome.err for part in NAMED[name])


@pytest.mark.parametrize("name", TARGETS)
def test_validate_checks_against_it(name: str, draft: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", name)
    outcome = support.invoke("validate", draft, "--target", target, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0, outcome.out
    assert {item["id"] for item in report["findings"] if item["severity"] == "info"} <= {"P17"}
    support.write_config(target, _resized(TARGETS[name]))
    assert "P01" in support.invoke("validate", draft, "--target", target).out


@pytest.mark.parametrize("name", TARGETS)
def test_serve_command_serves_it(name: str, draft: Path, tmp_path: Path) -> None:
    outcome = support.invoke("serve-command", draft, "--target", make(tmp_path / "target", name), "--engine", "vllm")
    assert outcome.code == 0, outcome.err
    assert "vllm serve" in outcome.out


@pytest.mark.parametrize("name", TARGETS)
def test_convert_takes_it(name: str, draft: Path, tmp_path: Path) -> None:
    target, out = make(tmp_path / "target", name), tmp_path / "out"
    outcome = support.invoke("convert", draft, out, "--to", "speculators", "--target", target, "--target-name", "a/b")
    assert outcome.code == 0, outcome.err
    stated = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]["architectures"]
    assert stated == TARGETS[name]["architectures"]


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - target_families()))
def test_running_it_is_refused(name: str, draft: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", name)
    outcome = support.invoke("generate", "x", "-d", draft, "-t", target, "-n", "2", "--target-runtime", "native")
    assert outcome.code == 5, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert "this runtime does not run" in line
    assert "it runs llama, mistral, " in line
    assert "did you mean" not in outcome.err
    assert "dflash validate and dflash serve-command work" in outcome.err
    assert all(part in line for part in NAMED[name])


def test_the_run_level_is_refused_too(draft: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", "qwen3_next")
    outcome = support.invoke("validate", draft, "--target", target, "--level", "run", "--target-runtime", "native")
    assert outcome.code == 5, outcome.err


@pytest.mark.parametrize("has_code", [False, True], ids=["plain", "with code of its own"])
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "x", "-n", 2, "--draft"),
        ("eval-acceptance",),
        ("bench",),
        ("diagnose",),
        ("validate", "--level", "run"),
    ],
    ids=lambda command: command[0],
)
def test_what_would_run_an_unknown_type_is_said(
    command: tuple[object, ...], draft: Path, tmp_path: Path, *, has_code: bool
) -> None:
    """Code that a checkpoint brings is never run, and the message says why; commands that run nothing take it."""
    code: dict[str, Any] = {"auto_map": {"AutoModelForCausalLM": "modeling_mystery.Mystery"}} if has_code else {}
    target = support.make_target(tmp_path / "target", model_type="mystery", **code)
    (target / "modeling_mystery.py").write_text("raise SystemExit('this was run')\n")
    outcome = support.invoke(*command, draft, "--target", target)
    assert outcome.code == 5
    assert "does not know this type" in outcome.err
    assert "a release of transformers that does would be needed, or a native family (a file in " in outcome.err
    assert ("trust_remote_code would let it do anything to this machine" in outcome.err) == has_code
    for harmless in (("inspect", target), ("validate", draft, "--target", target)):
        assert support.invoke(*harmless).code == 0


def test_a_contradiction_in_a_decoder_target_is_still_told(draft: Path, tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", rope_theta=1.0, rope_parameters={"rope_theta": 2.0})
    outcome = support.invoke("validate", draft, "--target", target)
    assert outcome.code == 3
    assert "rope_theta" in outcome.err


@pytest.mark.parametrize("change", [{"num_key_value_heads": None}, {"intermediate_size": [32, 32, 32, 32]}])
def test_what_another_family_may_leave_out_is_named(change: dict[str, Any], draft: Path, tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", model_type="other", **change)
    assert open_target(target).facts.not_known == tuple(change)
    outcome = support.invoke("validate", draft, "--target", target)
    assert outcome.code == 0
    assert f"not known to dflash: {next(iter(change))}" in outcome.out


def _resized(config: dict[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": {**text, "hidden_size": 24}}
    return {**config, "hidden_size": 24}
