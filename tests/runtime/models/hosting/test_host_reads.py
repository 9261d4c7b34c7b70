"""Operations that a CUDA graph cannot contain are found on the CPU, and keep a hosted target from being captured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.device.setup.loading import hosted_warnings, load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.models.hosting import hosted_capture
from dflash_runtime.models.hosting.host_reads import find_host_read
from dflash_testing.hosted_models import host, make_model

READS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda rows: rows[0].item(), "_local_scalar_dense"),
    "branch": (lambda rows: 1 if rows.sum() > 0 else 2, "_local_scalar_dense"),
    "range": (lambda rows: torch.arange(int(rows.max())), "_local_scalar_dense"),
    "list": (lambda rows: rows.tolist(), "tolist"),
    "copy": (lambda rows: rows.cpu(), "cpu"),
    "nonzero": (lambda rows: rows.nonzero(), "nonzero"),
    "where": (lambda rows: torch.where(rows > 1), "nonzero"),
    "mask": (lambda rows: rows[rows > 1], "index"),
    "mask of an assignment": (lambda rows: rows.clone().index_put_((rows > 1,), torch.tensor(2.0)), "index_put_"),
    "selection": (lambda rows: rows.masked_select(rows > 1), "masked_select"),
    "unique": (lambda rows: rows.unique(), "_unique2"),
    "repeats": (lambda rows: rows.repeat_interleave(rows.long()), "repeat_interleave"),
    "numbers": (lambda rows: torch.tensor([1, 2], device=rows.device), "tensor"),
    "new numbers": (lambda rows: rows.new_tensor([1, 2]), "new_tensor"),
}
SAFE: dict[str, Callable[[Tensor], object]] = {
    "products": lambda rows: rows[:, None] @ rows[None],
    "rows by index": lambda rows: rows[torch.arange(2)],
    "choice": lambda rows: torch.where(rows > 1, rows, 0),
    "best": lambda rows: rows.topk(2).indices.sort(),
    "repeats": lambda rows: rows.repeat_interleave(2),
    "repeats of a known number": lambda rows: rows.repeat_interleave(rows.long(), output_size=6),
    "constant on the host": lambda rows: rows * torch.tensor(2.0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_found(name: str) -> None:
    read, operation = READS[name]
    with torch.inference_mode():
        found = find_host_read(lambda: read(torch.tensor([1.0, 2.0, 3.0])))
    assert found is not None
    assert found.operation == operation
    assert found.place.startswith("test_host_reads.py")


@pytest.mark.parametrize("name", SAFE)
def test_other_operations_are_not(name: str) -> None:
    assert find_host_read(lambda: SAFE[name](torch.tensor([1.0, 2.0, 3.0]))) is None


def test_a_target_that_reads_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own code reads a value. The target still runs, and a warning names the operation."""
    from transformers.models.olmoe import modeling_olmoe

    make_model(tmp_path, "olmoe")
    theirs = modeling_olmoe.OlmoeSparseMoeBlock.forward

    def reading(self: Any, hidden_states: Tensor) -> Any:
        hidden_states.sum().item()
        return theirs(self, hidden_states)

    monkeypatch.setattr(modeling_olmoe.OlmoeSparseMoeBlock, "forward", reading)
    target = host(tmp_path)
    assert target.uncaptured is not None
    assert (target.uncaptured.id, target.uncaptured.field) == ("target-reads-on-host", "_local_scalar_dense")
    assert not target.follows_from_shapes
    slow, why = hosted_warnings(target, can_be_captured=True)
    assert (slow.id, why.id, why.field) == ("slow-target", "target-reads-on-host", "_local_scalar_dense")
    assert [item.id for item in hosted_warnings(target, can_be_captured=False)] == ["slow-target"]
    pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", max_model_len=64))
    assert [item.id for item in pair.warnings] == ["slow-target"]


def test_a_captured_target_is_not_called_slow(tmp_path: Path) -> None:
    make_model(tmp_path, "olmoe")
    assert [item.id for item in hosted_warnings(host(tmp_path), can_be_captured=True)] == ["hosted-target"]


@pytest.mark.gpu
@pytest.mark.parametrize(("is_stale", "id"), [(False, None), (True, "target-capture-differs")])
def test_a_replay_is_compared_on_a_gpu(id: str | None, *, is_stale: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    seen: list[Tensor] = []

    def run(token_ids: Tensor, positions: Tensor) -> Tensor:
        """A stale forward is captured with the ids of the call before."""
        is_old = is_stale and torch.cuda.is_current_stream_capturing()
        ids = seen[-1] if is_old else token_ids
        seen.append(token_ids.clone())
        return (ids[:, None] + positions[:, None] * torch.ones(3, device=device)).float()

    found = hosted_capture.why_not_captured(run, 50, 40, device)
    assert (None if found is None else found.id) == id


@pytest.mark.gpu
def test_a_failing_capture_is_named_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def run(token_ids: Tensor, positions: Tensor) -> Tensor:
        torch.cuda.synchronize(device)
        return token_ids[:, None].float() * positions[:, None]

    found = hosted_capture.why_not_captured(run, 50, 40, device)
    assert found is not None
    assert found.id == "target-capture-fails"
    assert torch.ones(2, device=device).sum().item() == 2  # the device still works
