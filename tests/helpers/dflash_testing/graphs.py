"""Captured steps without a GPU: stand-ins for CUDA graphs that run their step again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dflash_runtime.device.graphs.cache_graphs import Outputs, Record
from dflash_runtime.device.graphs.decode_graphs import DecodeGraphs, StepMode
from dflash_runtime.llm import LLM

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StandInGraph:
    """Stand-in for a CUDA graph: `replay` runs the step again."""

    run: Callable[[], tuple[Tensor, ...]]
    results: tuple[Tensor, ...]

    def replay(self) -> None:
        for old, new in zip(self.results, self.run(), strict=True):
            old.copy_(new)


class StandInGraphs(DecodeGraphs):
    """`DecodeGraphs` with stand-ins instead of captured graphs. Buckets in `refused` fail for lack of memory."""

    def __init__(self, decode: Callable[[Tensor, StepMode], tuple[Tensor, ...]], max_requests: int) -> None:
        super().__init__(decode, max_requests, CPU)
        self.refused: set[int] = set()
        self.attempts: list[tuple[int, StepMode]] = []

    def replay(self, rows: Sequence[int], mode: StepMode) -> tuple[Tensor, ...]:
        """Return copies of the results: a GPU copies them to the host before the next replay."""
        return tuple(item.clone() for item in super().replay(rows, mode))

    def _rehearse(self, rows: Tensor, mode: StepMode) -> None:
        self._decode(rows, mode)

    def _record(self, rows: Tensor, mode: StepMode) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]:
        self.attempts.append((len(rows), mode))
        if len(rows) in self.refused:
            raise torch.OutOfMemoryError("CUDA out of memory")
        results = self._decode(rows, mode)
        graph: Any = StandInGraph(lambda: self._decode(rows, mode), results)
        return cast(torch.cuda.CUDAGraph, graph), rows, results


def with_stand_ins(llm: LLM) -> StandInGraphs:
    """Make an LLM on the CPU replay its steps with stand-ins."""
    runner = llm.engine.runner
    runner.graphs = graphs = StandInGraphs(runner._decode, llm.limits.max_num_requests)
    llm.engine.scheduler.load.keeps_to_ridge = True
    return graphs


def rerunning(device: torch.device) -> Record:
    """Records a forward as a call that overwrites the results of the first one."""

    def record(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        first = run()

        def replay() -> None:
            again = run()
            pairs = [(first.hidden, again.hidden), *((first.tails[path], again.tails[path]) for path in first.tails)]
            if first.features is not None and again.features is not None:
                pairs.append((first.features, again.features))
            for ours, theirs in pairs:
                ours.copy_(theirs)

        return replay, first

    return record
