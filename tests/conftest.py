"""Settings every test shares. They must be made before torch starts threads and before Triton is imported."""

import os

import torch

# A draft names its target, and looking for it must ask nobody; tests of the hub start a server of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Small models gain nothing from threads, and two processes that spin for the same cores lose a factor of ten.
torch.set_num_threads(1)

import pytest  # noqa: E402

from dflash_testing.interpreter import remember_builtins  # noqa: E402

if not torch.cuda.is_available():
    remember_builtins()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
