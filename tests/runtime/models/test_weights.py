"""Stacked projections have the rows of their parts in order, and lose none."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.weights import load_weights, stack_projections
from dflash_testing.pairs import bundled_draft, placement, random_draft_config, random_target, random_weights


def draft_weights(**changes: Any) -> dict[str, Tensor]:
    config = random_draft_config(random_target().config, **changes)
    return random_weights(owned_shapes(config), torch.float32, 0)


@pytest.mark.parametrize("order", [1, -1], ids=["as they come", "reversed"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_parts_are_stacked_in_their_own_order(kind: str, order: int) -> None:
    parts = draft_weights(attention_bias=True)
    weights = stack_projections(list(parts.items())[::order])
    for layer in range(2):
        name = f"layers.{layer}.self_attn"
        wanted = torch.cat([parts[f"{name}.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(weights[f"{name}.qkv_proj.{kind}"], wanted)
    gate_up = torch.cat([parts[f"layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(weights["layers.1.mlp.gate_up_proj.weight"], gate_up)


def test_every_number_is_kept_once() -> None:
    parts = draft_weights()
    weights = stack_projections(parts.items())
    assert sum(tensor.numel() for tensor in weights.values()) == sum(tensor.numel() for tensor in parts.values())
    assert not any(f"{part}_proj" in name.split(".") for name in weights for part in ("q", "k", "v", "gate", "up"))


def test_the_parts_of_an_incomplete_stack_keep_their_names() -> None:
    parts = draft_weights()
    del parts["layers.0.mlp.up_proj.weight"]
    weights = stack_projections(parts.items())
    assert "layers.0.mlp.gate_proj.weight" in weights
    assert "layers.0.mlp.gate_up_proj.weight" not in weights


def test_weights_are_loaded_in_the_dtype_of_the_run_and_ids_in_their_own() -> None:
    checkpoint = bundled_draft("tiny:reduced").checkpoint
    weights = load_weights(checkpoint, ["fc.weight", "d2t"], placement(torch.float64))
    assert weights["fc.weight"].dtype == torch.float64
    assert weights["d2t"].dtype == torch.int64
    assert torch.equal(weights["fc.weight"], checkpoint.load("fc.weight").double())


@pytest.mark.parametrize("order", [1, -1], ids=["as they come", "reversed"])
def test_experts_of_a_layer_become_two_tensors(order: int, tmp_path: Path) -> None:
    shapes = {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}
    parts = {
        f"layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": torch.randn(shape)
        for layer in range(2)
        for expert in range(12)
        for part, shape in shapes.items()
    }
    parts["layers.0.mlp.gate.weight"] = torch.randn(12, 4)
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights = load_weights(Checkpoint(tmp_path), list(parts)[::order], placement())
    assert len(weights) == 5
    assert torch.equal(weights["layers.0.mlp.gate.weight"], parts["layers.0.mlp.gate.weight"])
    for layer in range(2):
        name = f"layers.{layer}.mlp.experts"
        for expert in range(12):
            gate, up, down = (parts[f"{name}.{expert}.{part}_proj.weight"] for part in shapes)
            assert torch.equal(weights[f"{name}.gate_up_proj.weight"][expert], torch.cat([gate, up]))
            assert torch.equal(weights[f"{name}.down_proj.weight"][expert], down)


def private_bytes() -> int:
    """Return the bytes of this process's memory that are not mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class MetaReader:
    """Opens a file for the meta device, and records the host's peak memory."""

    peak = 0

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._reader.get_tensor(name)
        tensor.sum()  # read the tensor, as a copy to a device does
        MetaReader.peak = max(MetaReader.peak, private_bytes())
        return tensor.to("meta")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_weights_go_to_the_device_without_a_copy_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While loading a file of 96 MB for a run in another dtype, the host holds at most two tensors."""
    shapes = [f"layers.{index}.self_attn.{part}_proj.weight" for index in range(8) for part in "qkv"]
    save_file({name: torch.zeros(1024, 2048, dtype=torch.bfloat16) for name in shapes}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    devices, safe_open = [], safetensors.safe_open

    @contextmanager
    def open_for_meta(file: Path, *, framework: str, device: str) -> Iterator[MetaReader]:
        devices.append(device)
        with safe_open(file, framework=framework) as reader:
            yield MetaReader(reader)

    monkeypatch.setattr(safetensors, "safe_open", open_for_meta)
    on_meta = Placement(torch.device("meta"), torch.float32, REFERENCE, num_positions=1)
    load_weights(Checkpoint(tmp_path), shapes[:3], on_meta)  # torch allocates some memory at the first call
    before = MetaReader.peak = private_bytes()
    weights = load_weights(Checkpoint(tmp_path), shapes, on_meta)
    assert devices == ["meta", "meta"]
    assert {tensor.shape for tensor in weights.values()} == {(3072, 2048)}
    assert all(tensor.dtype == torch.float32 and tensor.device.type == "meta" for tensor in weights.values())
    assert MetaReader.peak - before < 2 * 2**22
