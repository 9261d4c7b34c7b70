"""Every command that runs a target whose weights hold NaN ends with the exit code of malformed weights."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.references import tiny_directory
from dflash_testing import checkpoints as support
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
    done = support.run_main(*COMMANDS[command], target)
    assert done.code == MALFORMED, done
    assert "non-finite" in done.err


def test_nan_in_a_native_target_of_fp8(tmp_path: Path) -> None:
    path = tmp_path / "target"
    quantise(path, "qwen3", pack_blocks, FP8)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8)[0, 0] = NAN_IN_E4M3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n')
    done = support.run_main("generate", "-k", "0", "-n", "4", "--target", path, "-p", prompts)
    assert done.code == MALFORMED, done
