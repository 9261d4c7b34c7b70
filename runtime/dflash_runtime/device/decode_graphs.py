"""Decode steps captured once as CUDA graphs and replayed: one launch instead of hundreds.

A graph is captured for a bucket of requests and a mode. It reads which requests take part from a buffer of batch rows;
everything else, lengths and pages included, lies in the device state, and what follows from shapes is the same for
every context. A batch smaller than its bucket is filled with the padding row, which is always done: it reads and writes
no KV, and commits nothing.

Axis letters: R requests of a bucket.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepMode:
    """What the host decides of a decode step: how many rows of each block are verified, and how tokens are sampled.

    A verify width of 1 is plain decoding: with no draft to verify, none is made.
    """

    verify_width: int
    is_greedy: bool
    has_filters: bool


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One captured step, the rows that it reads, [R], and the packed results that it writes, [R, ...]."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    packed: Tensor


class DecodeGraphs:
    """Graphs of `decode(rows [R], mode) -> packed results [R, ...]`, captured when they are first asked for.

    All share one pool of memory, since only one runs at a time and its results are copied before the next one does.
    """

    def __init__(self, decode: Callable[[Tensor, StepMode], Tensor], max_requests: int, device: torch.device) -> None:
        self._decode = decode
        self._max_requests = max_requests
        self._padding_row = max_requests
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, StepMode], DecodeGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, rows: Sequence[int], mode: StepMode) -> Tensor:
        """Queue a step of these batch rows -> packed results, which the next replay overwrites."""
        bucket = bucket_of(len(rows), self._max_requests)
        graph = self._graphs.get((bucket, mode)) or self.capture(bucket, mode)
        padded = [*rows, *[self._padding_row] * (bucket - len(rows))]
        graph.rows.copy_(torch.tensor(padded, dtype=torch.int64, pin_memory=True), non_blocking=True)
        graph.graph.replay()
        return graph.packed[: len(rows)]

    def capture(self, bucket: int, mode: StepMode) -> DecodeGraph:
        """Capture one graph. Before that the step runs on padding alone, which compiles kernels and changes nothing."""
        rows = torch.full((bucket,), self._padding_row, dtype=torch.int64, device=self._device)
        self._decode(rows, mode)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            packed = self._decode(rows, mode)
        self._graphs[bucket, mode] = captured = DecodeGraph(graph, rows, packed)
        logger.info("captured a decode step of %d requests (%s)", bucket, mode)
        return captured


def bucket_of(num_requests: int, max_requests: int) -> int:
    """The size of the graph for so many requests, at most a quarter larger: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    grain = max(1, (1 << (num_requests.bit_length() - 1)) // 4)
    return min(-(-num_requests // grain) * grain, max_requests)
