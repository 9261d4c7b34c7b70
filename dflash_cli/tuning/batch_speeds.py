"""Results of `dflash bench`: the speeds of a pair at each batch size, and the gate on its speed-up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.acceptance.intervals.statistics import Interval, value_text
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.run_facts import PairRun
from dflash_cli.tuning.round_intervals import time_interval
from dflash_cli.tuning.step_parts import StepParts
from dflash_runtime.documents import NOT_REQUIRED, computed_key
from dflash_runtime.errors import GateFailed
from dflash_runtime.notices import Notice

Window = tuple[int, int, float]
"""Tokens, steps and seconds of a round while all its requests ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decoding at one batch size, over all its rounds."""

    tokens_per_second: float
    step_ms: float
    tokens_per_step: Annotated[float, "of one request"]
    step_ms_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None

    @classmethod
    def of(cls, windows: Sequence[Window], batch: int) -> "Speed":
        """Return the speed over all rounds together."""
        num_tokens, num_steps, seconds = (sum(column) for column in zip(*windows, strict=True))
        return cls(
            tokens_per_second=num_tokens / seconds,
            step_ms=1000 * seconds / num_steps,
            tokens_per_step=num_tokens / num_steps / batch,
            step_ms_interval=time_interval(step_times(windows)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSpeed:
    """Decoding in another way than with whole blocks of the draft, at one batch size."""

    speed: Speed
    speedup: Annotated[float, "over plain decoding"]
    speedup_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalSpeed(OtherSpeed):
    """Drafting without a draft model at one batch size: a lookup in each request's own text."""

    name: Annotated[str, "ngram or suffix"]
    lead: Annotated[float, "tokens per second with the draft, divided by tokens per second of this lookup"]
    lead_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSpeed(OtherSpeed):
    """Decoding with trees of one size at one batch size, beside whole blocks."""

    num_nodes: Annotated[int, "drafted tokens of a tree"]
    gain: Annotated[float, "tokens per second with trees, divided by tokens per second with whole blocks"]
    gain_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpeed:
    """A pair's speed at one batch size: without the draft, with whole blocks, and in other ways.

    `adaptive` and `budget` are None if steps are not CUDA graphs, because both need them.
    """

    batch: int
    plain: Speed
    speculative: Speed
    parts: StepParts | None = None
    adaptive: Speed | None = None
    speedup_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds; null with one round"] = None
    adaptive_speedup_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None
    budget: Annotated[Speed | None, NOT_REQUIRED, "rows to the draft tokens that are most likely accepted"] = None
    budget_speedup_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None
    trees: Annotated[tuple[TreeSpeed, ...], NOT_REQUIRED, "trees of draft tokens instead of blocks"] = ()
    rivals: Annotated[tuple[RivalSpeed, ...], NOT_REQUIRED, "drafting without a draft model"] = ()

    @property
    @computed_key
    def speedup(self) -> float:
        """Tokens per second with the draft, divided by tokens per second without it."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    @computed_key
    def adaptive_speedup(self) -> float | None:
        """Tokens per second with adaptive width, divided by tokens per second without the draft."""
        return self.adaptive.tokens_per_second / self.plain.tokens_per_second if self.adaptive is not None else None

    @property
    @computed_key
    def budget_speedup(self) -> float | None:
        """Tokens per second with a row budget, divided by tokens per second without the draft."""
        return self.budget.tokens_per_second / self.plain.tokens_per_second if self.budget is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDocument:
    """Result of `dflash bench`."""

    KIND: ClassVar[str] = "bench"

    draft: str | None
    target: str | None
    num_speculative_tokens: int
    max_new_tokens: int
    num_rounds: int
    num_prompts: Annotated[int, "prompts that the rounds can take"]
    prompts: PromptSource
    batches: tuple[BatchSpeed, ...]
    measured: PairRun


def check_speedup(speeds: Sequence[BatchSpeed], minimum: float) -> Notice | None:
    """Require a speed-up of at least `minimum` at every batch size. Returns a warning if chance may explain it.

    Raises:
        GateFailed: naming the batch size with the lowest speed-up.
    """
    worst = min(speeds, key=lambda item: item.speedup)
    if worst.speedup < minimum:
        raise GateFailed(
            f"speedup {worst.speedup:.2f} at batch {worst.batch}, expected at least {minimum:g}",
            id="speedup-too-low",
            field=f"speedup at batch {worst.batch}",
            found=worst.speedup,
            expected=f"at least {minimum:g}",
        )
    unsure = [item for item in speeds if item.speedup_interval is not None and item.speedup_interval.low < minimum]
    if not unsure:
        return None
    found = ", ".join(
        f"batch {item.batch} ({value_text(item.speedup, item.speedup_interval, '.2f')})" for item in unsure
    )
    return Notice(f"a speedup below {minimum:g} is possible at {found}; more --rounds decide", id="speedup-uncertain")


def step_times(windows: Sequence[Window]) -> list[float]:
    """Return the milliseconds of a step in each round."""
    return [1000 * seconds / num_steps for _, num_steps, seconds in windows]
