"""Settings of all tests: threads, the interpreter of Triton, and skipped tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator

import pytest

# A draft names its target. Looking the target up must not ask the hub; tests of the hub start a server of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torch's TCPStore asks the DNS for the names of addresses, also of 127.0.0.1. By default a lost answer costs 5 to 10 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Python keeps bytecode even if the environment forbids it. Otherwise each process of a test compiles this project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. The process that only distributes tests does not import torch."""
    # A shell makes its background processes ignore Ctrl-C. Commands that tests interrupt would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    gc.disable()  # until all tests are collected: imported modules stay in memory
    import torch

    # Threads do not speed up small models. Two processes that spin for the same cores are ten times slower.
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    from dflash_testing.interpreter import quicken

    quicken()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that this machine cannot run."""
    import torch

    from dflash_kernels.launch import HAS_TRITON, IS_INTERPRETED

    requirements = (
        ("gpu", torch.cuda.is_available(), "needs a CUDA device"),
        ("triton", HAS_TRITON, "needs Triton"),
        ("interpreter", IS_INTERPRETED, "needs Triton's interpreter"),
    )
    for item in items:
        for marker, is_met, reason in requirements:
            if not is_met and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection: they stay until the end."""
    _freeze()
    gc.set_threshold(20_000, 20, 20)  # tests make many objects and few cycles
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Exclude objects that outlive a file of tests from garbage collection, which takes seconds for all of them."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()
    return result


def _freeze() -> None:
    gc.collect()
    gc.freeze()
