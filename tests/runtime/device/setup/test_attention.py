"""A backend refuses attention that it lacks, and features that exclude each other are switched off."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.capacity.memory import fit_num_pages
from dflash_runtime.device.setup.attention import BACKENDS, Capability, check_capability
from dflash_runtime.device.setup.settings import apply_exclusions
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError, UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import CPU, bundled_draft_model, bundled_llm, placement, random_draft_config, random_target
from dflash_testing.refusals import refuses

TARGET = random_target().config
CAUSAL_ONLY = {"old": Capability(non_causal=False, non_causal_window=False), "new": Capability()}
NO_WINDOW = {"old": Capability(causal_window=False, non_causal_window=False)}
LACKS = "attention-not-computed"


def draft(**changes: Any) -> Any:
    return random_draft_config(TARGET, **changes)


def test_a_causal_backend_refuses_a_non_causal_draft_and_does_not_serve_it_causally() -> None:
    """vllm#41559."""
    with refuses(UnsupportedError, LACKS, field="draft layer 0", found="non-causal attention") as refused:
        check_capability("old", TARGET, draft(), "float32", backends=CAUSAL_ONLY)
    assert "new" in str(refused.value.hint)
    check_capability("new", TARGET, draft(), "float32", backends=CAUSAL_ONLY)


def test_a_causal_draft_runs_on_a_causal_backend() -> None:
    """vllm#43445: the check is about the checkpoint's own layers, not about usual checkpoints."""
    check_capability("old", TARGET, draft(causal=(True, True)), "float32", backends=CAUSAL_ONLY)
    check_capability("old", TARGET, draft(causal=(True, True), windows=(4, None)), "float32", backends=CAUSAL_ONLY)


def test_one_layer_is_enough_to_be_refused() -> None:
    found = "non-causal attention over a window of 9"
    with refuses(UnsupportedError, LACKS, field="draft layer 1", found=found):
        check_capability("old", TARGET, draft(causal=(True, False), windows=(None, 9)), "float32", backends=CAUSAL_ONLY)


def test_a_backend_without_windows_refuses_windows() -> None:
    found = "causal attention over a window of 9"
    with refuses(UnsupportedError, LACKS, field="draft layer 0", found=found):
        check_capability("old", TARGET, draft(causal=(True, True), windows=(9, 9)), "float32", backends=NO_WINDOW)
    windowed = replace(TARGET, windows=(None, None, 9, None))
    with refuses(UnsupportedError, LACKS, field="target layer 2", found=found):
        check_capability("old", windowed, draft(), "float32", backends=NO_WINDOW)


def test_the_head_size_of_every_layer_is_checked() -> None:
    with refuses(UnsupportedError, "head-size-not-computed", field="head_dim", found=520) as refused:
        check_capability("triton", replace(TARGET, other_kv_shapes={1: (1, 520)}), None, "float32")
    assert "reference" in str(refused.value.hint)
    check_capability("reference", replace(TARGET, other_kv_shapes={1: (1, 520)}), None, "float32")


def test_a_backend_without_sinks_refuses_sinks() -> None:
    backends = {"old": Capability(sinks=False), "new": Capability()}
    found = "non-causal attention with sinks"
    with refuses(UnsupportedError, LACKS, field="draft layer 0", found=found) as refused:
        check_capability("old", TARGET, draft(has_sinks=True), "float32", backends=backends)
    assert "new" in str(refused.value.hint)
    check_capability("old", TARGET, draft(), "float32", backends=backends)
    check_capability("new", TARGET, draft(has_sinks=True), "float32", backends=backends)


def test_a_backend_without_fp8_pages_refuses_fp8_kv() -> None:
    backends = {"old": Capability(fp8_pages=False)}
    check_capability("old", TARGET, draft(), "float32", backends=backends)
    with refuses(UnsupportedError, "fp8-kv-not-computed", field="--kv-dtype", found="fp8"):
        check_capability("old", TARGET, draft(), "float32", has_fp8_pages=True, backends=backends)
    for backend in BACKENDS:
        check_capability(backend, TARGET, draft(), "float32", has_fp8_pages=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_odd_head_size_is_refused_before_a_step_fails(backend: str) -> None:
    with refuses(UnsupportedError, "head-size-not-computed", field="head_dim", found=15, hint=None):
        check_capability(backend, replace(TARGET, other_kv_shapes={1: (1, 15)}), None, "float32")


def test_triton_does_not_compute_in_float64() -> None:
    with refuses(UnsupportedError, "dtype-not-computed", field="dtype", found="float64") as refused:
        check_capability("triton", TARGET, draft(), "float64")
    assert "reference" in str(refused.value.expected)
    assert set(BACKENDS) == {"reference", "triton"}


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("config", "device", "drafts", "changed", "warning"),
    [
        (EngineConfig(), CUDA, 7, {"scheduling": "sync"}, "no-async-scheduling"),
        (
            EngineConfig(draft_sampling="probabilistic"), CPU, 0, {"draft_sampling": "greedy"},
            "no-probabilistic-drafting",
        ),
        (EngineConfig(adaptive_width=True), CPU, 7, {"adaptive_width": False}, "no-adaptive-width"),
    ],
)  # fmt: skip
def test_an_excluded_feature_is_switched_off_with_one_warning(
    config: EngineConfig, device: torch.device, drafts: int, changed: dict[str, Any], warning: str
) -> None:
    found, warnings = apply_exclusions(config, replace(placement(), device=device), drafts)
    assert found == replace(config, **changed)
    assert [item.id for item in warnings] == [warning]


def test_several_features_may_be_excluded_and_nothing_else_changes() -> None:
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


def test_the_pool_has_the_requested_or_the_needed_size() -> None:
    """A page of 16 tokens, 4 layers, 2 heads of 8, keys and values in float32 has 8192 bytes."""
    assert fit_num_pages(EngineConfig(), TARGET, None, LIMITS, placement()) == 4 * 16 + 1
    assert fit_num_pages(EngineConfig(num_pages=9), TARGET, None, LIMITS, placement()) == 9
    assert fit_num_pages(EngineConfig(kv_memory_bytes=8192 * 20 + 5), TARGET, None, LIMITS, placement()) == 20
    with_draft = fit_num_pages(EngineConfig(kv_memory_bytes=8192 * 20), TARGET, draft(), LIMITS, placement())
    assert with_draft == 20 * 8192 // (8192 + 4096)


def test_too_little_memory_for_one_request_is_refused_with_the_bytes() -> None:
    with refuses(CapacityError, "kv-cache-too-small", field="kv_memory_bytes", found=9000) as refused:
        fit_num_pages(EngineConfig(kv_memory_bytes=9000), TARGET, None, LIMITS, placement())
    assert "16384 bytes" in str(refused.value.expected)
    assert "512 bytes per token" in refused.value.message


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"kernels": "cuda"}, {"scheduling": "maybe"}, {"page_size": 0},
                {"gpu_memory_utilization": 1.5}, {"num_pages": 0}, {"draft_sampling": "x"}],
)  # fmt: skip
def test_engine_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    ((field, found),) = changes.items()
    with refuses(UsageError, field=field, found=found):
        EngineConfig(**changes)


def test_float64_runs_on_reference_kernels() -> None:
    llm = bundled_llm(bundled_draft_model(dtype=torch.float64), 7, dtype=torch.float64)
    assert llm.engine.runner.kernels.name == "reference"
