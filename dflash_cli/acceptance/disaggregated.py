"""The result of an evaluation with prefill and decode on two engines, compared with one engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_cli.acceptance.intervals.acceptance_difference import (
    AcceptanceDifference,
    TokenCounts,
    paired_difference,
    tokens_per_step,
)
from dflash_cli.generation.answers import plural
from dflash_runtime.errors import GateFailed

TITLE = "prefill and decode apart, and one engine"
EXACT = ("float32", "float64")
"""Dtypes in which sums that are rounded otherwise have never changed a token that is drafted or chosen."""
SHOWN_PROBLEMS = 6

Table = tuple[Sequence[str], list[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """One ratio of one engine, of two, and how far the second is above the first; None where too few prompts say."""

    one: float | None
    two: float | None
    difference: AcceptanceDifference | None

    @classmethod
    def compare(cls, one: TokenCounts, two: TokenCounts, *, confidence: float) -> "SideBySide":
        """Ratios over the same prompts, counted as tokens and steps."""
        return cls(
            one=tokens_per_step(one), two=tokens_per_step(two), difference=paired_difference(one, two, confidence)
        )

    @property
    def has_fallen(self) -> bool:
        """Whether it is lower with two engines, by more than chance explains."""
        return self.difference is not None and self.difference.interval.high < 0

    @property
    def text(self) -> str:
        """`3.44 -> 2.31 (-1.13 [-1.31, -0.95])`."""
        change = f" ({self.change})" if self.change else ""
        return f"{_number(self.one)} -> {_number(self.two)}{change}"

    @property
    def change(self) -> str:
        """`-1.13 [-1.31, -0.95]`; without an interval as far as the prompts go."""
        if self.one is None or self.two is None:
            return ""
        span = self.difference.interval if self.difference is not None else None
        return f"{self.two - self.one:+.3f}" + (f" [{span.low:+.3f}, {span.high:+.3f}]" if span is not None else "")

    def to_json(self) -> dict[str, Any]:
        span = self.difference.interval.to_json() if self.difference is not None else None
        change = None if self.one is None or self.two is None else self.two - self.one
        return {"one_engine": self.one, "disaggregated": self.two, "difference": change, "difference_interval": span}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """What came of prefilling in another process. A turn is one answer; those prefilled here are not compared.

    `num_rounded` texts differ as far as rounding explains it. `problems` are what did not fit of hand-offs that were
    forced, `why_prefilled_here` the reason of the first turn for which no hand-off came.
    """

    connector: str
    prefill_draft: str | None
    dtype: str
    num_turns: int
    num_same_texts: int
    num_rounded: int
    num_same_traces: int
    acceptance_len: SideBySide
    position_1: SideBySide
    num_handed: int
    num_rows: int
    num_bytes: int
    num_prefilled_here: int
    why_prefilled_here: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def fault(self) -> str | None:
        """In what the two differ by more than they may; None where they do not."""
        num_wrong = self.num_turns - self.num_same_texts - self.num_rounded
        num_unlike = self.num_turns - self.num_same_traces - self.num_rounded
        if not self.num_handed:
            return f"nothing was handed over: {self.why_prefilled_here or 'every answer ended with its first token'}"
        if num_wrong:
            return f"{plural(num_wrong, 'text')} of {self.num_turns} differ by more than rounding"
        if self.acceptance_len.has_fallen or self.position_1.has_fallen:
            return f"acceptance fell: {self._figures}"
        if num_unlike > 0 and self.dtype in EXACT:
            which = f"{num_unlike} of {self.num_turns} traces differ"
            return f"{which}, which rounding does not do in {self.dtype}: {self._figures}"
        return None

    @property
    def lines(self) -> list[str]:
        """The verdict, what may be behind it, and what it does not cover."""
        if self.fault is not None:
            lines = [f"the hand-off does not hold: {self.fault}"]
            lines += [f"what does not fit: {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
            if not self.problems and self.num_handed:
                lines.append("nothing is missing by name: rows may have been sent before they were written, or changed")
        elif self.num_same_traces == self.num_turns:
            lines = ["the hand-off holds: the same text by the same steps as one engine"]
        else:
            lines = [f"the hand-off holds: no fall of acceptance is seen, {self._figures}"]
        if self.num_prefilled_here and self.num_handed:
            lines.append(f"{plural(self.num_prefilled_here, 'prompt')} prefilled here: {self.why_prefilled_here}")
        return lines

    @property
    def table(self) -> Table:
        """Both sides' figures, and what was handed over."""
        rows: list[tuple[str, ...]] = [
            (name, _number(item.one), _number(item.two), item.change)
            for name, item in (("acceptance length", self.acceptance_len), ("share at position 1", self.position_1))
        ]
        rows += [
            ("same text", "", f"{self.num_same_texts} of {self.num_turns}", ""),
            ("same steps", "", f"{self.num_same_traces} of {self.num_turns}", ""),
            ("handed over", "", str(self.num_handed), f"{self.num_rows} rows, {self.num_bytes / 1e6:.1f} MB"),
        ]
        return ("", "one engine", "two engines", "difference"), rows

    def check(self) -> None:
        """Require that the hand-off holds.

        Raises:
            GateFailed: it does not.
        """
        if self.fault is not None:
            raise GateFailed(
                f"the hand-off does not hold: {self.fault}",
                hint=None if self.problems else "both sides need the same pair and settings; --rows keeps every step",
            )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **plain,
            "acceptance_len": self.acceptance_len.to_json(),
            "position_1": self.position_1.to_json(),
            "problems": list(self.problems),
            "holds": self.fault is None,
            "fault": self.fault,
        }

    @property
    def _figures(self) -> str:
        return f"acceptance length {self.acceptance_len.text}, position 1 {self.position_1.text}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
