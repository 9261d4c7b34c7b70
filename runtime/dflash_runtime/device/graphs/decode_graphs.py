"""Decode steps captured as CUDA graphs and replayed: one launch instead of hundreds.

Each graph is for a bucket of requests and a mode. It reads the state rows of its requests from a buffer, and lengths,
pages and all other inputs from the device state. A batch smaller than its bucket is padded with the padding row, which
is always done: it reads and writes no KV, and commits nothing.

Axis letters: R requests of a bucket.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from dflash_runtime.device.graphs.graph_memory import GraphMemory
from dflash_runtime.models.hosting.stream_capture import capture_stream, no_collection
from dflash_runtime.models.placement import as_current
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

START_REQUESTS = 256
"""The largest batch with graphs captured at start. Graphs of larger batches are captured when first needed: a capture
takes about as long as one step of the batch, and thousands of such steps follow."""


@dataclass(frozen=True, slots=True)
class StepMode:
    """The host's choices for a step: rows to verify per block, how tokens are sampled, and room for prompt rows.

    With a verify width of 1 the draft does not run; that is plain decoding. With a `mean_width` the step runs as many
    rows for each request on average, the rows with the best survivals. 0 stands for the verify width.
    """

    verify_width: int
    is_greedy: bool
    has_filters: bool
    num_prompt_rows: int = 0
    mean_width: int = 0

    @classmethod
    def of(
        cls, requests: Sequence[Request], verify_width: int = 1, num_prompt_rows: int = 0, mean_width: int = 0
    ) -> "StepMode":
        """The mode of a step that samples tokens for these requests."""
        return cls(
            verify_width=verify_width,
            is_greedy=all(request.params.is_greedy for request in requests),
            has_filters=any(request.params.has_filters for request in requests),
            num_prompt_rows=num_prompt_rows,
            mean_width=mean_width,
        )


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One captured step, the buffer of state rows [R] that it reads, and the results that it writes."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    results: tuple[Tensor, ...]


class DecodeGraphs:
    """Graphs of `decode(rows [R], mode) -> results`, captured at start or when first needed.

    The results are the packed results of the rows, [R, ...], and with room for prompts also of prompts that end.

    All graphs share one memory pool: only one runs at a time, and its results are copied before the next one runs.
    """

    def __init__(
        self,
        decode: Callable[[Tensor, StepMode], tuple[Tensor, ...]],
        max_requests: int,
        device: torch.device,
        *,
        is_shared: bool = False,
    ) -> None:
        # Graphs do not keep their runner alive, so its KV is freed with the last reference to the runner.
        self._decoder = WeakMethod(decode)
        self._max_requests = max_requests
        self.padding_row = max_requests
        self._device = device
        self._pool: Any = None  # torch gives the type of a handle no public name
        # None after a capture without enough memory. Those steps run uncaptured.
        self._graphs: dict[tuple[int, StepMode], DecodeGraph | None] = {}
        self._memory = GraphMemory(device, is_shared=is_shared)

    @property
    def shortage(self) -> Notice | None:
        """A warning if memory did not hold every graph."""
        return self._memory.shortage

    def __len__(self) -> int:
        return len(self.captured)

    @property
    def captured(self) -> tuple[tuple[int, StepMode], ...]:
        """Bucket and mode of every graph, in order of capture."""
        return tuple(key for key, graph in self._graphs.items() if graph is not None)

    def missing(
        self, modes_of: Callable[[int], Iterable[StepMode]], max_requests: int | None = None
    ) -> list[tuple[int, StepMode]]:
        """Bucket and mode of every graph to capture for batches of up to `max_requests`, and at most START_REQUESTS.

        `modes_of` gives the modes of a bucket's steps. The largest bucket comes first, so that smaller buckets reuse
        the memory that its capture has freed.
        """
        limit = min(max_requests or self._max_requests, self._max_requests, START_REQUESTS)
        buckets = sorted({bucket_of(count, self._max_requests) for count in range(1, limit + 1)}, reverse=True)
        return [(bucket, mode) for bucket in buckets for mode in modes_of(bucket) if (bucket, mode) not in self._graphs]

    def padded(self, rows: Sequence[int]) -> list[int]:
        """State rows, padded to the size of their bucket."""
        return [*rows, *[self.padding_row] * (bucket_of(len(rows), self._max_requests) - len(rows))]

    def is_prepared(self, num_requests: int, mode: StepMode) -> bool:
        """Whether the graph of this many requests was captured, or failed to be."""
        return (bucket_of(num_requests, self._max_requests), mode) in self._graphs

    def prepare(self, num_requests: int, mode: StepMode) -> None:
        """Capture the graph of this many requests, if that was not tried yet."""
        if not self.is_prepared(num_requests, mode):
            self.capture(bucket_of(num_requests, self._max_requests), mode)

    def replay(self, rows: Sequence[int], mode: StepMode) -> tuple[Tensor, ...]:
        """Queue a step of these state rows -> its results, which the next replay overwrites."""
        bucket = bucket_of(len(rows), self._max_requests)
        self.prepare(len(rows), mode)
        graph = self._graphs[bucket, mode]
        sent = torch.tensor(self.padded(rows), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        if graph is None:
            results = self._decode(sent.to(self._device, non_blocking=True), mode)
        else:
            graph.rows.copy_(sent, non_blocking=True)
            graph.graph.replay()
            results = graph.results
        return results[0][: len(rows)], *results[1:]

    @torch.inference_mode()
    def capture(self, bucket: int, mode: StepMode) -> DecodeGraph | None:
        """Capture one graph, or note that memory does not hold it.

        First the step runs uncaptured on padding rows, which changes nothing, and on prompts in the step's room, which
        run again later. This rehearsal is needed for every graph: kernels and matrix products depend on the number of
        rows, and none of them may be compiled or loaded during a capture.
        """
        started = time.perf_counter()
        captured = None
        with as_current(self._device), self._memory.attempt(f"decode steps of {bucket} requests run slower"):
            rows = torch.full((bucket,), self.padding_row, dtype=torch.int64, device=self._device)
            self._rehearse(rows, mode)
            captured = DecodeGraph(*self._record(rows, mode))
        self._graphs[bucket, mode] = captured
        if captured is None:
            if not len(self):
                self._pool = None  # torch does not reopen a pool without graphs
            self._memory.give_back()
        else:
            seconds = time.perf_counter() - started
            logger.info("captured a decode step of %d requests in %.2f s (%s)", bucket, seconds, mode)
        return captured

    def _decode(self, rows: Tensor, mode: StepMode) -> tuple[Tensor, ...]:
        decode = self._decoder()
        assert decode is not None, "the runner of these graphs"
        return decode(rows, mode)

    def _rehearse(self, rows: Tensor, mode: StepMode) -> None:
        """Run a step on the capture stream, so that cuBLAS allocates the stream's workspace outside the graphs."""
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(rows, mode)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, rows: Tensor, mode: StepMode) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]:
        """Capture a step -> the graph, its rows and its results. Other threads may use the GPU meanwhile."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device)
        recording = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        # A failed capture may leave its stream as the current stream.
        with no_collection(), torch.cuda.stream(torch.cuda.current_stream()), recording:
            results = self._decode(rows, mode)
        return graph, rows, results


def bucket_of(num_requests: int, max_requests: int) -> int:
    """The bucket of a batch, at most a quarter larger than the batch: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    grain = max(1, (1 << (num_requests.bit_length() - 1)) // 4)
    return min(-(-num_requests // grain) * grain, max_requests)


def kinds_of(params: Sequence[SamplingParams]) -> list[tuple[bool, bool]]:
    """Every (is_greedy, has_filters) of a step with any mix of requests with these parameters."""
    own = sorted({(item.is_greedy, item.has_filters) for item in params}, reverse=True)
    mixes = [mix for size in range(1, len(own) + 1) for mix in combinations(own, size)]
    kinds = [(all(is_greedy for is_greedy, _ in mix), any(has_filters for _, has_filters in mix)) for mix in mixes]
    return list(dict.fromkeys(kinds))
