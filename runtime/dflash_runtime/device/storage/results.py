"""The copy of a step's results to the host.

Each step packs its results into one small tensor, and queues a copy to pinned memory after its own work. Reading waits
only for that copy. The engine queues later steps before it reads the oldest one, so that the device always has work. A
request may end before its last results are read. The scheduler recognises them by their generation number.

Axis letters: R requests, W verified rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.steps.step_rows import NUM_FIELDS
from dflash_runtime.device.shared_rows import UNVERIFIED
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.scheduling.batch import Batch, Chunk, StepOutput
from dflash_runtime.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A step in flight: the results that are being copied, its chunks, its number of target rows, and W."""

    arriving: tuple[tuple[tuple[Request, ...], Tensor], ...]  # requests, [R, ...] int64 on the host
    event: torch.cuda.Event | None
    chunks: tuple[Chunk, ...]
    num_rows: int
    verify_width: int

    @classmethod
    def send(
        cls, parts: Sequence[tuple[Sequence[Request], Tensor | None]], device: torch.device, batch: Batch
    ) -> "PendingForward":
        """Start to copy packed results to the host. The results of a part are None if its requests get no tokens."""
        arriving = tuple((tuple(requests), _sent(packed)) for requests, packed in parts if packed is not None)
        event = torch.cuda.Event() if device.type == "cuda" else None
        if event is not None:
            event.record()
        return cls(arriving, event, batch.chunks, batch.num_rows, batch.verify_width)

    def read(self, ranks: Ranks = ALONE) -> list[tuple[Request, StepOutput]]:
        """Wait for the step, and unpack its results. Raises the errors of `Ranks.wait`."""
        ranks.wait(self.event)
        return [
            (request, output)
            for requests, results in self.arriving
            for request, output in zip(requests, _unpacked(results, self.verify_width), strict=True)
        ]


def with_confidences(packed: Tensor, confidences: Tensor | None) -> Tensor:
    """Return packed results [R, ...] with the bits of the draft's confidences [R, W - 1] in further columns."""
    return packed if confidences is None else torch.cat((packed, confidences.double().view(torch.int64)), dim=1)


def _sent(packed: Tensor) -> Tensor:
    """Start to copy results to pinned memory. Results on the CPU are returned as they are."""
    if not packed.is_cuda:
        return packed
    return torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)


def _unpacked(results: Tensor, verify_width: int) -> list[StepOutput]:
    """The outputs in packed results [R, ...]; see `step_rows.pack_results` and `with_confidences`.

    A prompt's first token is a part of width 1.
    """
    width = verify_width if results.shape[1] > NUM_FIELDS + 1 else 1
    num_columns = NUM_FIELDS + 2 * width - 1
    confidences = read_confidences(results[:, num_columns:].view(torch.float64))
    rows = results[:, :num_columns].tolist()
    return [_output(row, width, own) for row, own in zip(rows, confidences, strict=True)]


def read_confidences(values: Tensor) -> list[tuple[float | None, ...]]:
    """Return the confidences of each row of a host or device tensor [R, K], with None for NaN."""
    return [tuple(None if math.isnan(value) else value for value in row) for row in values.tolist()]


def _output(row: Sequence[int], width: int, confidences: tuple[float | None, ...]) -> StepOutput:
    num_committed, num_accepted, is_drafting, is_done, num_finite, generation = row[:NUM_FIELDS]
    draft_ids = list(row[NUM_FIELDS + width :])
    if UNVERIFIED in draft_ids:
        draft_ids = draft_ids[: draft_ids.index(UNVERIFIED)]
    return StepOutput(
        token_ids=list(row[NUM_FIELDS : NUM_FIELDS + min(num_committed, num_finite)]),
        draft_ids=draft_ids if is_drafting else [],
        num_accepted=num_accepted if is_drafting else None,
        is_done=bool(is_done),
        generation=generation,
        is_finite=num_finite >= num_committed,
        confidences=confidences if is_drafting else (),
    )
