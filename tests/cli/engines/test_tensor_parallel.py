"""`--tensor-parallel N`: what engines do with sizes that N GPUs divide, and with sizes that they do not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.engines.serving_engine import all_engines
from dflash_cli.engines.split_model import split_models
from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import Finding
from dflash_cli.rules.subject import ValidationPlan, open_subject
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.published_pairs import write_headers
from dflash_testing.rule_cases.base import Case, check, nothing, top
from dflash_testing.split_cases import PACKINGS

WIDE = replace(support.SMALL, hidden=128, inner=512, heads=8, kv_heads=4, head_dim=64, vocab=64, draft_vocab=64)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
           "num_experts_per_tok": 2, "moe_intermediate_size": 384}  # fmt: skip


def about_gpus(report: Report) -> list[Finding]:
    """The findings of the rules on tensor parallelism, in any order."""
    return [item for item in report.findings if item.id in ("S52", "S53", "P18")]


def judged(tmp_path: Path, engines: str, num_gpus: int, **target: Any) -> Report:
    """A report on a draft beside a target of 8 heads, whose config is changed."""
    case = Case(shape=WIDE, engines=engines, num_gpus=num_gpus, target=top(**target), config=top(vocab_size=64))
    return check(case, tmp_path)


def misfits_of_target(tmp_path: Path, engine: str, num_gpus: int, tensors: Any, **target: Any) -> dict[str, str]:
    """Key -> outcome of the misfits of a target with these tensors in its header."""
    draft = support.make_native(tmp_path / "draft")
    write_headers(tmp_path / "target", {**support.target_config(WIDE), **target}, tensors)
    (found,) = parse_engines(engine)
    plan = ValidationPlan(draft=draft, target=tmp_path / "target", engines=(found,), tensor_parallel=num_gpus)
    model = next(model for model in split_models(open_subject(plan)) if not model.is_draft)
    return {item.key: item.outcome for item in found.split_misfits(model, num_gpus)}


@pytest.mark.parametrize("engines", ["", "vllm,sglang"])
def test_one_gpu_splits_nothing(engines: str, tmp_path: Path) -> None:
    odd = replace(support.SMALL, heads=5, kv_heads=5, inner=23)
    assert not about_gpus(check(Case(shape=odd, engines=engines, target=nothing), tmp_path))


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_divisors_serve(num_gpus: int, tmp_path: Path) -> None:
    report = judged(tmp_path, "vllm,sglang", num_gpus)
    assert [verdict.outcome for verdict in report.verdicts] == ["serves", "serves"]
    assert {item.id for item in about_gpus(report)} <= {"S53"}, "KV heads may be replicated"
    assert any(item.id == "S53" for item in report.findings) is (num_gpus > WIDE.kv_heads)


@pytest.mark.parametrize("engine", ["vllm@0.24", "vllm", "sglang"])
def test_a_verdict_names_the_rule(engine: str, tmp_path: Path) -> None:
    (verdict,) = judged(tmp_path, engine, 3).verdicts
    assert (verdict.outcome, verdict.reasons) == ("stops", ("S52",))


def test_an_accepted_config_does_not_hide_the_verdict_nor_the_reverse(tmp_path: Path) -> None:
    """The engine's code accepts the config (S32), and N is judged beside it."""
    case = Case(engines="vllm", num_gpus=3, config=top(auto_map=None))
    assert {"S32", "S52"} <= {item.id for item in check(case, tmp_path).findings}


def test_only_vllm_needs_a_divisor_of_the_padded_vocabulary(tmp_path: Path) -> None:
    """64 rows are no multiple of 3. SGLang pads them to 192."""
    shape = replace(support.SMALL, heads=6, kv_heads=3)
    found = about_gpus(check(Case(shape=shape, engines="vllm,sglang", num_gpus=3), tmp_path))
    assert {item.engines for item in found} == {("vllm",)}
    assert {item.location for item in found} == {"config.json:vocab_size"}


def test_only_vllm_replicates_no_kv_heads_of_gpt_oss(tmp_path: Path) -> None:
    target = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
    for engine, outcomes in (("vllm", {"num_key_value_heads": "stops"}), ("sglang", {})):
        assert misfits_of_target(tmp_path / engine, engine, 8, {}, **target) == outcomes


def test_full_layers_of_gemma4_have_kv_heads_of_their_own(tmp_path: Path) -> None:
    target = {"model_type": "gemma4_text", "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 32,
              "num_global_key_value_heads": 2, "attention_k_eq_v": True, "intermediate_size": 384,
              "vocab_size": 192}  # fmt: skip
    assert misfits_of_target(tmp_path, "vllm", 3, {}, **target) == {"num_global_key_value_heads": "stops"}


def test_heads_of_latent_attention_are_not_those_of_keys(tmp_path: Path) -> None:
    target = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "num_key_value_heads": 3}
    assert misfits_of_target(tmp_path, "sglang", 4, {}, **target) == {}


@pytest.mark.parametrize(("engine", "rows"), [("vllm", "stops"), ("sglang", "stops")])
def test_parts_of_a_packed_target_need_whole_blocks(engine: str, rows: str, tmp_path: Path) -> None:
    """8 GPUs: 64 columns of o and of down, 64 rows of q, and one head of 64 rows of k and v for two GPUs."""
    names = {"self_attn.q_proj": (512, 128), "self_attn.k_proj": (256, 128), "self_attn.v_proj": (256, 128),
             "self_attn.o_proj": (128, 512), "mlp.down_proj": (128, 512)}  # fmt: skip
    found = misfits_of_target(tmp_path, engine, 8, in_blocks("model.layers.0.", names), quantization_config=FP8)
    begin = "model.layers.0."
    assert found.pop(f"{begin}self_attn.o_proj") == "stops"
    assert found.pop(f"{begin}mlp.down_proj") == "stops"
    assert list(found.values()) == [rows]


@pytest.mark.parametrize(("engine", "stops"), [("vllm@0.28", True), ("vllm@0.29", False), ("sglang", True)])
def test_vllm_from_0_29_makes_blocks_of_experts_smaller(engine: str, stops: bool, tmp_path: Path) -> None:
    """With 2 GPUs each has 192 of an expert's 384."""
    names = {"gate_proj": (384, 128), "up_proj": (384, 128), "down_proj": (128, 384)}
    tensors = in_blocks("model.layers.0.mlp.experts.3.", names)
    found = misfits_of_target(tmp_path, engine, 2, tensors, quantization_config=FP8, **EXPERTS)
    assert (len(found) == 3) is stops


def in_blocks(begin: str, names: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Headers of FP8 matrices with scales of blocks of 128 rows and columns."""
    parts = PACKINGS["fp8 128x128"].parts
    return {f"{begin}{name}.{end}": tensor for name, size in names.items() for end, tensor in parts(*size).items()}


@pytest.mark.parametrize("stated", ["fp8", [], {"quant_method": 3}, {**FP8, "weight_block_size": "128"}, FP8])
def test_odd_statements_of_a_target_stop_no_rule(stated: Any, tmp_path: Path) -> None:
    """Scales without weights, and weights that are no matrices, are not judged."""
    begin = "model.layers.0.self_attn.o_proj."
    tensors = {f"{begin}weight": ("F8_E4M3", (128,)), f"{begin}weight_scale_inv": ("F32", (1, 4)),
               "model.layers.0.mlp.down_proj.weight_scale_inv": ("F32", (1, 4))}  # fmt: skip
    assert misfits_of_target(tmp_path, "vllm", 8, tensors, quantization_config=stated) == {}


def test_experts_are_no_fewer_than_gpus(tmp_path: Path) -> None:
    found = misfits_of_target(tmp_path, "vllm", 4, {}, **{**EXPERTS, "num_experts": 2})
    assert found == {"num_experts": "stops"}


def test_our_runtime_judges_by_its_own_function(tmp_path: Path) -> None:
    """An error if no engine is named, since the GPUs are then those of dflash; otherwise a note."""
    for engines, severity in (("", "error"), ("vllm", "info")):
        report = check(Case(engines=engines, num_gpus=3, target=nothing), tmp_path / (engines or "own"))
        (found,) = [item for item in report.findings if item.id == "P18"]
        assert (found.severity, found.location) == (severity, "target config.json:num_attention_heads")
    assert not about_gpus(check(Case(num_gpus=2, target=nothing), tmp_path / "two"))


def test_our_runtime_splits_native_targets_only(tmp_path: Path) -> None:
    report = check(Case(num_gpus=2, target=top(model_type="gpt_bigcode")), tmp_path)
    assert "target config.json:model_type" in {item.location for item in report.findings if item.id == "P18"}


@pytest.mark.parametrize("command", ["validate", "serve-command"])
@pytest.mark.parametrize("option", ["0", "-1", "two"])
def test_odd_numbers_are_refused(command: str, option: str) -> None:
    result = invoke(command, "tiny", "--engine", "vllm", "--tensor-parallel", option)
    assert result.code == 2
    assert "--tensor-parallel" in result.err


@pytest.mark.parametrize("command", ["validate", "serve-command"])
def test_engines_without_a_verdict_are_refused(command: str) -> None:
    for engine in (engine.name for engine in all_engines() if not engine.splits_models):
        result = invoke(command, "tiny", "--engine", engine, "--tensor-parallel", "2")
        assert result.code == 2
        assert engine in result.err
        assert result.error is not None
        assert result.error.id == "tensor-parallel-not-judged"
        assert len(result.err.strip().splitlines()) <= 2


def test_commands_start_the_engines_on_n_gpus(tmp_path: Path) -> None:
    draft, target = support.make_native(tmp_path / "dflash-draft"), support.make_target(tmp_path / "target")
    options = [str(draft), "--target", str(target), "--engine", "vllm,sglang", "--json"]
    for num_gpus, words in ((1, ()), (2, ("--tensor-parallel-size 2", "--tp-size 2"))):
        result = invoke("serve-command", *options, "--tensor-parallel", str(num_gpus))
        commands = " ".join(json.loads(result.out)["serve_commands"][at]["commands"][-1] for at in (0, 1))
        assert all(word in commands for word in words)
        assert ("--tp" in commands or "--tensor" in commands) is (num_gpus > 1)
    assert invoke("serve-command", *options, "--tensor-parallel", "3").code == 5
