"""What becomes of a capture that memory does not hold: it is given back, and said once what runs slower for it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_runtime.device.memory import is_out_of_memory

logger = logging.getLogger(__name__)


class GraphMemory:
    """Whether memory has held all graphs of a kind that were asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.shortage: str | None = None  # a warning, where it has not

    @contextmanager
    def attempt(self, slower: str) -> Iterator[None]:
        """Capture in here; where memory runs out, `slower` says what is from then on, and nothing is raised."""
        try:
            yield
        except Exception as error:
            # Ending a capture that has failed fails as well.
            if not any(map(is_out_of_memory, (error, error.__context__))):
                raise
            logger.info("no memory for a capture: %s", slower)
            if self.shortage is None:
                self.shortage = (
                    f"{slower}, since memory does not hold their CUDA graphs: lower --gpu-memory-utilization, "
                    "--kv-memory or --max-num-requests"
                )
                logger.warning(self.shortage)

    def give_back(self) -> None:
        """Let others have what a failed attempt has taken, once nothing of it is left."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
