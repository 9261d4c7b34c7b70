"""Decode steps captured once as CUDA graphs and replayed: one launch instead of hundreds.

A graph is captured for a bucket of requests and a mode. It reads which requests take part from a buffer of batch rows;
everything else, lengths and pages included, lies in the device state, and what follows from shapes is the same for
every context. A batch smaller than its bucket is filled with the padding row, which is always done: it reads and writes
no KV, and commits nothing.

Axis letters: R requests of a bucket.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from dflash_runtime.device.graph_memory import GraphMemory
from dflash_runtime.models.placement import as_current
from dflash_runtime.scheduling.request import Request, SamplingParams

logger = logging.getLogger(__name__)

START_REQUESTS = 256
"""The largest batch whose graphs are captured at start. Those of larger ones are when they first come: to capture one
takes about as long as such a step, of which thousands follow."""


@dataclass(frozen=True, slots=True)
class StepMode:
    """The host's choices for a step: rows to verify per block, how tokens are sampled, and room for prompt rows.

    A verify width of 1 is plain decoding: there is no draft to verify, so the draft does not run.
    """

    verify_width: int
    is_greedy: bool
    has_filters: bool
    num_prompt_rows: int = 0

    @classmethod
    def of(cls, requests: Sequence[Request], verify_width: int = 1, num_prompt_rows: int = 0) -> "StepMode":
        """The mode of a step that samples tokens for these requests."""
        return cls(
            verify_width=verify_width,
            is_greedy=all(request.params.is_greedy for request in requests),
            has_filters=any(request.params.has_filters for request in requests),
            num_prompt_rows=num_prompt_rows,
        )


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One captured step, the rows that it reads, [R], and what it writes: see `DecodeGraphs`."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    results: tuple[Tensor, ...]


class DecodeGraphs:
    """Graphs of `decode(rows [R], mode) -> results`, captured at start or when first asked for.

    Results are packed: those of the rows, [R, ...], and in a step with room for prompts those of prompts that end.

    All share one pool of memory, since only one runs at a time and its results are copied before the next one does.
    """

    def __init__(
        self, decode: Callable[[Tensor, StepMode], tuple[Tensor, ...]], max_requests: int, device: torch.device
    ) -> None:
        # A runner has its graphs and not the other way round: its KV is freed as soon as nobody uses the runner.
        self._decoder = WeakMethod(decode)
        self._max_requests = max_requests
        self.padding_row = max_requests
        self._device = device
        self._pool: Any = None  # torch gives the type of a handle no public name
        # None where memory did not hold a graph: such steps are launched one by one.
        self._graphs: dict[tuple[int, StepMode], DecodeGraph | None] = {}
        self._memory = GraphMemory(device)

    @property
    def shortage(self) -> str | None:
        """A warning, where memory held not all that was asked for."""
        return self._memory.shortage

    def __len__(self) -> int:
        return len(self.captured)

    @property
    def captured(self) -> tuple[tuple[int, StepMode], ...]:
        """Bucket and mode of every graph, in the order they were captured."""
        return tuple(key for key, graph in self._graphs.items() if graph is not None)

    def missing(
        self, modes_of: Callable[[int], Iterable[StepMode]], max_requests: int | None = None
    ) -> list[tuple[int, StepMode]]:
        """What has to be captured so that batches up to `max_requests`, and START_REQUESTS, find their graph.

        `modes_of` says which modes steps of a bucket can have. The largest bucket comes first: smaller ones then fit
        into the memory it has freed.
        """
        limit = min(max_requests or self._max_requests, self._max_requests, START_REQUESTS)
        buckets = sorted({bucket_of(count, self._max_requests) for count in range(1, limit + 1)}, reverse=True)
        return [(bucket, mode) for bucket in buckets for mode in modes_of(bucket) if (bucket, mode) not in self._graphs]

    def padded(self, rows: Sequence[int]) -> list[int]:
        """Batch rows, filled up to the size of their bucket."""
        return [*rows, *[self.padding_row] * (bucket_of(len(rows), self._max_requests) - len(rows))]

    def replay(self, rows: Sequence[int], mode: StepMode) -> tuple[Tensor, ...]:
        """Queue a step of these batch rows -> its results, which the next replay overwrites."""
        bucket = bucket_of(len(rows), self._max_requests)
        if (bucket, mode) not in self._graphs:
            self.capture(bucket, mode)
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

        Before that the step runs on padding alone, which changes nothing; with prompts that are laid out already, as
        it will again. It is run for every graph, not once a mode: kernels are specialised and matrix products chosen by
        the number of rows, and neither may be compiled or loaded while a graph is captured.
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
                self._pool = None  # torch does not open a pool again that no graph has
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
        """Run a step where it is to be captured, so that what cuBLAS keeps for that stream lies outside the graphs."""
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(rows, mode)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, rows: Tensor, mode: StepMode) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]:
        """Capture a step -> the graph, its rows and its results. What other threads do meanwhile is their affair."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device)
        recording = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        # A capture that fails may leave its stream the current one.
        with no_collection(), torch.cuda.stream(torch.cuda.current_stream()), recording:
            results = self._decode(rows, mode)
        return graph, rows, results


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: the graphs of an engine that was forgotten are freed then, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which its graphs are captured; torch's own belongs to whichever device came first."""
    return torch.cuda.Stream(device)


def bucket_of(num_requests: int, max_requests: int) -> int:
    """The size of the graph for so many requests, at most a quarter larger: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    grain = max(1, (1 << (num_requests.bit_length() - 1)) // 4)
    return min(-(-num_requests // grain) * grain, max_requests)


def kinds_of(params: Sequence[SamplingParams]) -> list[tuple[bool, bool]]:
    """How steps can be sampled whose requests have these parameters, in any mix: whether greedy, whether filtered."""
    own = sorted({(item.is_greedy, item.has_filters) for item in params}, reverse=True)
    mixes = [mix for size in range(1, len(own) + 1) for mix in combinations(own, size)]
    kinds = [(all(is_greedy for is_greedy, _ in mix), any(has_filters for _, has_filters in mix)) for mix in mixes]
    return list(dict.fromkeys(kinds))
