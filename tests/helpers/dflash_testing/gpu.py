"""The bundled pair on a GPU, and a detector of synchronisation with the device."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_testing.walking_drafts import stored_draft


def gpu_llm(name: str | None, dtype: str, **engine: Any) -> LLM:
    """Return an LLM of the bundled target and a bundled draft, or one of KINDS. None gives no draft."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_pages": 3000} | engine
    config = EngineConfig(**settings)
    draft = stored_draft(name) if name is not None else None
    return LLM(open_target(tiny_directory() / "target"), draft, config)


def require_single_worker() -> None:
    """Skip the rest of a test, which reads the driver's free memory, if other workers of this run use the device.

    The driver counts the memory of all processes. `pytest -m gpu -n 0` runs such tests whole.
    """
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("other workers use the same device memory: run it with -n 0")


@contextmanager
def detecting_syncs() -> Iterator[None]:
    """Raise an error when the host waits for the device."""
    try:
        with warnings.catch_warnings():  # torch warns that the detector is a prototype
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
