"""Fresh memory in the kernels is never zero by luck: here it is NaN, or a number nobody wants."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_kernels

SENTINEL = -1515870811


class PoisonedTorch:
    """torch, but what it calls empty is full of poison."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        made = torch.empty(*args, **options)
        if made.dtype == torch.bool:
            return made.fill_(True)
        return made.fill_(torch.nan if made.is_floating_point() else SENTINEL)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for info in pkgutil.iter_modules(dflash_kernels.__path__, "dflash_kernels."):
        module = importlib.import_module(info.name)
        if hasattr(module, "torch"):
            monkeypatch.setattr(module, "torch", PoisonedTorch())
