"""Grids of all launches with 4,096 requests and 16 rows each: within the GPU's limit of programs per axis."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.launch_config import MAX_GRID
from dflash_kernels.mixtures.mixture_config import MAX_EXPERT_ROWS
from dflash_kernels.steps.step_rows import Bounds, RowState
from dflash_kernels.suite import triton_kernels
from dflash_runtime.device.setup.settings import resolve_limits
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_testing.launches import seen_launches
from dflash_testing.pairs import random_target

R, N, KV, D, V, LAYERS = 4096, 16, 8, 16, 151_936, 8
T = R * N
FIRST_AXIS = 2**31 - 1


def floats(*shape: int) -> Tensor:
    """Return a tensor with all rows in the same memory. Nothing is computed in these tests."""
    return torch.zeros(shape[-1]).expand(shape)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def doubles(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


def attention() -> None:
    block, cache = floats(R, N, KV, D), floats(4, 16, KV, D)
    triton_kernels().block_attention(
        floats(R, N, 2 * KV, D), block, block, cache, cache, ints(R, 40), ints(R),
        is_causal=False, window=None,
    )  # fmt: skip


def context_kv() -> None:
    table, cache = floats(T, D), floats(LAYERS, 4, 16, KV, D)
    triton_kernels().context_kv_store(
        floats(T, LAYERS, 2, KV, D), floats(LAYERS, D), 1e-6, table, table, cache, cache, ints(T)
    )


def kv_store() -> None:
    rows, cache = floats(T, KV, D), floats(4, 16, KV, D)
    triton_kernels().kv_store(rows, rows, cache, cache, ints(T))


def rope_store() -> None:
    place = KVPlace(floats(4, 16, KV, D), floats(4, 16, KV, D), ints(T))
    parts, norms = floats(1, T, 5 * KV * D), floats(4 * KV, D)
    triton_kernels().rope_store(parts, norms, 1e-6, floats(T, D), floats(T, D), KV, place)


def chosen_experts() -> None:
    rows = MAX_EXPERT_ROWS
    gate_up, down = torch.zeros(128, 2 * D, 64), torch.zeros(128, 64, D)
    triton_kernels().experts(floats(rows, 64), gate_up, down, ints(rows, 8), torch.zeros(rows, 8))


def open_step() -> None:
    done, field = torch.zeros(R, dtype=torch.bool), ints(R)
    state = RowState(done, field, field, field, field, field, field, ints(R, 16), ints(R, 40))
    bounds = Bounds(max_model_len=600, last_draft_len=500, page_size=16, mask_id=0)
    triton_kernels().open_step(state, field, N, N, bounds)


LAUNCHES: dict[str, Callable[[], object]] = {
    "open_step": open_step,
    "kv_store": kv_store,
    "rms_norm": lambda: triton_kernels().rms_norm(floats(T, 64), floats(64), 1e-6),
    "add_rms_norm": lambda: triton_kernels().add_rms_norm(floats(2, T, 64), floats(T, 64), floats(64), 1e-6),
    "rope_store": rope_store,
    "gated_product": lambda: triton_kernels().gated_product(floats(T, 64), floats(128, 64)),
    "choose_experts": lambda: triton_kernels().choose_experts(floats(T, 64), floats(128, 64), 8, True),
    "experts": chosen_experts,
    "context_kv_store": context_kv,
    "block_attention": attention,
    "locate_rows": lambda: triton_kernels().locate_rows(ints(R, 4), ints(1), ints(1), ints(1), T, 16),
    "sample": lambda: triton_kernels().sample(
        floats(T, V), doubles(T), ints(T), doubles(T), ints(T), ints(T), has_filters=False
    ),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_axis_is_within_its_limit(name: str) -> None:
    with seen_launches(compute="nothing") as launches:
        LAUNCHES[name]()
    assert launches
    for launch in launches:
        first, *others = launch.grid
        assert 0 < first <= FIRST_AXIS, launch
        assert all(0 < axis <= MAX_GRID for axis in others), launch


@pytest.mark.reference
def test_more_requests_than_the_grid_of_attention_allows_are_refused_at_start() -> None:
    target = random_target(num_kv_heads=4).config
    assert resolve_limits(EngineConfig(max_num_requests=4096), target, None).max_num_requests == 4096
    with pytest.raises(UsageError, match="16383"):
        resolve_limits(EngineConfig(max_num_requests=16_384), target, None)
