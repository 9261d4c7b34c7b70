"""The device of a name."""

import pytest
import torch

from dflash_runtime.device.setup.settings import resolve_device
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_testing.refusals import refuses


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs. The second GPU is current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize(
    ("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)], ids=["auto", "cuda", "first", "second"]
)
def test_a_device_has_a_number(name: str, index: int) -> None:
    """Without a number it would mean the device that is current when a step is launched."""
    assert resolve_device(name) == torch.device("cuda", index)


@pytest.mark.usefixtures("_two_devices")
def test_an_absent_gpu_is_refused() -> None:
    with refuses(UnsupportedError, field="device", found="cuda:2"):
        resolve_device("cuda:2")


@pytest.mark.usefixtures("_two_devices")
def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with refuses(UnsupportedError, field="device") as refused:
        resolve_device("cuda:1")
    assert "Tesla T4" in str(refused.value.found)
    assert "7.5" in str(refused.value.found)


def test_an_unknown_name_is_refused() -> None:
    with refuses(UsageError, field="device", found="tpu"):
        resolve_device("tpu")
    with refuses(UnsupportedError, field="device", found="meta"):
        resolve_device("meta")
