"""The copy of a step's results to the host.

Each step packs its results into one small tensor, and queues a copy to pinned memory after its own work. Reading waits
only for that copy. The engine queues later steps before it reads the oldest one, so that the device always has work. A
request may end before its last results are read. The scheduler recognises them by their generation number.

Axis letters: R requests, N block rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.step_rows import NUM_FIELDS
from dflash_runtime.scheduling.batch import Batch, Chunk, StepOutput
from dflash_runtime.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A step in flight: the results that are being copied, its chunks, and its number of target rows."""

    arriving: tuple[tuple[tuple[Request, ...], Tensor], ...]  # requests, [R, NUM_FIELDS + 2N - 1] int64 on the host
    event: torch.cuda.Event | None
    chunks: tuple[Chunk, ...]
    num_rows: int

    @classmethod
    def send(
        cls, parts: Sequence[tuple[Sequence[Request], Tensor | None]], device: torch.device, batch: Batch
    ) -> "PendingForward":
        """Start to copy packed results to the host. The results of a part are None if its requests get no tokens."""
        arriving = tuple((tuple(requests), _sent(packed)) for requests, packed in parts if packed is not None)
        event = torch.cuda.Event() if device.type == "cuda" else None
        if event is not None:
            event.record()
        return cls(arriving, event, batch.chunks, batch.num_rows)

    def read(self) -> list[tuple[Request, StepOutput]]:
        """Wait for the step, and unpack its results."""
        if self.event is not None:
            self.event.synchronize()
        return [
            (request, _unpacked(row))
            for requests, results in self.arriving
            for request, row in zip(requests, results.tolist(), strict=True)
        ]


def _sent(packed: Tensor) -> Tensor:
    """Start to copy results to pinned memory. Results on the CPU are returned as they are."""
    if not packed.is_cuda:
        return packed
    return torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)


def _unpacked(row: Sequence[int]) -> StepOutput:
    """The output in one row of packed results; see `step_rows.pack_results`."""
    num_rows = (len(row) - NUM_FIELDS + 1) // 2
    num_committed, num_accepted, is_drafting, is_done, num_finite, generation = row[:NUM_FIELDS]
    is_finite = num_finite >= num_committed
    token_ids = list(row[NUM_FIELDS : NUM_FIELDS + min(num_committed, num_finite)])
    draft_ids = list(row[NUM_FIELDS + num_rows :]) if is_drafting else []
    accepted = num_accepted if is_drafting else None
    return StepOutput(token_ids, draft_ids, accepted, bool(is_done), generation, is_finite)
