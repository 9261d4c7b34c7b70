"""Acceptance by context length: the lengths that the draft names, and falls that an interval supports.

Each prompt is measured under each length, so lengths are compared pair by pair. Neighbouring lengths are compared, and
the shortest with the longest. Intervals are corrected for the number of comparisons (Bonferroni). So at most 1 in 20
drafts with equal acceptance at every length is said to fall.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from dflash_cli.acceptance.intervals.acceptance_difference import (
    AcceptanceDifference,
    TokenCounts,
    no_interval,
    paired_difference,
)
from dflash_cli.acceptance.intervals.statistics import Interval, value_text
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.context_marks import ContextMark
from dflash_runtime.documents import NOT_REQUIRED, computed_key

WIDTH = 80
Sides = Callable[[Condition, Condition], tuple[TokenCounts, TokenCounts]]
"""Tokens and steps of the prompts measured under both conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFall:
    """A fall of the acceptance length from one context length to a longer one, which its interval supports."""

    thinking: Annotated[str | None, NOT_REQUIRED] = None
    shorter: Annotated[int, "number of tokens of the prompts"]
    longer: int
    acceptance_lens: tuple[float, float]
    interval: Annotated[Interval, "of the difference, corrected for the number of compared lengths"]
    num_pairs: Annotated[int, "prompts that were measured under both lengths"]
    beyond: Annotated[tuple[ContextMark, ...], "lengths that the draft names, between the two"] = ()

    @property
    def text(self) -> str:
        """`acceptance falls from 4.10 to 1.60 beyond 4,096, the draft's window: -2.50 [-2.71, -2.29]`."""
        before, after = self.acceptance_lens
        where = f"between {self.shorter:,} and {self.longer:,} tokens of context"
        if self.beyond:
            where = "beyond " + " and ".join(f"{mark.num_tokens:,}, {mark.name}" for mark in self.beyond)
        under = f"thinking {self.thinking}: " if self.thinking is not None else ""
        change = value_text(after - before, self.interval, "+.2f")
        return f"{under}acceptance falls from {before:.2f} to {after:.2f} {where}: {change}, {self.num_pairs} prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCurve:
    """The result of a run with several context lengths. `marks` are the lengths that the draft names, ascending."""

    marks: tuple[ContextMark, ...]
    falls: tuple[ContextFall, ...] = ()
    no_test: Annotated[str | None, "why lengths were not compared"] = None

    @property
    @computed_key
    def conclusion(self) -> str:
        """The falls in words, or the statement that acceptance did not fall, or the reason for no comparison."""
        if self.falls:
            return "; ".join(fall.text for fall in self.falls)
        return "no fall with the context was measured" if self.no_test is None else f"no comparison: {self.no_test}"

    @property
    def lines(self) -> list[str]:
        """The conclusion and the marks, wrapped to 80 columns."""
        said = [fall.text for fall in self.falls] or [self.conclusion]
        marks = "; ".join(f"{mark.num_tokens:,} {mark.name} ({mark.source})" for mark in self.marks)
        said += [f"the draft names: {marks}"] if marks else []
        return [line for text in said for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def context_curve(
    conditions: Sequence[Condition], marks: Sequence[ContextMark], sides: Sides, confidence: float
) -> ContextCurve | None:
    """Return what the conditions with a context length show; None without such conditions."""
    groups: dict[str | None, dict[int, Condition]] = {}
    for item in conditions:
        if item.context_len is not None and not item.is_plain:
            groups.setdefault(item.thinking, {})[item.context_len] = item
    if not groups:
        return None
    pairs = [(thinking, *pair) for thinking, group in groups.items() for pair in compared_pairs(sorted(group))]
    level = 1 - (1 - confidence) / max(1, len(pairs))
    falls, reason = [], None if pairs else "only one length was measured"
    for thinking, shorter, longer in pairs:
        counts = sides(groups[thinking][shorter], groups[thinking][longer])
        found = paired_difference(*counts, level)
        reason = reason or no_interval(found, len(counts[0]))
        interval = falling(found)
        if found is not None and interval is not None:
            falls.append(
                ContextFall(
                    thinking=thinking,
                    shorter=shorter,
                    longer=longer,
                    acceptance_lens=(found.base, found.other),
                    interval=interval,
                    num_pairs=found.num_prompts,
                    beyond=tuple(mark for mark in marks if shorter <= mark.num_tokens < longer),
                )
            )
    return ContextCurve(marks=tuple(marks), falls=_without_sums(falls), no_test=None if falls else reason)


def falling(found: AcceptanceDifference | None) -> Interval | None:
    """Return the interval of a difference if it lies below 0, else None."""
    interval = found.interval if found is not None else None
    return interval if interval is not None and interval.high < 0 else None


def compared_pairs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return neighbouring lengths, and the shortest with the longest."""
    whole = [(lengths[0], lengths[-1])] if len(lengths) > 2 else []
    return [*pairwise(lengths), *whole]


def _without_sums(falls: Sequence[ContextFall]) -> tuple[ContextFall, ...]:
    """Return the falls without a fall over a longer range that contains another one."""
    return tuple(
        fall
        for fall in falls
        if not any(
            other is not fall
            and other.thinking == fall.thinking
            and fall.shorter <= other.shorter
            and other.longer <= fall.longer
            for other in falls
        )
    )
