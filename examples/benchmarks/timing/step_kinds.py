"""Times of the steps of a run, grouped by the number of decoding requests and of prompt rows."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

import torch

from dflash_runtime.device.runner import Runner
from dflash_runtime.device.storage.results import PendingForward
from dflash_runtime.scheduling.batch import Batch
from timing.report import Row

BORDERS = (0, 64, 128, 256, 512, 768, 1024, 2048, 4096)
"""Upper limits of prompt rows per kind. The last kind has more."""

REQUESTS = (0, 15, 47)
"""Upper limits of decoding requests per kind."""


@dataclass(frozen=True)
class SeenStep:
    """One step: its requests and rows, the host's launch time, and its start and end on the device."""

    num_decoding: int
    verify_width: int
    num_prompt_rows: int
    host_ms: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    @property
    def device_ms(self) -> float:
        """Milliseconds from the first launch to the end. On the CPU: the host's time."""
        return self.host_ms if self.events is None else self.events[0].elapsed_time(self.events[1])

    @property
    def kind(self) -> tuple[int, int]:
        """Indices of its kind, by requests and by prompt rows."""
        return bisect_left(REQUESTS, self.num_decoding), bisect_left(BORDERS, self.num_prompt_rows)


@dataclass
class StepKinds:
    """The steps that a watched runner received."""

    steps: list[SeenStep] = field(default_factory=list)

    @contextmanager
    def watching(self, runner: Runner) -> Iterator[None]:
        """Record every step of the runner in the block."""
        submit, is_cuda = runner.submit, runner.device.type == "cuda"

        def watched(batch: Batch) -> PendingForward | None:
            events = (_event(), _event()) if is_cuda else None
            started = time.perf_counter()
            if events is not None:
                events[0].record()
            pending = submit(batch)
            if events is not None:
                events[1].record()
            host_ms = (time.perf_counter() - started) * 1000
            self.steps.append(SeenStep(len(batch.decode), batch.verify_width, batch.num_prompt_rows, host_ms, events))
            return pending

        runner.submit = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            del runner.submit

    def rows(self) -> list[Row]:
        """One row per kind, with means per step."""
        kinds: dict[tuple[int, int], list[SeenStep]] = {}
        for step in self.steps:
            kinds.setdefault(step.kind, []).append(step)
        return [
            {
                "requests": _name(requests, REQUESTS), "prompt_rows": _name(rows, BORDERS), "steps": len(steps),
                "mean_requests": fmean(step.num_decoding for step in steps),
                "mean_block_rows": fmean(step.num_decoding * step.verify_width for step in steps),
                "mean_prompt_rows": fmean(step.num_prompt_rows for step in steps),
                "device_ms": fmean(step.device_ms for step in steps),
                "host_ms": fmean(step.host_ms for step in steps),
                "seconds": sum(step.device_ms for step in steps) / 1000,
            }
            for (requests, rows), steps in sorted(kinds.items())
        ]  # fmt: skip


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _name(place: int, borders: Sequence[int]) -> str:
    """Name of a kind: `0`, `1-64` or `4097+`."""
    first = borders[place - 1] + 1 if place else 0
    if place == len(borders):
        return f"{first}+"
    return str(first) if first == borders[place] else f"{first}-{borders[place]}"
