"""Targets that the runtime does not run can be read, checked against and served; only running them is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.target import target_families
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.target_config import TargetConfig
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.published_targets import TARGETS
from dflash_testing.refusals import refuses

NAMED = {
    "qwen3_5": ("linear_attention", "(linear_num_value_heads)", "(attn_output_gate)"),
    "qwen3_next": ("linear_attention", "(num_experts)"),
    "gpt_oss": ("(num_local_experts)",),
    "gemma3_text": ("(rope_parameters)", "(query_pre_attn_scalar)"),
    "gemma3_text before transformers 5": ("(rope_local_base_freq)",),
    "llama4": ("chunked_attention", "(attention_chunk_size)", "(num_local_experts)"),
    "deepseek_v3": ("(kv_lora_rank)", "(n_routed_experts)"),
    "mixtral": ("(num_local_experts)",),
    "qwen3_moe": (),
    "granite": ("(embedding_multiplier)",),
    "lfm2": ("conv", "(conv_L_cache)"),
    "nemotron_h": ("(ssm_state_size)",),
    "llama": (),
    "olmo2": (),
    "cohere": (),
}
"""Target -> the keys and kinds of layers that `not_known` names."""


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return support.make_native(tmp_path / "dflash-draft")


def make(path: Path, name: str) -> Path:
    """Write the target's config, and the weights that a draft shares with it."""
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
    target = make(tmp_path / "target", name)
    outcome = invoke("inspect", target)
    assert outcome.code == 0, outcome.err
    found = json.loads(invoke("inspect", target, "--json").out)
    assert (found["config"]["num_layers"], found["config"]["hidden_size"]) == (4, 16)
    runtime = find_target_runtime(open_target(target), "auto")[0]
    assert found["runs_here"]["runtime"] == runtime
    assert f"runs here   {found['runs_here']['words']}" in outcome.out


@pytest.mark.parametrize("name", TARGETS)
def test_validate_checks_against_it(name: str, draft: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", name)
    outcome = invoke("validate", draft, "--target", target, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0, outcome.out
    assert {item["id"] for item in report["findings"] if item["severity"] == "info"} <= {"P17"}
    support.write_config(target, _resized(TARGETS[name]))
    assert "P01" in invoke("validate", draft, "--target", target).out


@pytest.mark.parametrize("name", TARGETS)
def test_serve_command_serves_it(name: str, draft: Path, tmp_path: Path) -> None:
    outcome = invoke("serve-command", draft, "--target", make(tmp_path / "target", name), "--engine", "vllm")
    assert outcome.code == 0, outcome.err
    assert "vllm serve" in outcome.out


@pytest.mark.parametrize("name", TARGETS)
def test_convert_takes_it(name: str, draft: Path, tmp_path: Path) -> None:
    target, out = make(tmp_path / "target", name), tmp_path / "out"
    lossy = ["--allow-lossy"] if TARGETS[name]["model_type"].startswith("gemma") else []  # its scale has no key
    args = ("convert", draft, out, "--to", "speculators", "--target", target, "--target-name", "a/b")
    outcome = invoke(*args, *lossy)
    assert outcome.code == 0, outcome.err
    stated = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]["architectures"]
    assert stated == TARGETS[name]["architectures"]


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - target_families()))
def test_running_it_natively_is_refused(name: str, draft: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", name)
    kind = open_target(target).facts.model_type
    with refuses(UnsupportedError, "target-without-native-family", field="model_type", found=kind) as refused:
        find_target_runtime(open_target(target), "native")
    assert all(named in refused.value.message for named in (*NAMED[name], *target_families()))
    assert refused.value.hint is not None
    assert all(named in refused.value.hint for named in ("--target-runtime auto", "dflash serve-command"))
    outcome = invoke("generate", "x", "-d", draft, "-t", target, "-n", "2", "--target-runtime", "native")
    assert outcome.code == 5, outcome.err
    assert f"error: {refused.value.message}" in outcome.err.splitlines()


def test_the_run_level_is_refused_too(draft: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", "lfm2")
    outcome = invoke("validate", draft, "--target", target, "--level", "run", "--target-runtime", "native")
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
def test_a_model_type_that_transformers_does_not_know_is_refused(
    command: tuple[object, ...], draft: Path, tmp_path: Path, *, has_code: bool
) -> None:
    """Code in a checkpoint never runs, and the refusal mentions it. Commands that run no model accept the target."""
    code: dict[str, Any] = {"auto_map": {"AutoModelForCausalLM": "modeling_mystery.Mystery"}} if has_code else {}
    target = support.make_target(tmp_path / "target", model_type="mystery", **code)
    (target / "modeling_mystery.py").write_text("raise SystemExit('this was run')\n")
    with refuses(UnsupportedError, "target-unknown-to-transformers", found="mystery") as refused:
        find_target_runtime(open_target(target), "auto")
    outcome = invoke(*command, draft, "--target", target)
    assert outcome.code == 5
    assert refused.value.message in outcome.err
    assert ("trust_remote_code" in outcome.err) == has_code
    for harmless in (("inspect", target), ("validate", draft, "--target", target)):
        assert invoke(*harmless).code == 0


def test_a_contradiction_in_a_decoder_target_is_refused(draft: Path, tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", rope_theta=1.0, rope_parameters={"rope_theta": 2.0})
    outcome = invoke("validate", draft, "--target", target)
    assert outcome.code == 3
    assert "rope_theta" in outcome.err


@pytest.mark.parametrize("change", [{"num_key_value_heads": None}, {"intermediate_size": [32, 32, 32, 32]}])
def test_a_key_that_another_family_may_leave_out_is_named(change: dict[str, Any], draft: Path, tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", model_type="other", **change)
    assert open_target(target).facts.not_known == tuple(change)
    outcome = invoke("validate", draft, "--target", target)
    assert outcome.code == 0
    assert next(iter(change)) in outcome.out


def _resized(config: dict[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": {**text, "hidden_size": 24}}
    return {**config, "hidden_size": 24}
