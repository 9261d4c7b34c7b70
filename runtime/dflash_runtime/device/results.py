"""What a launched step gave, on its way back to the host.

Each step packs its results into one small tensor and copies it to pinned memory behind its own work. Reading waits for
that copy alone, one or two steps after the launch, so the device always has work queued.

Columns of a packed row: kept, accepted, drafted (0 or 1), done (0 or 1), generation, N tokens, N - 1 drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_runtime.scheduling.batch import StepOutput
from dflash_runtime.scheduling.request import Request

NUM_FIELDS = 5


def pack(
    kept: Tensor, accepted: Tensor, drafted: Tensor, done: Tensor, generations: Tensor, tokens: Tensor, drafts: Tensor
) -> Tensor:
    """[R] five times, tokens [R, N], drafts [R, N - 1] -> [R, 5 + 2N - 1] int64."""
    fields = torch.stack((kept, accepted, drafted.to(torch.int64), done.to(torch.int64), generations), dim=1)
    return torch.cat((fields, tokens, drafts), dim=1)


@dataclass(frozen=True, slots=True)
class Launch:
    """A step in flight: whose rows it holds and where its results will be."""

    requests: tuple[Request, ...]
    results: Tensor  # [R, 5 + 2N - 1] int64, on the host
    event: torch.cuda.Event | None

    @classmethod
    def send(cls, requests: Sequence[Request], packed: Tensor) -> "Launch":
        """Start the copy to the host."""
        if packed.device.type != "cuda":
            return cls(tuple(requests), packed, None)
        results = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        results.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(tuple(requests), results, event)

    def read(self) -> list[tuple[Request, StepOutput]]:
        """Wait for the copy and unpack it."""
        if self.event is not None:
            self.event.synchronize()
        num_rows = (self.results.shape[1] - NUM_FIELDS + 1) // 2
        outputs = []
        for request, row in zip(self.requests, self.results.tolist(), strict=True):
            kept, accepted, drafted, done, generation = row[:NUM_FIELDS]
            tokens = row[NUM_FIELDS : NUM_FIELDS + kept]
            drafts = row[NUM_FIELDS + num_rows :] if drafted else []
            outputs.append((request, StepOutput(tokens, drafts, accepted if drafted else None, bool(done), generation)))
        return outputs
