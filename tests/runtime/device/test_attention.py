"""A backend serves what it says it can; features that exclude each other are switched off with one warning."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_kernels.suite import REFERENCE
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.attention import BACKENDS, Capability, check_capability
from dflash_runtime.device.memory import fit_num_pages
from dflash_runtime.device.settings import apply_exclusions
from dflash_runtime.errors import CapacityError, UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing.pairs import CPU, bundled_draft_model, bundled_llm, placement, random_draft_config, random_target

TARGET = random_target().config
CAUSAL_ONLY = {"old": Capability(non_causal=False, non_causal_window=False), "new": Capability()}
NO_WINDOW = {"old": Capability(causal_window=False, non_causal_window=False)}


def draft(**changes: Any) -> Any:
    return random_draft_config(TARGET, **changes)


def test_a_non_causal_draft_is_refused_by_a_causal_backend_not_served_causally() -> None:
    """vllm#41559."""
    with pytest.raises(UnsupportedError, match=r"draft layer 0 needs non-causal attention, which the old backend"):
        check_capability("old", TARGET, draft(), "float32", backends=CAUSAL_ONLY)
    check_capability("new", TARGET, draft(), "float32", backends=CAUSAL_ONLY)


def test_a_causal_draft_runs_on_a_causal_backend() -> None:
    """vllm#43445: the check asks what the checkpoint needs, not what most checkpoints need."""
    check_capability("old", TARGET, draft(causal=(True, True)), "float32", backends=CAUSAL_ONLY)
    check_capability("old", TARGET, draft(causal=(True, True), windows=(4, None)), "float32", backends=CAUSAL_ONLY)


def test_one_layer_is_enough_to_be_refused() -> None:
    with pytest.raises(UnsupportedError, match="draft layer 1 needs non-causal attention over a window of 9"):
        check_capability("old", TARGET, draft(causal=(True, False), windows=(None, 9)), "float32", backends=CAUSAL_ONLY)


def test_a_causal_draft_with_a_window_is_refused_where_windows_are_not_served() -> None:
    with pytest.raises(UnsupportedError, match="causal attention over a window of 9"):
        check_capability("old", TARGET, draft(causal=(True, True), windows=(9, 9)), "float32", backends=NO_WINDOW)
    windowed = replace(TARGET, windows=(None, None, 9, None))
    with pytest.raises(UnsupportedError, match="target layer 2"):
        check_capability("old", windowed, draft(), "float32", backends=NO_WINDOW)


def test_every_layers_head_size_is_looked_at() -> None:
    with pytest.raises(UnsupportedError, match="head_dim 520"):
        check_capability("triton", replace(TARGET, other_kv_shapes={1: (1, 520)}), None, "float32")


def test_triton_does_not_compute_in_float64() -> None:
    with pytest.raises(UnsupportedError, match=r"does not compute in float64 \(reference does\)"):
        check_capability("triton", TARGET, draft(), "float64")
    assert set(BACKENDS) == {"reference", "triton"}


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("config", "device", "drafts", "changed", "named"),
    [
        (EngineConfig(), CUDA, 7, {"scheduling": "sync"}, ("asynchronous scheduling", "reference kernels on a GPU")),
        (
            EngineConfig(draft_sampling="probabilistic"), CPU, 0, {"draft_sampling": "greedy"},
            ("probabilistic drafting", "plain decoding"),
        ),
        (
            EngineConfig(adaptive_width=True), CPU, 7, {"adaptive_width": False},
            ("adaptive width", "steps without CUDA graphs"),
        ),
    ],
)  # fmt: skip
def test_what_is_excluded_is_switched_off_with_one_warning_naming_both(
    config: EngineConfig, device: torch.device, drafts: int, changed: dict[str, Any], named: tuple[str, str]
) -> None:
    found, warnings = apply_exclusions(config, replace(placement(), device=device), drafts)
    assert found == replace(config, **changed)
    assert len(warnings) == 1
    assert all(name in warnings[0] for name in named)


def test_both_exclusions_may_apply_and_nothing_else_is_touched() -> None:
    both = EngineConfig(draft_sampling="probabilistic")
    _, warnings = apply_exclusions(both, replace(placement(), device=CUDA), 0)
    assert len(warnings) == 2
    on_triton = replace(placement(), device=CUDA, kernels=replace(REFERENCE, name="triton"))
    for config in (EngineConfig(), both):
        assert apply_exclusions(config, placement(), 7) == (config, ())
        assert apply_exclusions(config, on_triton, 7) == (config, ())
    adaptive = EngineConfig(adaptive_width=True)
    assert apply_exclusions(adaptive, on_triton, 7) == (adaptive, ())
    assert apply_exclusions(replace(adaptive, graphs=False), on_triton, 7)[1]


def test_loading_warns_and_the_engine_runs(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device="cpu", num_draft_tokens=0, draft_sampling="probabilistic", num_pages=9)
    with caplog.at_level(logging.WARNING):
        llm = LLM(open_target(tiny_directory() / "target"), None, config)
    assert tuple(record.message for record in caplog.records) == llm.warnings
    assert len(llm.warnings) == 1
    assert llm.pair.config.draft_sampling == "greedy"
    assert llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3))[0].error is None


LIMITS = Limits(num_draft_tokens=7, max_model_len=256, max_num_requests=4, vocab_size=97)


def test_the_pool_is_what_was_asked_for_or_what_is_needed() -> None:
    """16 tokens of 4 layers, 2 heads of 8, keys and values, float32: 8192 bytes a page."""
    assert fit_num_pages(EngineConfig(), TARGET, None, LIMITS, placement()) == 4 * 16 + 1
    assert fit_num_pages(EngineConfig(num_pages=9), TARGET, None, LIMITS, placement()) == 9
    assert fit_num_pages(EngineConfig(kv_memory_bytes=8192 * 20 + 5), TARGET, None, LIMITS, placement()) == 20
    with_draft = fit_num_pages(EngineConfig(kv_memory_bytes=8192 * 20), TARGET, draft(), LIMITS, placement())
    assert with_draft == 20 * 8192 // (8192 + 4096)


def test_too_little_memory_for_one_request_says_so_with_the_arithmetic() -> None:
    message = (
        r"one request needs 2 pages of 16 tokens, 16384 bytes at 512 bytes per token, but only 9000 bytes are free"
    )
    with pytest.raises(CapacityError, match=message):
        fit_num_pages(EngineConfig(kv_memory_bytes=9000), TARGET, None, LIMITS, placement())


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"kernels": "cuda"}, {"scheduling": "maybe"}, {"page_size": 0},
                {"gpu_memory_utilization": 1.5}, {"num_pages": 0}, {"draft_sampling": "x"}],
)  # fmt: skip
def test_engine_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        EngineConfig(**changes)


def test_float64_is_served_by_the_references() -> None:
    llm = bundled_llm(bundled_draft_model(dtype=torch.float64), 7, dtype=torch.float64)
    assert llm.engine.runner.kernels.name == "reference"
