"""Experts of every stored form become the same stacks, at small sizes and at published ones."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.errors import InvalidConfig, TensorMismatch, UnsupportedError
from dflash_runtime.models.expert_shapes import with_fused_experts
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import target_families
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.models.weights import stack_projections
from dflash_testing.edits import edit_config
from dflash_testing.hosted_models import make_model
from dflash_testing.pairs import placement, random_prompts
from dflash_testing.refusals import refuses

KIND = "qwen3_5_moe_text"
NUM_EXPERTS, INNER, HIDDEN = 3, 4, 5

LINEAR = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
COMMON = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
    "tie_word_embeddings": False, "hidden_act": "silu", "partial_rotary_factor": 0.25, **LINEAR,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen3.6-35B-A3B": (
        {
            **COMMON, "model_type": KIND, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
            "vocab_size": 248320, "mlp_only_layers": [],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        },
        34.66e9,
    ),
    "Qwen3-Next-80B-A3B": (
        {
            **COMMON, "model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512,
            "num_experts_per_tok": 10, "vocab_size": 151936, "mlp_only_layers": [], "decoder_sparse_step": 1,
            "norm_topk_prob": True, "intermediate_size": 5120, "rope_theta": 10_000_000, "rope_scaling": None,
        },
        79.67e9,
    ),
}  # fmt: skip
"""Model -> the keys of its published config, and its number of parameters without the layers for further tokens."""


def shapes_of(*, is_fused: bool, shared: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"a.norm.weight": (HIDDEN,)}
    if is_fused:
        shapes["a.experts.gate_up_proj"] = (NUM_EXPERTS, 2 * INNER, HIDDEN)
        shapes["a.experts.down_proj"] = (NUM_EXPERTS, HIDDEN, INNER)
    for expert in () if is_fused else range(NUM_EXPERTS):
        shapes |= one(f"a.experts.{expert}", INNER)
    return shapes | (one("a.shared_expert", shared) if shared else {})


def one(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, HIDDEN), "up": (inner, HIDDEN), "down": (HIDDEN, inner)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


@pytest.mark.parametrize("shared", [0, 3, 4, 8, 11])
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_stacks_compute_what_their_parts_compute(order: int, shared: int, *, is_fused: bool) -> None:
    """The last experts compute the shared one together, whatever its width and the order of the tensors."""
    shapes = shapes_of(is_fused=is_fused, shared=shared)
    generator = torch.Generator().manual_seed(1)
    parts = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found = dict(stack_experts(list(parts.items())[::order], shapes))
    assert set(found) == {"a.norm.weight", "a.experts.gate_up_proj.weight", "a.experts.down_proj.weight"}
    gate_up, down = found["a.experts.gate_up_proj.weight"], found["a.experts.down_proj.weight"]
    assert len(gate_up) == len(down) == NUM_EXPERTS + math.ceil(shared / INNER)
    hidden = torch.randn(7, HIDDEN, generator=generator)
    outputs = [forward(hidden, both, back) for both, back in zip(gate_up, down, strict=True)]
    for expert in range(NUM_EXPERTS):
        torch.testing.assert_close(outputs[expert], single(parts, expert, hidden, is_fused=is_fused))
    if shared:
        names = (f"a.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, back = (parts[name] for name in names)
        whole = forward(hidden, torch.cat((gate, up)), back)
        torch.testing.assert_close(torch.stack(outputs[NUM_EXPERTS:]).sum(0), whole)


def single(parts: dict[str, Tensor], expert: int, hidden: Tensor, *, is_fused: bool) -> Tensor:
    if is_fused:
        return forward(hidden, parts["a.experts.gate_up_proj"][expert], parts["a.experts.down_proj"][expert])
    gate, up, down = (parts[f"a.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return forward(hidden, torch.cat((gate, up)), down)


def forward(hidden: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (hidden @ gate_up.T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up @ down.T


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store the experts of each layer as two tensors, as Qwen3.5 is published."""
    stacked = dict(stack_experts(tensors.items(), {name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    num = max(len(stacked[name]) for name in stacked if name.endswith("mlp.gate.weight"))
    kept = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    fused = {name.removesuffix(".weight"): part[:num].clone() for name, part in stacked.items() if ".experts." in name}
    return kept | fused


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    make_model(path, KIND)
    return path


def changed(model_path: Path, path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    (path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    save_file(change(load_file(model_path / "model.safetensors")), path / "model.safetensors")
    return path


def test_fused_experts_are_the_same_target(model_path: Path, tmp_path: Path) -> None:
    fused = changed(model_path, tmp_path, fuse)
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint(fused).tensors
    text = random_prompts((20,), 97)[0]
    one, other = (
        read_features(load_target(open_target(path), placement(), "native"), placement(), 16, text, [0, 3])
        for path in (model_path, fused)
    )
    assert torch.equal(one, other)


def test_layers_for_further_tokens_are_skipped(model_path: Path, tmp_path: Path) -> None:
    def with_mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        layer = {name: part.clone() for name, part in fuse(tensors).items() if ".layers.3." in name}
        renamed = {name.replace("model.layers.3", "mtp.layers.0"): part for name, part in layer.items()}
        return {**tensors, **renamed, "mtp.fc.weight": torch.zeros(32, 64)}

    load_target(open_target(changed(model_path, tmp_path, with_mtp)), placement(), "native")


def test_experts_in_both_forms_are_refused(model_path: Path, tmp_path: Path) -> None:
    path = changed(model_path, tmp_path, lambda tensors: {**tensors, **fuse(tensors)})
    with refuses(UnsupportedError, "tensors-not-applied"):
        load_target(open_target(path), placement(), "native")


def test_an_expert_that_is_missing_is_named(model_path: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"

    def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in tensors.items() if key != name}

    with refuses(TensorMismatch) as refused:
        load_target(open_target(changed(model_path, tmp_path, without)), placement(), "native")
    assert name in refused.value.message


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (KIND, "norm_topk_prob", False),
        (KIND, "mlp_only_layers", [1]),
        (KIND, "decoder_sparse_step", 2),
        (KIND, "shared_expert_intermediate_size", None),
        ("qwen3_next", "shared_expert_intermediate_size", 0),
        ("qwen3_next", "moe_intermediate_size", None),
        ("qwen3_next", "mlp_only_layers", 3),
    ],
)
def test_a_config_that_readers_take_differently_is_refused(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    make_model(tmp_path, kind)
    edit_config(tmp_path, **{key: value})
    with refuses(InvalidConfig, field=key):
        load_target(open_target(tmp_path), placement(), "native")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    """Every layer is built from tensors without values."""
    config, num_parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = target_families()[config["model_type"]]
    read = family.read_config(config, tmp_path / "config.json")  # type: ignore[attr-defined]
    expected = family.expected_shapes(read)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    wanted = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    fused = with_fused_experts(expected, wanted)
    assert fused == wanted
    assert sum(map(math.prod, expected.values())) == sum(map(math.prod, fused.values()))
    assert sum(map(math.prod, fused.values())) == pytest.approx(num_parameters, rel=1e-3)
    on_meta = Placement(torch.device("meta"), torch.bfloat16, REFERENCE, num_positions=16)
    tensors = ((key, torch.empty(shape, device="meta", dtype=torch.bfloat16)) for key, shape in fused.items())
    target = family(read, stack_projections(stack_experts(tensors, fused)), on_meta)
    assert len(target._decoder.layers) == config["num_hidden_layers"]  # type: ignore[attr-defined]
