"""The memory estimate from headers equals the tensors that a loaded engine holds."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.targets.hf_config import read_target_config
from dflash_runtime.device.capacity import memory
from dflash_runtime.device.capacity.memory_estimate import estimate_memory, plan_for_gpu
from dflash_runtime.device.capacity.memory_parts import MemoryParts
from dflash_runtime.device.setup.loading import plan_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import PairMismatch, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.models import target_loading, weights
from dflash_runtime.models.target import target_families
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses

Pair = tuple[Path, Path]
TINY = tiny_directory()
PAIRS = ROOT / "tests" / "data" / "pairs"
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


def moe_pair(folder: Path) -> Pair:
    """A random mixture of experts, with the shapes that its config asks for, and a draft for it."""
    config = support.target_config(**EXPERTS)
    facts = read_target_config(config, folder)
    arrays = support.random_arrays(target_families()["qwen3_moe"].expected_shapes(facts))
    return support.write_checkpoint(folder / "target", config, arrays), support.make_native(folder / "draft")


def pair_of(name: str, folder: Path) -> Pair:
    """The folders of the target and the draft of a pair."""
    known = {
        "bundled": (TINY / "target", TINY / "draft"),
        "reduced": (TINY / "target", TINY / "draft-reduced"),
        "windowed": (PAIRS / "windowed" / "target", PAIRS / "windowed" / "draft"),
        "hybrid": (PAIRS / "hybrid" / "target", PAIRS / "hybrid" / "draft"),
    }
    return moe_pair(folder) if name == "experts" else known[name]


def num_bytes(tensors: Any) -> int:
    """Bytes of distinct tensors."""
    stores = {item.untyped_storage().data_ptr(): item for item in tensors if isinstance(item, Tensor)}
    return sum(item.untyped_storage().nbytes() for item in stores.values())


@pytest.mark.parametrize("name", ["bundled", "reduced", "windowed", "hybrid", "experts"])
def test_the_estimate_equals_the_tensors_of_an_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, pages, states and snapshots are equal to the byte; no length is a multiple of the page size."""
    target, draft = pair_of(name, tmp_path)
    sources = open_target(target), open_draft(draft)
    config = EngineConfig(device="cpu", dtype="bfloat16", max_model_len=51, max_num_requests=3)
    found = estimate_memory(plan_pair(*sources, config), draft=str(draft), target=str(target))

    loaded: list[Any] = []
    load = weights.load_weights

    def load_weights(*given: Any, **named: Any) -> Any:
        loaded.append(load(*given, **named))
        return loaded[-1]

    monkeypatch.setattr(target_loading, "load_weights", load_weights)
    runner = (llm := LLM(*sources, config)).engine.runner
    assert llm.pair.draft_weights is not None
    assert runner.draft_kv is not None
    states, snapshots = 0, 0
    if runner.states is not None:
        states, snapshots = num_bytes(runner.states.all_layers), num_bytes(runner.states.pool.snapshots)
        assert min(states, snapshots) > 0
    assert (runner.states is not None) == (name == "hybrid")
    assert dict(found.parts) == {
        "target": num_bytes(loaded[0].values()),
        "draft": num_bytes(llm.pair.draft_weights.values()),
        "kv_pages": runner.target_kv.pages.nbytes + runner.draft_kv.pages.nbytes,
        "states": states,
        "snapshots": snapshots,
        "steps": found.parts["steps"],
    }
    assert found.num_pages == 3 * 4 + 1
    assert found.total_bytes == sum(found.parts.values())
    assert sum(item.token_bytes for item in found.layers) == found.token_bytes


def estimate(name: str, gpu_bytes: int | None = None, **config: Any) -> MemoryParts:
    target, draft = pair_of(name, Path())
    plan = plan_for_gpu(open_target(target), open_draft(draft), EngineConfig(**config))
    return estimate_memory(plan, draft="draft", target="target", gpu_bytes=gpu_bytes)


def test_one_request_more_than_fits_exceeds_the_memory() -> None:
    gpu = estimate("bundled", 2**30, max_model_len=100).gpu
    assert gpu is not None
    least, most = (estimate("bundled", max_model_len=100, max_num_requests=gpu.most_requests + more) for more in (0, 1))
    assert least.total_bytes <= gpu.usable_bytes < most.total_bytes


def test_a_request_takes_the_memory_that_one_more_request_adds() -> None:
    """Pages are added one request at a time, so rounding and page 0 do not change the difference."""
    few, many = (estimate("hybrid", max_model_len=51, max_num_requests=count) for count in (3, 4))
    added = sum(many.parts[name] - few.parts[name] for name in ("kv_pages", "states"))
    assert added == few.request_bytes == many.request_bytes


def test_memory_that_holds_no_request_fits_none() -> None:
    gpu = estimate("bundled", 2**20).gpu
    assert gpu is not None
    assert gpu.most_requests == 0


def test_fp8_pages_take_half_the_bytes() -> None:
    plain, narrow = (estimate("bundled", kv_dtype=kind) for kind in ("auto", "fp8"))
    assert 2 * narrow.parts["kv_pages"] == plain.parts["kv_pages"]
    assert narrow.kv_dtype == "float8_e4m3fn"


def test_windows_are_listed_and_pages_keep_their_tokens() -> None:
    """A layer with a window takes as many bytes per token as a layer without one."""
    layers = [item for item in estimate("windowed").layers if item.model == "draft"]
    assert [(item.window, item.num_layers) for item in layers] == [(12, 2), (None, 1)]
    assert len({item.token_bytes / item.num_layers for item in layers}) == 1


def test_a_plan_needs_neither_a_gpu_nor_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "load_many", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(memory, "available_bytes", lambda: pytest.fail("free memory was asked for"))
    assert estimate("bundled", 2**30).gpu is not None


def test_refusals_are_those_of_a_run(tmp_path: Path) -> None:
    with refuses(UsageError, field="max_model_len", found=10**6):
        estimate("bundled", max_model_len=10**6)
    draft = open_draft(support.make_native(tmp_path / "draft"))
    with pytest.raises(PairMismatch):
        plan_for_gpu(open_target(TINY / "target"), draft, EngineConfig())


def test_the_cache_of_a_target_with_its_own_is_named_and_not_guessed() -> None:
    found = estimate("bundled", 2**30, target_runtime="transformers-cache")
    assert (found.target_runtime, len(found.not_counted), found.gpu) == ("transformers-cache", 1, None)
    assert {item.model for item in found.layers} == {"draft"}
