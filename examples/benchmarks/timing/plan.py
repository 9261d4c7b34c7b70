"""The cells that `step_time.py` measures, and the rows that it records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

import torch

from timing.draft_kinds import KindCell
from timing.engine_arms import RECURRENT_ROWS, Cell
from timing.floors import Rates, StepFloor, least_ms
from timing.fp8_arms import FP8_ARMS
from timing.gauges import Gauges, Span
from timing.report import Recorder, Row, say
from timing.shapes import BLOCK, Shape
from timing.vllm_arm import VllmSettings

OURS = ("plain", "dflash", "adaptive")


@dataclass(kw_only=True)
class Plan:
    """The cells to measure, and results that several arms use.

    files  folder of the pair, if weights are read from files
    """

    shape_name: str
    shape: Shape
    batches: list[int]
    contexts: list[int]
    acceptances: list[float | None]
    steps: int
    arms: list[str]
    prefills: list[list[int]]
    has_eager: bool
    shows_kernels: bool
    device: torch.device
    vllm: VllmSettings
    files: Path | None
    recorder: Recorder
    gauges: Gauges
    rates: Rates
    kinds: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    chains: dict[tuple[bool, int], float] = field(default_factory=dict)

    @property
    def weights(self) -> Row:
        """Where the weights of a row came from."""
        return {"block": self.shape.block, "files": None if self.files is None else str(self.files)}

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def floor(self) -> StepFloor:
        return StepFloor(self.shape, itemsize=2 if self.is_cuda else 4)

    def cells(self) -> Iterator[Cell]:
        """Cells of our own decode steps. Arms vary fastest, so that compared arms run close together."""
        modes = [False] if not self.is_cuda else [True, False] if self.has_eager else [True]
        for context, batch in product(self.contexts, self.batches):
            for arm in (item for item in self.arms if item in (*OURS, *RECURRENT_ROWS, *FP8_ARMS)):
                acceptances = self.acceptances if not arm.startswith("plain") else [None]
                # Widths adapt only if steps are graphs.
                for acceptance, has_graphs in product(acceptances, modes if arm != "adaptive" else [True]):
                    yield Cell(arm, batch, context, self.steps, acceptance, has_graphs)

    def kind_cells(self) -> Iterator[list[KindCell]]:
        """Groups of cells of all kinds of drafts, which are measured in turns."""
        is_asked = "drafts" in self.arms
        for context, batch, block in product(self.contexts, self.batches, self.blocks if is_asked else []):
            for acceptance in self.acceptances:
                yield [
                    KindCell(kind, batch, context, self.steps, acceptance, self.is_cuda, block) for kind in self.kinds
                ]

    @property
    def max_model_len(self) -> int:
        """Longest text of all arms, in tokens."""
        cells = [cell.max_model_len for cell in (*self.cells(), *chain.from_iterable(self.kind_cells()))]
        answer = round(self.steps * max(acceptance or 1 for acceptance in self.acceptances))
        prefills = (max(lengths) + 8 * BLOCK for lengths in self.prefills)
        return max([*cells, *prefills, max(self.contexts) + answer + 1024])


@dataclass(frozen=True, kw_only=True)
class OtherSpeed:
    """Time per step of another engine. Its floor is computed for the context at half of the answer."""

    arm: str
    batch: int
    context: int
    num_tokens: int
    ms: float
    tokens_per_second: float
    asked: float | None = None
    achieved: float | None = None
    spans: Sequence[Span] = ()

    @property
    def step_seconds(self) -> dict[str, float]:
        """Seconds per step and per token."""
        return {"step": self.ms / 1000, "token": 1 / self.tokens_per_second}


def add_other(plan: Plan, speed: OtherSpeed, **facts: object) -> None:
    ms, achieved = speed.ms, speed.achieved
    floor_ms = least_ms(plan.floor.step(speed.batch, speed.context + speed.num_tokens / 2, achieved), plan.rates)
    row: Row = {
        "arm": speed.arm, "shape": plan.shape_name, "batch": speed.batch, "context": speed.context,
        "acceptance": "real" if speed.asked is None else "synthetic", "acceptance_asked": speed.asked,
        "acceptance_achieved": achieved, "ms": ms, "tokens_per_second": speed.tokens_per_second,
        "floor_ms": floor_ms, "ratio": ms / floor_ms, **plan.gauges.over(speed.spans).fields(**speed.step_seconds),
        **facts,
    }  # fmt: skip
    plan.recorder.add("step", row)
    say(f"{title(row)}: {ms:.3f} ms per step, {speed.tokens_per_second:.0f} tokens/s")


def add_prefill(plan: Plan, arm: str, lengths: list[int], times: list[float], spans: Sequence[Span]) -> None:
    floor_ms = least_ms(plan.floor.prefill(lengths, has_draft="dflash" in arm), plan.rates)
    ms = sorted(times)[len(times) // 2]
    row = {"arm": arm, "shape": plan.shape_name, "prompts": len(lengths), "tokens": lengths[0], "ms": ms}
    power = plan.gauges.over(spans).fields(prefill=ms / 1000, token=ms / 1000 / sum(lengths))
    plan.recorder.add("prefill", {**row, "rounds": times, "floor_ms": floor_ms, **plan.weights, **power})
    say(f"prefill {arm}, {len(lengths)} x {lengths[0]} tokens: {ms:.1f} ms")


def title(row: Row) -> str:
    parts = [f"{row['arm']} batch {row['batch']} context {row['context']}"]
    if row["acceptance"] == "synthetic":
        parts.append(f"acceptance {row['acceptance_asked']:g} (synthetic)")
    if not row.get("graphs", True):
        parts.append("without graphs")
    return ", ".join(parts)
