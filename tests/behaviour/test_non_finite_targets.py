"""Every command that runs a target whose weights hold NaN ends with the exit code of malformed weights."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.stored import non_finite
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_testing.command_line import run_main
from dflash_testing.quantised_models import FP8, pack_blocks, quantise

MALFORMED = 3
NAN_IN_E4M3 = 0x7F
RUN = ("--num-prompts", "4", "-n", "12", "--target")
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "x", "-n", "4", "-k", "0", "--target"),
    "eval-acceptance": ("eval-acceptance", "tiny", *RUN),
    "bench": ("bench", "tiny", "--rounds", "1", "--concurrency", "1", *RUN),
    "tune": ("tune", "tiny", "--step-times", "times.json", *RUN),
    "diagnose": ("diagnose", "tiny", *RUN),
    "validate": ("validate", "tiny", "--level", "run", *RUN),
    "dump": ("dump", "--taps", "1", "-o", "dump", *RUN),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target with NaN in one norm."""
    path = tmp_path_factory.mktemp("nan") / "target"
    shutil.copytree(tiny_directory() / "target", path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_nan_is_a_malformed_target(command: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("times.json").write_text('{"plain": {"1": 2.0}, "resized": {"7": {"1": 3.0}}}')
    done = run_main(*COMMANDS[command], target)
    assert done.code == MALFORMED, done
    assert f"{target / 'model.safetensors'}: the target gave non-finite logits" in done.err
    assert "model.norm.weight holds NaN" in done.err


def test_nan_in_a_native_target_of_fp8(tmp_path: Path) -> None:
    path = tmp_path / "target"
    quantise(path, "qwen3", pack_blocks, FP8)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8)[-1, -1] = NAN_IN_E4M3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n')
    done = run_main("generate", "-k", "0", "-n", "4", "--target", path, "-p", prompts)
    assert done.code == MALFORMED, done
    assert f"{name} holds NaN" in done.err


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_tensor_with_a_number_that_is_not_finite(
    dtype: torch.dtype, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search reads in pieces, and takes the largest finite numbers for finite."""
    monkeypatch.setattr(non_finite, "CHUNK_BYTES", 64)
    (tmp_path / "config.json").write_text("{}")
    largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    broken = torch.cat([-largest, largest[:1] * value])
    save_file({"a": largest, "b": largest.short()}, tmp_path / "model.safetensors")
    assert non_finite.NonFiniteWeights(Checkpoint(tmp_path)).first is None
    save_file({"a": largest, "c": broken, "d": broken.clone()}, tmp_path / "model.safetensors")
    found = non_finite.NonFiniteWeights(Checkpoint(tmp_path)).first
    assert found is not None
    assert (found.name, found.file) == ("c", tmp_path / "model.safetensors")


def test_weights_that_overflow_in_the_run(tmp_path: Path) -> None:
    """All numbers of the file are finite, and the hint names the option that helps."""
    path = tmp_path / "target"
    shutil.copytree(tiny_directory() / "target", path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1e38)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    done = run_main(*COMMANDS["generate"], path)
    assert done.code == MALFORMED, done
    assert "the weights are finite" in done.err
