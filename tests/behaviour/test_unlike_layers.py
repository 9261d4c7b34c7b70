"""Native targets with sliding and full layers that differ, and with packed experts, in every way that the engine runs.

`test_families.py` compares the families with transformers one by one. Here one model of each kind goes through batches,
chunks of prompts, preemption, the prefix cache and hand-offs, and its steps equal a loop over transformers' own model.
"""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.suite import triton_kernels
from dflash_runtime.checkpoint.targets.gemma4_config import read_gemma4_config
from dflash_runtime.checkpoint.targets.gpt_oss_config import read_gpt_oss_config
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.device.setup.attention import Capability, check_capability
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.models.target import target_families
from dflash_runtime.models.target_loading import find_target_runtime, load_target, target_bytes
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.compared_targets import LENGTHS, NUM_DRAFTS, PARAMS, ComparedTarget
from dflash_testing.hosted_models import Known, make_model
from dflash_testing.multimodal_models import make_wrapper
from dflash_testing.packed_models import pack_experts
from dflash_testing.pairs import placement, random_llm
from dflash_testing.refusals import refuses


def scatter(path: Path, model: Any) -> None:
    """Give norms, scales and the scalars of layers different values, in memory and in the file."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 and ("norm" in name or "scal" in name):
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(path)


GPT_OSS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.15}


GEMMA4: dict[str, Any] = {
    "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0, "head_dim": 8,
    "initializer_range": 0.2,
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model type, the keys of its config beyond the usual ones, and a function that finishes the saved model."""

    model_type: str
    changes: dict[str, Any]
    finish: Callable[[Path, Any], None] | None = None


KINDS = {
    "gpt_oss, packed": Kind("gpt_oss", GPT_OSS, pack_experts),
    "gemma4": Kind("gemma4_text", GEMMA4, scatter),
    "gemma4 with experts": Kind("gemma4_text", {**GEMMA4, **GEMMA4_EXPERTS}, scatter),
    "gemma4_unified": Kind("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": False}, scatter),
}


make_compared = partial(ComparedTarget, sizes={"num_kv_heads": 2, "head_dim": 8})


@pytest.fixture(scope="module", params=KINDS)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ComparedTarget:
    path, kind = tmp_path_factory.mktemp("unlike"), KINDS[request.param]
    model = make_model(path, kind.model_type, **kind.changes)
    if kind.finish is not None:
        kind.finish(path, model)
    source = open_target(path)
    assert find_target_runtime(source, "auto")[0] == "native"
    return make_compared(model, load_target(source, placement()))


def test_outputs_of_every_layer_equal_transformers(compared: ComparedTarget) -> None:
    compared.check_layer_outputs()


@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async", "max_batched_tokens": 9}], ids=str)
def test_many_prompts_at_once(compared: ComparedTarget, engine: dict[str, Any]) -> None:
    given = compared.prompts(*LENGTHS)
    wanted = compared.texts(given)
    known = [Known([*prompt, *text], index) for index, (prompt, text) in enumerate(zip(given, wanted, strict=True))]
    llm = random_llm(compared.target, compared.draft(known), NUM_DRAFTS, max_num_requests=4, **engine)
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert len({max(output.acceptance_lengths) for output in outputs}) > 2


@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async", "max_batched_tokens": 9}], ids=str)
def test_steps_equal_a_loop_over_transformers(compared: ComparedTarget, engine: dict[str, Any]) -> None:
    compared.check_steps(engine)


@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_preempted_requests_begin_again(compared: ComparedTarget, scheduling: str) -> None:
    compared.check_preempted_requests(scheduling)


def test_a_prompt_that_is_asked_again(compared: ComparedTarget) -> None:
    compared.check_repeated_prompt()


def test_a_text_goes_on_in_another_engine(compared: ComparedTarget) -> None:
    compared.check_handed_requests("async")


def test_texts_are_lossless_by_one_forward(compared: ComparedTarget) -> None:
    llm = random_llm(compared.target, compared.draft(), NUM_DRAFTS)
    assert llm.check_lossless(llm.generate(compared.prompts(*LENGTHS), PARAMS)).is_lossless


PUBLISHED_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "quantization_config": {"quant_method": "mxfp4"}, "rope_theta": 150000, "sliding_window": 128,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
PUBLISHED_GEMMA4: dict[str, Any] = {
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
    "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": True, "vocab_size": 262144,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
PUBLISHED_GEMMA4_EXPERTS: dict[str, Any] = {
    **PUBLISHED_GEMMA4, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "moe_intermediate_size": 704,
    "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "top_k_experts": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "num_weights"),
    [(PUBLISHED_GPT_OSS, 20.9e9), (PUBLISHED_GEMMA4, 30.7e9), (PUBLISHED_GEMMA4_EXPERTS, 25.2e9)],
    ids=["gpt-oss-20b", "gemma-4-31B", "gemma-4-26B-A4B"],
)
def test_tensors_of_published_sizes_are_those_of_transformers(config: dict[str, Any], num_weights: float) -> None:
    """transformers makes the model without memory. A packed weight has 4 bits per number, and one scale per 32."""
    left_out = ("quantization_config", "architectures")
    source = {key: deepcopy(value) for key, value in config.items() if key not in left_out}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source))
    wanted = {name: tuple(item.shape) for name, item in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del wanted["lm_head.weight"]
    family: Any = target_families()[config["model_type"]]
    found = dict(family.expected_shapes(family.read_config(config, Path("config.json"))))
    for name in [name for name in found if name.endswith("_blocks")]:
        *stack, groups, size = found.pop(name)
        assert found.pop(name.replace("_blocks", "_scales")) == (*stack, groups)
        found[name.removesuffix("_blocks")] = (stack[0], 2 * groups * size, stack[1])
    assert found == wanted
    assert sum(math.prod(shape) for shape in found.values()) == pytest.approx(num_weights, rel=0.01)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_text_part_of_a_multimodal_model_is_native(kind: str, tmp_path: Path) -> None:
    changes = {**GEMMA4, **(GEMMA4_EXPERTS if kind == "gemma4" else {})}
    model = make_wrapper(tmp_path, kind, **changes)
    source = open_target(tmp_path)
    assert find_target_runtime(source, "auto")[0] == "native"
    compared = make_compared(model, load_target(source, placement()))
    given = compared.prompts(3, 30)
    outputs = random_llm(compared.target, compared.draft(), NUM_DRAFTS, max_num_requests=2).generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == compared.texts(given)


YARN_WITHOUT_TRUNCATION = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}


def test_full_layers_may_have_the_heads_of_the_others(tmp_path: Path) -> None:
    """transformers writes an empty `per_layer_config` then."""
    model = make_model(tmp_path, "gemma4_text", **{**GEMMA4, "global_head_dim": 8, "num_global_key_value_heads": 2})
    assert json.loads((tmp_path / "config.json").read_text())["per_layer_config"] == {}
    compared = make_compared(model, load_target(open_target(tmp_path), placement()))
    given = compared.prompts(3, 30)
    outputs = random_llm(compared.target, compared.draft(), NUM_DRAFTS, max_num_requests=2).generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == compared.texts(given)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size_per_layer_input": 6}, "hidden_size_per_layer_input"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {"rope_parameters": {**PUBLISHED_GEMMA4["rope_parameters"], "full_attention": YARN_WITHOUT_TRUNCATION}},
            "rope_parameters",
        ),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 59]}, "layer_types"),
        ({"per_layer_config": {"5": {"head_dim": 512, "rms_norm_eps": 0.5}}}, "per_layer_config"),
    ],
)
def test_parts_that_no_native_family_computes_are_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Without a stated width of the inputs of each layer, transformers has inputs."""
    config = {**PUBLISHED_GEMMA4, **changes}
    with refuses(UnsupportedError, "target-not-run", found="gemma4_text") as refused:
        read_gemma4_config({key: item for key, item in config.items() if item is not None}, tmp_path / "config.json")
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": None}, "layer_types"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.sliding_attention"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"global_head_dim": "wide"}, "global_head_dim"),
        ({"per_layer_config": {"00": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {str(6 * n + 5): {"head_dim": 2 * n + 2} for n in range(10)}}, "per_layer_config"),
        ({"per_layer_config": {"1" * 5000: {"head_dim": 16}}}, "per_layer_config"),
    ],
)
def test_a_wrong_key_of_gemma4_is_named(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    config = {**PUBLISHED_GEMMA4, **changes}
    with refuses(InvalidConfig, field=field):
        read_gemma4_config({key: item for key, item in config.items() if item is not None}, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": None}, "layer_types"),
        ({"swiglu_limit": -7}, "swiglu_limit"),
        ({"rope_theta": None}, "rope_theta"),
    ],
)
def test_a_wrong_key_of_gpt_oss_is_named(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    config = {**PUBLISHED_GPT_OSS, **changes}
    with refuses(InvalidConfig, field=field):
        read_gpt_oss_config({key: item for key, item in config.items() if item is not None}, tmp_path / "config.json")


def test_packed_weights_are_reported_and_take_their_own_bytes(tmp_path: Path) -> None:
    model = make_model(tmp_path, "gpt_oss", **GPT_OSS)
    plain = target_bytes(open_target(tmp_path), torch.float32, "native")
    pack_experts(tmp_path, model)
    source = open_target(tmp_path)
    answer = how_it_runs(source)
    assert (answer.runtime, answer.words) == ("native", "natively; weights mxfp4")
    numbers = sum(item.numel() for name, item in model.named_parameters() if name.endswith(("up_proj", "down_proj")))
    assert plain - target_bytes(source, torch.float32, "native") == numbers * 4 - numbers * 17 // 32
    assert load_pair(source, None, EngineConfig(device="cpu", max_model_len=64)).target_quantization == "mxfp4"


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "with experts" in name else pytest.mark.slow) for name in KINDS]
)
def test_triton_kernels_give_the_text(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = make_model(tmp_path, kind.model_type, **kind.changes)
    if kind.finish is not None:
        kind.finish(tmp_path, model)
    placed = replace(placement(), kernels=triton_kernels())
    compared = make_compared(model, load_target(open_target(tmp_path), placed))
    given = compared.prompts(3, 9)
    llm = random_llm(
        compared.target, compared.draft(), NUM_DRAFTS, kernels="triton", max_batched_tokens=8, num_pages=30,
        max_num_requests=2,
    )  # fmt: skip
    outputs = llm.generate(given, SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == compared.texts(given, 4)


def test_a_backend_without_sinks_refuses_gpt_oss(tmp_path: Path) -> None:
    config = read_gpt_oss_config(PUBLISHED_GPT_OSS, tmp_path / "config.json")
    backends = {"few": Capability(sinks=False), "all": Capability()}
    check_capability("all", config, None, "bfloat16", backends=backends)
    with refuses(UnsupportedError, "attention-not-computed", field="target layer 0"):
        check_capability("few", config, None, "bfloat16", backends=backends)
