"""Unsorted or repeated taps are refused if readers sort them. --normalise-taps sorts them and keeps the logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion import tap_order as taps_module
from dflash_cli.conversion.logits import verify_logits
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses

FORMATS = ("native", "speculators", "vllm", "sglang", "mlx")


def source(tmp_path: Path, taps: tuple[int, ...], dtype: torch.dtype = torch.float32, *, steps: bool = False) -> Path:
    """A draft with these taps. With `steps`, the projection holds multiples of 1/8, so their sums are exact."""
    shape = support.Shape(taps=taps)
    path = tmp_path / "source"
    path.mkdir()
    support.write_config(path, support.native_config(shape, dtype=str(dtype).removeprefix("torch.")))
    arrays = {name: torch.from_numpy(array) for name, array in support.body_arrays(shape).items()}
    if steps:
        arrays["fc.weight"] = (arrays["fc.weight"] * 8).round() / 8
    save_file({name: tensor.to(dtype) for name, tensor in arrays.items()}, path / "model.safetensors")
    return path


def arguments(path: Path, out: Path, to: str, *more: str) -> list[str]:
    return ["convert", str(path), str(out), "--to", to, "--target-name", "acme/target", *more]


@pytest.mark.parametrize("to", ["speculators", "vllm", "sglang"])
@pytest.mark.parametrize("taps", [(2, 0), (0, 2, 2)])
def test_refused_if_readers_sort(to: str, taps: tuple[int, ...], tmp_path: Path) -> None:
    outcome = invoke(*arguments(source(tmp_path, taps), tmp_path / "out", to))
    assert (outcome.code, outcome.error_id) == (5, "unsorted-taps")
    assert outcome.error is not None
    assert outcome.error.found == list(taps)
    assert "--normalise-taps" in str(outcome.error.hint)


def test_kept_with_a_warning_if_readers_follow_the_file(tmp_path: Path) -> None:
    outcome = invoke(*arguments(source(tmp_path, (2, 0)), tmp_path / "out", "native"))
    assert (outcome.code, outcome.notices) == (0, ("unsorted-taps",))
    assert open_draft(tmp_path / "out").config.target_layer_ids == (2, 0)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("taps", [(2, 0), (3, 1, 0, 2), (0, 2, 0)])
def test_in_order_with_equal_logits(to: str, taps: tuple[int, ...], tmp_path: Path) -> None:
    path = source(tmp_path, taps, steps=True)
    outcome = invoke(*arguments(path, tmp_path / "out", to, "--normalise-taps", "--verify", "logits", "--json"))
    assert outcome.code == 0, outcome.err
    manifest = json.loads(outcome.out)
    result = open_draft(tmp_path / "out")
    assert result.config.target_layer_ids == tuple(sorted(set(taps)))
    assert manifest["logits"]["max_difference"] < 1e-5
    assert manifest["logits"]["same_best_share"] == 1
    entry = next(item for item in manifest["tensors"] if item["to"] == "fc.weight")
    assert entry["change"] == "derived"
    assert verify_logits(open_draft(path), result).largest_logit > 0


def test_a_permutation_moves_bytes_and_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps_module, "_torch_dtype", None)
    path = source(tmp_path, (2, 0), torch.bfloat16)
    support.convert(path, tmp_path / "out", "native", normalise_taps=True)
    before, after = (load_file(place / "model.safetensors")["fc.weight"] for place in (path, tmp_path / "out"))
    assert torch.equal(after, torch.cat([before[:, 16:], before[:, :16]], dim=1))


@pytest.mark.parametrize("piece", [1, 100, 10**6])
def test_pieces_of_any_size(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps_module, "PIECE_BYTES", piece)
    path = source(tmp_path, (1, 0, 1), torch.bfloat16, steps=True)
    support.convert(path, tmp_path / "out", "native", normalise_taps=True)
    before, after = (load_file(place / "model.safetensors")["fc.weight"] for place in (path, tmp_path / "out"))
    first, middle, last = before.split(16, dim=1)
    assert torch.equal(after, torch.cat([middle, first + last], dim=1))


class TestRounding:
    """Sums that the element type rounds are refused, unless --allow-lossy rounds them."""

    def test_refused(self, tmp_path: Path) -> None:
        path = source(tmp_path, (0, 0), torch.bfloat16)
        outcome = invoke(*arguments(path, tmp_path / "out", "native", "--normalise-taps"))
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "taps-rounded", "fc.weight")
        assert not (tmp_path / "out").exists()

    def test_rounded_on_demand(self, tmp_path: Path) -> None:
        path = source(tmp_path, (0, 0), torch.bfloat16)
        outcome = invoke(*arguments(path, tmp_path / "out", "native", "--normalise-taps", "--allow-lossy"))
        assert outcome.code == 0
        assert "taps-rounded" in outcome.notices
        before, after = (load_file(place / "model.safetensors")["fc.weight"] for place in (path, tmp_path / "out"))
        assert torch.equal(after, (before[:, :16].double() + before[:, 16:].double()).bfloat16())

    def test_packed_blocks_cannot_be_added(self, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "source", support.Shape(taps=(2, 0)))
        arrays: dict[str, Any] = support.body_arrays(support.Shape(taps=(2, 0)))
        arrays["fc.weight"] = arrays["fc.weight"].astype(np.int8)
        support.write_checkpoint(path, support.native_config(support.Shape(taps=(2, 0))), arrays)
        outcome = invoke(*arguments(path, tmp_path / "out", "native", "--normalise-taps"))
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "quantised-weights", "fc.weight")


def test_ascending_taps_are_left_alone(tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "source")
    support.convert(path, tmp_path / "out", "native", normalise_taps=True)
    support.assert_same_tensors(path, tmp_path / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_a_last_layer_tap_is_kept_and_warned_about(to: str, tmp_path: Path) -> None:
    path = source(tmp_path, (0, 3))
    outcome = invoke(*arguments(path, tmp_path / "out", to))
    assert (outcome.code, outcome.notices) == (0, ("last-layer-tapped",))
    assert open_draft(tmp_path / "out").config.target_layer_ids == (0, 3)


def test_a_made_tensor_that_differs_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is compared with a newly computed projection."""
    from dflash_cli.checkpoints import safetensors_writer
    from dflash_cli.conversion import execute
    from dflash_cli.conversion.execute import convert_draft
    from dflash_cli.conversion.plan import plan_conversion
    from dflash_cli.conversion.spec import ConversionSpec
    from dflash_runtime.checkpoint.stored.safetensors_header import read_header
    from dflash_runtime.errors import GateFailed

    copy = safetensors_writer.write_tensors

    def corrupt(destination: Path, *args: Any) -> None:
        copy(destination, *args)
        at = read_header(destination)["fc.weight"].begin
        with destination.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"\x01\x02")

    monkeypatch.setattr(execute, "write_tensors", corrupt)
    plan = plan_conversion(open_draft(source(tmp_path, (2, 0))), ConversionSpec(to="native", normalise_taps=True))
    with refuses(GateFailed, "result-differs", field="fc.weight"):
        convert_draft(plan, tmp_path / "out")
