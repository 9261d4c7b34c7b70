"""A backend serves what it says it can; features that exclude each other are settled with one warning."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_runtime.config import EngineConfig
from dflash_runtime.device.attention import BACKENDS, Capability, check_capability
from dflash_runtime.device.exclusions import EXCLUSIONS, Setting, settle
from dflash_runtime.device.settings import fit_num_pages
from dflash_runtime.errors import CapacityError, UnsupportedError, UsageError
from dflash_runtime.scheduling.limits import Limits
from dflash_testing.pairs import bundled_draft_model, bundled_llm, random_draft_config, random_target

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


def test_triton_does_not_compute_in_float64() -> None:
    with pytest.raises(UnsupportedError, match=r"does not compute in float64 \(reference does\)"):
        check_capability("triton", TARGET, draft(), "float64")
    assert set(BACKENDS) == {"reference", "triton"}


def setting(config: EngineConfig, *, device: str = "cpu", kernels: str = "reference", drafts: int = 7) -> Setting:
    return Setting(config, device, kernels, drafts)


EXCLUDED = [
    (setting(EngineConfig(), device="cuda"), {"scheduling": "sync"}),
    (setting(EngineConfig(draft_sampling="probabilistic"), drafts=0), {"draft_sampling": "greedy"}),
]


@pytest.mark.parametrize(("given", "changed"), EXCLUDED)
def test_what_is_excluded_is_switched_off_with_one_warning_naming_both(given: Setting, changed: dict[str, str]) -> None:
    config, warnings = settle(given)
    assert config == replace(given.config, **changed)  # type: ignore[arg-type]
    assert len(warnings) == 1
    exclusion = next(item for item in EXCLUSIONS if item.applies(given))
    assert exclusion.gives_way in warnings[0]
    assert exclusion.because in warnings[0]


def test_every_exclusion_is_tested_and_nothing_else_is_touched() -> None:
    assert len(EXCLUDED) == len(EXCLUSIONS)
    assert settle(setting(EngineConfig())) == (EngineConfig(), [])
    assert settle(setting(EngineConfig(), device="cuda", kernels="triton")) == (EngineConfig(), [])


def test_the_engine_warns_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = bundled_llm(None, 0, draft_sampling="probabilistic")
    assert [record.message for record in caplog.records] == llm.warnings
    assert llm.config.draft_sampling == "greedy"


LIMITS = Limits(num_draft_tokens=7, max_model_len=256, max_num_requests=4, vocab_size=97)
CPU, FP32 = torch.device("cpu"), torch.float32


def test_the_pool_is_what_was_asked_for_or_what_is_needed() -> None:
    """16 tokens of 4 layers, 2 heads of 8, keys and values, float32: 8192 bytes a page."""
    assert fit_num_pages(EngineConfig(), TARGET, None, LIMITS, CPU, FP32) == 4 * 16 + 1
    assert fit_num_pages(EngineConfig(num_pages=9), TARGET, None, LIMITS, CPU, FP32) == 9
    assert fit_num_pages(EngineConfig(kv_memory_bytes=8192 * 20 + 5), TARGET, None, LIMITS, CPU, FP32) == 20
    with_draft = fit_num_pages(EngineConfig(kv_memory_bytes=8192 * 20), TARGET, draft(), LIMITS, CPU, FP32)
    assert with_draft == 20 * 8192 // (8192 + 4096)


def test_too_little_memory_for_one_request_says_so_with_the_arithmetic() -> None:
    message = r"one request needs 2 pages of 16 tokens, 16384 bytes at 512 bytes a token; 9000 bytes are there"
    with pytest.raises(CapacityError, match=message):
        fit_num_pages(EngineConfig(kv_memory_bytes=9000), TARGET, None, LIMITS, CPU, FP32)


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
