"""Every command that runs a pair refuses what the device or the kernels cannot compute, with exit code 5."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_testing import checkpoints as support
from dflash_testing.command_line import run_main

PROMPT = '{"prompt_token_ids": [5, 6, 7]}\n'
COMMANDS = {
    "generate": ("generate",),
    "eval-acceptance": ("eval-acceptance",),
    "bench": ("bench", "--concurrency", "1"),
    "tune": ("tune", "--concurrency", "1"),
    "diagnose": ("diagnose",),
    "validate": ("validate", "--level", "run"),
}


def refused(command: str, folder: Path, *more: object) -> tuple[int, str | None]:
    """Exit code and id of the refusal of a command that runs the pair of a folder on the CPU."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(PROMPT * 4)
    draft = ("--draft", folder / "draft") if command == "generate" else (folder / "draft",)
    done = run_main(*COMMANDS[command], *draft, "--target", folder / "target", "--prompts", prompts, *more)
    return done.code, None if done.error is None else done.error.id


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    support.make_native(tmp_path / "draft")
    support.make_target(tmp_path / "target")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_an_odd_head_size(command: str, pair: Path) -> None:
    support.make_native(pair / "odd", replace(support.SMALL, head_dim=15))
    (pair / "draft").rename(pair / "even")
    (pair / "odd").rename(pair / "draft")
    assert refused(command, pair, "--device", "cpu") == (5, "head-size-not-computed")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gpu_that_is_too_old(command: str, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "is_available": True, "device_count": 1, "get_device_capability": (7, 5), "get_device_name": "old",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert refused(command, pair, "--device", "cuda") == (5, "gpu-too-old")


@pytest.mark.interpreter
@pytest.mark.parametrize("command", ["generate", "eval-acceptance", "bench", "tune"])
def test_a_dtype_that_triton_kernels_do_not_compute(command: str, pair: Path) -> None:
    more = ("--device", "cpu", "--kernels", "triton", "--dtype", "float64")
    assert refused(command, pair, *more) == (5, "dtype-not-computed")


def test_a_target_with_an_odd_head_size_is_not_called_native(tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", replace(support.SMALL, head_dim=15))
    assert how_it_runs(open_target(target)).runtime == "transformers-cache"
