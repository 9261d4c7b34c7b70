"""The result of an evaluation with prefill and decode on two engines, compared with one engine."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.acceptance.intervals.acceptance_difference import (
    AcceptanceDifference,
    TokenCounts,
    no_interval,
    paired_difference,
    tokens_per_step,
)
from dflash_cli.acceptance.intervals.statistics import Interval, value_text
from dflash_cli.terminal.options import CarrierName
from dflash_cli.terminal.shown import Table
from dflash_runtime.documents import NOT_REQUIRED, computed_key
from dflash_runtime.errors import GateFailed
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

TITLE = "prefill and decode in two engines, and in one"
EXACT = ("float32", "float64")
"""Dtypes in which the rounding of sums in another order has never changed a token."""
SHOWN_PROBLEMS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """A ratio measured with one engine and with two. A value is None if too few prompts were measured."""

    one_engine: float | None
    disaggregated: float | None
    difference_interval: Interval | None
    no_interval: Annotated[str | None, NOT_REQUIRED, "why the difference has no interval"] = None
    has_fallen: Annotated[bool, NOT_REQUIRED, "whether it is lower with two engines, by more than luck explains"] = (
        False
    )

    @classmethod
    def compare(cls, one: TokenCounts, two: TokenCounts, *, confidence: float) -> "SideBySide":
        """Return the ratios over the same prompts, from their counts of tokens and steps."""
        difference = paired_difference(one, two, confidence)
        return cls(
            one_engine=tokens_per_step(one),
            disaggregated=tokens_per_step(two),
            difference_interval=difference.interval if difference is not None and difference.error else None,
            no_interval=_no_interval(difference, len(one)),
            has_fallen=difference is not None and difference.value < 0 and difference.p_value < 1 - confidence,
        )

    @property
    @computed_key
    def difference(self) -> float | None:
        """Ratio with two engines minus ratio with one engine."""
        if self.one_engine is None or self.disaggregated is None:
            return None
        return self.disaggregated - self.one_engine

    @property
    def text(self) -> str:
        """`3.44 -> 2.31 (-1.13 [-1.31, -0.95])`."""
        change = f" ({self.change})" if self.change else ""
        return f"{value_text(self.one_engine)} -> {value_text(self.disaggregated)}{change}"

    @property
    def change(self) -> str:
        """`-1.13 [-1.31, -0.95]`; without an interval if too few prompts were measured."""
        return "" if self.difference is None else value_text(self.difference, self.difference_interval, "+.3f")


def _no_interval(difference: AcceptanceDifference | None, num_prompts: int) -> Notice | None:
    """Return why the interval of a difference of ratios is missing. The rule of three applies to lengths only."""
    if difference is not None and not difference.error:
        return Notice("no prompt differs from the others", id="no-prompt-differs")
    return no_interval(difference, num_prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """Answers with prefill in another process, compared with answers of one engine. Each turn has one answer."""

    connector: Annotated[CarrierName, "transport of the KV"]
    prefill_draft: Annotated[str | None, "the prefill side's draft, if it is not the pair's draft"]
    dtype: str
    num_turns: Annotated[int, "answers that are compared"]
    num_same_texts: int
    num_rounded: Annotated[int, "texts that differ by no more than rounding explains"]
    num_same_traces: Annotated[int, "answers with the same drafts and the same acceptance in every step"]
    acceptance_len: SideBySide
    position_1: SideBySide
    num_handed: int
    num_rows: Annotated[int, "rows of KV that were loaded"]
    num_bytes: int
    num_prefilled_here: Annotated[int, "answers without a hand-off, prefilled by the decode side; not compared"]
    why_prefilled_here: Annotated[str | None, "reason of the first answer without a hand-off"] = None
    problems: Annotated[tuple[str, ...], "mismatches in hand-offs that were loaded all the same"] = ()

    @property
    @computed_key
    def holds(self) -> bool:
        """Whether the hand-off changed neither text nor acceptance."""
        return self.fault is None

    @property
    @computed_key
    def fault(self) -> str | None:
        """Why the hand-off does not hold; None if it holds."""
        num_wrong = self.num_turns - self.num_same_texts - self.num_rounded
        num_unlike = self.num_turns - self.num_same_traces - self.num_rounded
        if not self.num_handed:
            return f"no KV was handed over: {self.why_prefilled_here or 'every answer ended with its first token'}"
        if num_wrong:
            return f"{plural(num_wrong, 'text')} of {self.num_turns} differ by more than rounding"
        if self.acceptance_len.has_fallen or self.position_1.has_fallen:
            return f"acceptance fell: {self._figures}"
        if num_unlike > 0 and self.dtype in EXACT:
            which = f"{num_unlike} of {self.num_turns} traces differ"
            return f"{which}, and rounding in {self.dtype} does not explain this: {self._figures}"
        return None

    @property
    def lines(self) -> list[str]:
        """The verdict, its likely cause, and the prompts without a hand-off."""
        if self.fault is not None:
            lines = [f"the hand-off does not hold: {self.fault}"]
            lines += [f"mismatch: {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
            if not self.problems and self.num_handed:
                lines.append("no tensor is missing: rows may have been changed, or sent before they were written")
        elif self.num_same_traces == self.num_turns:
            lines = ["the hand-off holds: text and steps are the same as with one engine"]
        else:
            lines = [f"the hand-off holds: acceptance did not measurably fall, {self._figures}"]
        if self.num_prefilled_here and self.num_handed:
            lines.append(
                f"{plural(self.num_prefilled_here, 'prompt')} prefilled by the decode side: {self.why_prefilled_here}"
            )
        return lines

    @property
    def table(self) -> Table:
        """The ratios with one engine and with two, equal texts and steps, and the amount of KV handed over."""
        return ("", "one engine", "two engines", "difference"), [
            *(
                (name, value_text(item.one_engine), value_text(item.disaggregated), item.change)
                for name, item in (("acceptance length", self.acceptance_len), ("share at position 1", self.position_1))
            ),
            ("same text", "", f"{self.num_same_texts} of {self.num_turns}", ""),
            ("same steps", "", f"{self.num_same_traces} of {self.num_turns}", ""),
            ("handed over", "", str(self.num_handed), f"{self.num_rows} rows, {self.num_bytes / 1e6:.1f} MB"),
        ]

    def check(self) -> None:
        """Require that the hand-off changed neither text nor acceptance.

        Raises:
            GateFailed: it changed one of them.
        """
        if self.fault is not None:
            raise GateFailed(
                f"the hand-off does not hold: {self.fault}",
                id="handoff-changes-result",
                hint=None if self.problems else "give both sides the same pair and settings; --output keeps every step",
            )

    @property
    def _figures(self) -> str:
        return f"acceptance length {self.acceptance_len.text}, position 1 {self.position_1.text}"
