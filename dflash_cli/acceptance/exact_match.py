"""Whether the final number of an answer is that of its reference, with the draft and without."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from dflash_cli.acceptance.intervals.proportions import mcnemar_p_value, paired_share_interval, wilson_interval
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.generation.answers import Answer, plural
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.scheduling.request import FinishReason

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
END_OF_THINKING = "</think>"
MARK = "####"


def final_number(text: str) -> Decimal | None:
    """The number that an answer comes to: in the last box, behind `####`, or else the last one of the text.

    What is thought before `</think>` is no part of the answer.
    """
    text = text.rpartition(END_OF_THINKING)[2]
    boxed = [NUMBER.findall(item) for item in BOXED.findall(text)]
    if boxed and boxed[-1]:
        return parse_number(boxed[-1][-1])
    marked = NUMBER.findall(text.rpartition(MARK)[2]) if MARK in text else []
    numbers = NUMBER.findall(text)
    return parse_number(marked[0] if marked else numbers[-1]) if numbers else None


def parse_number(text: str | None) -> Decimal | None:
    """A text that is a number and nothing else; commas between its digits are left out."""
    try:
        return Decimal((text or "").replace(",", "").strip())
    except InvalidOperation:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMatch:
    """The same prompts without the draft: how many are right then, and in how many the two differ.

    `num_only_draft` are right with the draft alone, `num_only_plain` without it alone.
    """

    num_pairs: int
    num_correct: int
    num_only_draft: int
    num_only_plain: int
    num_same_text: int
    confidence: float

    @property
    def interval(self) -> Interval | None:
        return wilson_interval(self.num_correct, self.num_pairs, self.confidence)

    @property
    def difference(self) -> float:
        """By how much the share with the draft is larger."""
        return (self.num_only_draft - self.num_only_plain) / self.num_pairs

    @property
    def difference_interval(self) -> Interval:
        both = self.num_correct - self.num_only_plain
        return paired_share_interval(both, self.num_only_plain, self.num_only_draft, self.num_pairs, self.confidence)

    @property
    def p_value(self) -> float:
        return mcnemar_p_value(self.num_only_plain, self.num_only_draft)

    @property
    def lines(self) -> list[str]:
        """For people."""
        span = self.difference_interval
        return [
            f"  without the draft {_share(self.num_correct, self.num_pairs, self.interval)}",
            f"  difference {self.difference:+.1%} [{span.low:+.1%}, {span.high:+.1%}], p = {self.p_value:.3f}; right "
            f"only with the draft {self.num_only_draft}, only without {self.num_only_plain}",
            f"  the same text with and without: {self.num_same_text} of {self.num_pairs}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "num_pairs": self.num_pairs,
            "num_correct": self.num_correct,
            "interval": None if self.interval is None else self.interval.to_json(),
            "num_only_draft": self.num_only_draft,
            "num_only_plain": self.num_only_plain,
            "num_same_text": self.num_same_text,
            "difference": self.difference,
            "difference_interval": self.difference_interval.to_json(),
            "p_value": self.p_value,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """Of answers with a reference, how many come to its number; `plain` is None where only the draft was asked.

    `num_cut` were ended by the limit on tokens, before they may have come to a number.
    """

    condition: str | None
    num_scored: int
    num_correct: int
    num_cut: int
    confidence: float
    plain: PlainMatch | None = None

    @property
    def interval(self) -> Interval | None:
        return wilson_interval(self.num_correct, self.num_scored, self.confidence)

    @property
    def lines(self) -> list[str]:
        """For people."""
        under = f" ({self.condition})" if self.condition is not None else ""
        cut = f"; {plural(self.num_cut, 'answer')} cut before the end" if self.num_cut else ""
        found = f"exact match{under} {_share(self.num_correct, self.num_scored, self.interval)}{cut}"
        return [found, *(self.plain.lines if self.plain is not None else ())]

    def to_json(self) -> dict[str, Any]:
        return {
            "condition": self.condition,
            "num_scored": self.num_scored,
            "num_correct": self.num_correct,
            "num_cut": self.num_cut,
            "interval": None if self.interval is None else self.interval.to_json(),
            "plain": None if self.plain is None else self.plain.to_json(),
        }


def score(answers: Sequence[Answer], confidence: float) -> tuple[ExactMatch, ...]:
    """One for each condition with a draft under which answers have references."""
    scored = [answer for answer in answers if parse_number(answer.row.reference) is not None]
    plain = {_key(answer.row): answer for answer in scored if answer.row.is_plain}
    groups: dict[str | None, list[Answer]] = {}
    for answer in scored:
        if not answer.row.is_plain:
            name = answer.row.condition.name if answer.row.condition is not None else ""
            groups.setdefault(name or None, []).append(answer)
    return tuple(_score(name, members, plain, confidence) for name, members in groups.items())


def _score(
    condition: str | None, answers: Sequence[Answer], plain: dict[tuple[Any, ...], Answer], confidence: float
) -> ExactMatch:
    pairs = [(answer, plain[_key(answer.row)]) for answer in answers if _key(answer.row) in plain]
    return ExactMatch(
        condition=condition,
        num_scored=len(answers),
        num_correct=sum(map(_is_right, answers)),
        num_cut=sum(answer.output.finish_reason is FinishReason.LENGTH for answer in answers),
        confidence=confidence,
        plain=_pair(pairs, confidence) if pairs else None,
    )


def _pair(pairs: Sequence[tuple[Answer, Answer]], confidence: float) -> PlainMatch:
    right = [(_is_right(answer), _is_right(other)) for answer, other in pairs]
    return PlainMatch(
        num_pairs=len(pairs),
        num_correct=sum(other for _, other in right),
        num_only_draft=right.count((True, False)),
        num_only_plain=right.count((False, True)),
        num_same_text=sum(answer.output.token_ids == other.output.token_ids for answer, other in pairs),
        confidence=confidence,
    )


def _is_right(answer: Answer) -> bool:
    return final_number(answer.text or "") == parse_number(answer.row.reference)


def _key(row: PromptRow) -> tuple[Any, ...]:
    """What a prompt's answers with and without a draft have in common."""
    condition = row.condition or Condition()
    return row.prompt_index, condition.thinking, condition.context_len


def _share(count: int, total: int, interval: Interval | None) -> str:
    """`61.0% [54.1%, 67.5%], 122 of 200`."""
    span = f" [{interval.low:.1%}, {interval.high:.1%}]" if interval is not None else ""
    return f"{count / total:.1%}{span}, {count} of {total}"
