"""Settings every test shares. They must be made before torch starts threads and before Triton is imported."""

import gc
import os
import signal
import sys

import pytest

# A draft names its target, and looking for it must ask nobody; tests of the hub start a server of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Bytecode is kept whatever the environment says, or each process that a test starts compiles this project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; the one that only hands them out needs no torch."""
    # What a shell starts in the background ignores Ctrl-C, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    gc.disable()  # until all tests are collected: what is imported stays
    import torch

    # Small models gain nothing from threads, and two processes that spin for the same cores lose a factor of ten.
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from dflash_testing.interpreter import quicken

    quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Let no later search for garbage look through what was imported and collected: it stays to the end."""
    gc.collect()
    gc.freeze()
    gc.enable()
