"""Captures that run out of memory: their memory is freed, and one warning says which steps run slower."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_runtime.device.capacity.memory import is_out_of_memory
from dflash_runtime.notices import Notice

logger = logging.getLogger(__name__)


class GraphMemory:
    """Whether the device memory held all CUDA graphs of one kind.

    With `is_shared`, other ranks capture the same steps, and a capture that fails on one of them is an error.
    """

    def __init__(self, device: torch.device, *, is_shared: bool = False) -> None:
        self._device = device
        self._is_shared = is_shared
        self.shortage: Notice | None = None

    @contextmanager
    def attempt(self, slower: str) -> Iterator[None]:
        """Run a capture. If memory runs out, raise nothing and set `shortage`; `slower` says what runs slower now."""
        try:
            yield
        except Exception as error:
            # After a failed capture, ending the capture fails too. The first error is then the context of the second.
            if self._is_shared or not any(map(is_out_of_memory, (error, error.__context__))):
                raise
            logger.info("out of memory during a capture: %s", slower)
            if self.shortage is None:
                self.shortage = Notice(
                    f"{slower}, because memory does not hold their CUDA graphs: lower --gpu-memory-utilization, "
                    "--kv-memory or --concurrency",
                    id="no-memory-for-graphs",
                )
                logger.warning(self.shortage)

    def give_back(self) -> None:
        """Free the memory of a failed capture, after the last reference to it is gone."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
