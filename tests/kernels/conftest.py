"""Tests of the kernels: they need Triton, and fresh memory holds NaN, so that no test passes by luck."""

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_kernels

SENTINEL = -1515870811


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as tests that launch kernels, except those marked `reference`."""
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder) and not item.get_closest_marker("reference"):
            item.add_marker(pytest.mark.triton)


class PoisonedTorch:
    """torch with another `empty`: fresh tensors hold NaN, a sentinel or True."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        made = torch.empty(*args, **options)
        if made.dtype == torch.bool:
            return made.fill_(True)
        return made.fill_(torch.nan if made.is_floating_point() else SENTINEL)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for info in pkgutil.walk_packages(dflash_kernels.__path__, "dflash_kernels."):
        module = importlib.import_module(info.name)
        if hasattr(module, "torch"):
            monkeypatch.setattr(module, "torch", PoisonedTorch())
