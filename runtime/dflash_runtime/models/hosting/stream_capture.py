"""Capture CUDA graphs on a stream of their own, without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection. During a capture it could free graphs of another engine, which breaks the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures on a device. torch's default capture stream is on the device that captured first."""
    return torch.cuda.Stream(device)
