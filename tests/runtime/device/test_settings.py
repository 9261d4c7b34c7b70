"""Which device a name stands for."""

import pytest
import torch

from dflash_runtime.device.settings import resolve_device
from dflash_runtime.errors import UnsupportedError


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, of which the second is current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize(
    ("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)], ids=["auto", "cuda", "first", "second"]
)
def test_a_gpu_is_known_by_its_number(name: str, index: int) -> None:
    """Another device may be current when a step is launched."""
    assert resolve_device(name) == torch.device("cuda", index)


@pytest.mark.usefixtures("_two_devices")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2")
