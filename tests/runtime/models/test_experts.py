"""The router chooses the experts that transformers chooses, and both ways of computing them agree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from dflash_kernels.suite import REFERENCE, KernelChoice, pick_kernels, triton_kernels
from dflash_runtime.models import layers
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.experts import Experts
from dflash_runtime.target_config import ExpertsConfig
from dflash_testing.gpu import detecting_syncs
from dflash_testing.pairs import random_target
from dflash_testing.tensors import assert_rows_close

HIDDEN, INNER, NUM_EXPERTS = 32, 16, 11


def make(is_normalised: bool, num_chosen: int = 3) -> tuple[Qwen3MoeSparseMoeBlock, Experts]:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=num_chosen,
        norm_topk_prob=is_normalised,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    weights = {
        "mlp.gate.weight": block.gate.weight.detach(),
        "mlp.experts.gate_up_proj.weight": block.experts.gate_up_proj.detach(),
        "mlp.experts.down_proj.weight": block.experts.down_proj.detach(),
    }
    chosen = ExpertsConfig(
        num_experts=NUM_EXPERTS,
        num_chosen=num_chosen,
        intermediate_size=INNER,
        has_normalised_scores=is_normalised,
        layers=(0,),
    )
    return block, Experts.read(weights, "mlp", chosen, REFERENCE)


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def plain(matrix: object) -> Tensor:
    assert isinstance(matrix, Tensor)
    return matrix


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice_and_scores_equal_those_in_transformers(is_normalised: bool, dtype: torch.dtype) -> None:
    """They are equal bit for bit: a score is rounded at the same point as in transformers."""
    block, experts = make(is_normalised)
    hidden = rows(50, dtype)
    with torch.inference_mode():
        _, scores, chosen = block.gate.to(dtype)(hidden)
        found = Experts(experts.router.to(dtype), experts.gate_up, experts.down, 3, is_normalised).choose(hidden)
    assert torch.equal(found[0], chosen)
    assert torch.equal(found[1], scores)


@pytest.mark.parametrize("num_chosen", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_both_ways_compute_what_transformers_computes(count: int, num_chosen: int) -> None:
    """Few rows leave most experts without a row. With many rows, some experts have most of the rows."""
    block, experts = make(True, num_chosen)
    hidden = rows(count)
    with torch.inference_mode():
        wanted = block(hidden[None])[0]
        chosen, scores = experts.choose(hidden)
        for found in (experts.one_by_one(hidden, chosen, scores), experts.grouped(hidden, chosen, scores).sum(0)):
            assert_rows_close(found, wanted.double(), torch.float32)


def make_shared(shared: int) -> tuple[Qwen3NextSparseMoeBlock, Experts]:
    """A block with a shared expert, and its experts, loaded as from a checkpoint."""
    sizes: dict[str, Any] = {"moe_intermediate_size": INNER, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 3}
    config = Qwen3NextConfig(hidden_size=HIDDEN, shared_expert_intermediate_size=shared, norm_topk_prob=True, **sizes)
    config._experts_implementation = "eager"
    block = Qwen3NextSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    tensors = {f"mlp.{name}": tensor.detach() for name, tensor in block.named_parameters()}
    weights = dict(stack_experts(tensors.items(), {name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    chosen = ExpertsConfig(
        num_experts=NUM_EXPERTS, num_chosen=3, intermediate_size=INNER, has_normalised_scores=True, layers=(0,),
        shared_size=shared,
    )  # fmt: skip
    return block, Experts.read(weights, "mlp", chosen, REFERENCE)


@pytest.mark.parametrize("shared", [INNER, INNER // 2, 3 * INNER])
def test_a_shared_expert_is_computed_with_the_others(shared: int) -> None:
    block, experts = make_shared(shared)
    hidden = rows(9)
    with torch.inference_mode():
        wanted = block(hidden[None])[0]
        chosen, scores = experts.choose(hidden)
        for found in (experts.one_by_one(hidden, chosen, scores), experts.grouped(hidden, chosen, scores).sum(0)):
            assert_rows_close(found, wanted.double(), torch.float32)


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [1, 7])
def test_our_kernels_compute_a_shared_expert(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert has a part of its own, after the parts of the chosen experts."""
    monkeypatch.setattr(Experts, "is_grouped", True)
    block, experts = make_shared(INNER)
    hidden = rows(count)
    with torch.inference_mode():
        wanted, shared = block(hidden[None])[0], block.shared_expert(hidden)
        parts = replace(experts, kernels=triton_kernels())(hidden)
        gate = block.shared_expert_gate(hidden).sigmoid()
    assert len(parts) == 4
    assert_rows_close(parts[-1], (gate * shared).double(), torch.float32)
    assert_rows_close(parts.sum(0), wanted.double(), torch.float32)


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [1, 7])
def test_our_kernels_compute_what_what_transformers_computes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result has one part per chosen expert, which the next norm sums."""
    monkeypatch.setattr(Experts, "is_grouped", True)
    block, experts = make(True)
    hidden = rows(count)
    with torch.inference_mode():
        wanted = block(hidden[None])[0]
        parts = replace(experts, kernels=triton_kernels())(hidden)
    assert len(parts) == 3
    assert_rows_close(parts.sum(0), wanted.double(), torch.float32)


def test_a_layer_passes_its_kernels_to_its_experts() -> None:
    experts = make(True)[1]
    names = ("gate", "experts.gate_up_proj", "experts.down_proj")
    factors = (experts.router, experts.gate_up, experts.down)
    weights = {f"mlp.{name}.weight": plain(factor) for name, factor in zip(names, factors, strict=True)}
    chosen = ExpertsConfig(
        num_experts=NUM_EXPERTS, num_chosen=3, intermediate_size=INNER, has_normalised_scores=True, layers=(0,)
    )
    config = replace(random_target().config, experts=chosen)
    kernels = replace(REFERENCE, name="others")
    mlp = layers.read_mlp(weights, "mlp", config, kernels)
    assert isinstance(mlp, Experts)
    assert mlp.kernels is kernels


def test_rows_do_not_depend_on_their_neighbours() -> None:
    _, experts = make(True)
    hidden = rows(20)
    together = experts(hidden)[0]
    for row in range(20):
        assert_rows_close(experts(hidden[row : row + 1])[0], together[row : row + 1].double(), torch.float32)


def fake(hidden_size: int = HIDDEN, inner: int = INNER, num_chosen: int = 3) -> Experts:
    """Return experts of tensors without values, for use under a `FakeTensorMode`."""
    shapes = ((NUM_EXPERTS, hidden_size), (NUM_EXPERTS, 2 * inner, hidden_size), (NUM_EXPERTS, hidden_size, inner))
    router, gate_up, down = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    return Experts(router, gate_up, down, num_chosen, has_normalised_scores=True)


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("count", [1, 16, 512])
def test_a_grouped_product_follows_from_shapes(count: int, num_shared: int) -> None:
    """Code that reads a value for a shape or a branch raises an error on tensors without values."""
    with FakeTensorMode():
        experts, hidden = fake(), torch.empty(count, HIDDEN, dtype=torch.bfloat16)
        experts = replace(experts, num_shared=num_shared)  # the last of the experts, and of the router's rows
        assert experts.grouped(hidden, *experts.choose(hidden)).shape == (1, *hidden.shape)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            experts.one_by_one(hidden, *experts.choose(hidden))


@pytest.mark.parametrize(
    ("capability", "widths", "is_grouped", "is_captured"),
    [
        ((9, 0), (32, 16), True, True),
        ((10, 0), (2048, 768), True, True),
        ((8, 0), (32, 16), True, False),
        ((12, 0), (32, 16), True, False),
        ((9, 0), (32, 12), False, False),
        ((9, 0), (36, 16), False, False),
    ],
)
def test_a_step_is_captured_if_the_grouped_product_is_one_launch(
    capability: tuple[int, int],
    widths: tuple[int, int],
    is_grouped: bool,
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's grouped product needs aligned weights, and is one launch on some GPUs only."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        experts = fake(*widths)
        assert (experts.is_grouped, experts.follows_from_shapes) == (is_grouped, is_captured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_experts_is_not_captured_on_the_cpu(dtype: torch.dtype) -> None:
    experts = replace(make(True)[1], down=torch.zeros(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype))
    assert not experts.is_grouped
    assert not experts.follows_from_shapes


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 16, 300])
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("num_shared", [0, 1])
def test_grouped_products_never_synchronise_with_the_host(count: int, name: KernelChoice, num_shared: int) -> None:
    """A captured graph in bfloat16, replayed on other rows, computes the experts of these rows."""
    experts = make_shared(INNER)[1] if num_shared else make(True)[1]
    router, gate_up, down = (
        plain(tensor).to("cuda", torch.bfloat16) for tensor in (experts.router, experts.gate_up, experts.down)
    )
    experts = replace(experts, router=router, gate_up=gate_up, down=down, kernels=pick_kernels(name, "cuda"))
    hidden, other = (rows(size, torch.bfloat16).cuda()[-count:] for size in (count, count + 1))
    experts(hidden)
    torch.cuda.synchronize()
    with detecting_syncs():
        experts(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routes, found = experts.choose(hidden), experts(hidden).sum(0)
    hidden.copy_(other)
    graph.replay()
    for replayed, now in zip(routes, experts.choose(hidden), strict=True):
        assert torch.equal(replayed, now)
    wanted = experts.one_by_one(hidden, *experts.choose(hidden))
    assert_rows_close(found, wanted.double(), torch.bfloat16)
