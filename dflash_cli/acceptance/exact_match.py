"""Compare the final number of each answer with its reference, with the draft and without."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from dflash_cli.acceptance.intervals.enough_prompts import why_no_interval
from dflash_cli.acceptance.intervals.proportions import mcnemar_p_value, paired_share_interval, wilson_interval
from dflash_cli.acceptance.intervals.statistics import Interval, value_text
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.documents import NOT_REQUIRED, Limits, computed_key
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import FinishReason

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
END_OF_THINKING = "</think>"
MARK = "####"
MIN_PAIRS = 200
"""Fewest distinct prompts with an interval of the difference. If few of 64 answers change, it covers 99 of 100."""


def final_number(text: str) -> Decimal | None:
    r"""Return an answer's final number: in the last `\boxed{}`, after `####`, or else the last number of the text.

    Text before `</think>` is ignored.
    """
    text = text.rpartition(END_OF_THINKING)[2]
    boxed = [NUMBER.findall(item) for item in BOXED.findall(text)]
    if boxed and boxed[-1]:
        return parse_number(boxed[-1][-1])
    marked = NUMBER.findall(text.rpartition(MARK)[2]) if MARK in text else []
    numbers = NUMBER.findall(text)
    return parse_number(marked[0] if marked else numbers[-1]) if numbers else None


def parse_number(text: str | None) -> Decimal | None:
    """Return the number if the text is a number and nothing else. Commas between digits are ignored."""
    try:
        return Decimal((text or "").replace(",", "").strip())
    except InvalidOperation:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMatch:
    """The same prompts without the draft: number of right answers, and number of prompts with different answers."""

    num_pairs: Annotated[int, Limits(least=1)]
    num_correct: int
    interval: Interval | None
    num_only_draft: Annotated[int, "prompts answered right only with the draft"]
    num_only_plain: Annotated[int, "prompts answered right only without the draft"]
    num_same_text: int
    difference_interval: Annotated[Interval | None, "null with fewer than 200 prompts"]

    @property
    @computed_key
    def difference(self) -> float:
        """Share of right answers with the draft minus the share without it."""
        return (self.num_only_draft - self.num_only_plain) / self.num_pairs

    @property
    @computed_key
    def p_value(self) -> float:
        """Exact McNemar test."""
        return mcnemar_p_value(self.num_only_plain, self.num_only_draft)

    @property
    def lines(self) -> list[str]:
        """The result in words."""
        return [
            f"  without the draft {_share(self.num_correct, self.num_pairs, self.interval)}",
            f"  difference {value_text(self.difference, self.difference_interval, '+.1%')}, p = {self.p_value:.3f}; "
            f"right only with the draft {self.num_only_draft}, only without {self.num_only_plain}",
            f"  same text with and without the draft: {self.num_same_text} of {self.num_pairs}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """Number of right answers: their final number equals the reference of their prompt."""

    condition: str | None
    num_scored: Annotated[int, Limits(least=1)]
    num_correct: int
    num_cut: Annotated[int, "answers that the token limit ended, possibly before their final number"]
    interval: Interval | None
    no_interval: Annotated[str | None, NOT_REQUIRED, "why the shares have no interval"] = None
    plain: Annotated[PlainMatch | None, "the same prompts without the draft, if they were asked"] = None

    @property
    def lines(self) -> list[str]:
        """The result in words."""
        few = [f"  no interval: {self.no_interval}"] if self.no_interval is not None else []
        under = f" ({self.condition})" if self.condition is not None else ""
        cut = f"; {plural(self.num_cut, 'answer')} cut before the end" if self.num_cut else ""
        found = f"exact match{under} {_share(self.num_correct, self.num_scored, self.interval)}{cut}"
        return [found, *few, *(self.plain.lines if self.plain is not None else ())]


def score(answers: Sequence[Answer], confidence: float) -> tuple[ExactMatch, ...]:
    """Return the exact match of each condition with a draft that has answers with references.

    A repeated prompt counts once.
    """
    distinct = {(answer.row.digest, answer.row.is_plain): answer for answer in reversed(answers)}.values()
    scored = [answer for answer in reversed(distinct) if parse_number(answer.row.reference) is not None]
    plain = {_key(answer.row): answer for answer in scored if answer.row.is_plain}
    groups: dict[str | None, list[Answer]] = {}
    for answer in scored:
        if not answer.row.is_plain:
            groups.setdefault(answer.row.condition_name or None, []).append(answer)
    return tuple(_score(name, members, plain, confidence) for name, members in groups.items())


def _score(
    condition: str | None, answers: Sequence[Answer], plain: dict[tuple[Any, ...], Answer], confidence: float
) -> ExactMatch:
    pairs = [(answer, plain[_key(answer.row)]) for answer in answers if _key(answer.row) in plain]
    num_correct = sum(map(_is_right, answers))
    reason = why_no_interval(len(answers))
    return ExactMatch(
        condition=condition,
        num_scored=len(answers),
        num_correct=num_correct,
        num_cut=sum(answer.output.finish_reason is FinishReason.LENGTH for answer in answers),
        interval=wilson_interval(num_correct, len(answers), confidence) if reason is None else None,
        no_interval=reason,
        plain=_pair(pairs, confidence) if pairs else None,
    )


def _pair(pairs: Sequence[tuple[Answer, Answer]], confidence: float) -> PlainMatch:
    is_enough = why_no_interval(len(pairs)) is None
    right = [(_is_right(answer), _is_right(other)) for answer, other in pairs]
    both, only_draft, only_plain = (right.count(item) for item in ((True, True), (True, False), (False, True)))
    return PlainMatch(
        num_pairs=len(pairs),
        num_correct=both + only_plain,
        interval=wilson_interval(both + only_plain, len(pairs), confidence) if is_enough else None,
        num_only_draft=only_draft,
        num_only_plain=only_plain,
        num_same_text=sum(answer.output.token_ids == other.output.token_ids for answer, other in pairs),
        difference_interval=paired_share_interval(both, only_plain, only_draft, len(pairs), confidence)
        if len(pairs) >= MIN_PAIRS
        else None,
    )


def _is_right(answer: Answer) -> bool:
    return final_number(answer.text or "") == parse_number(answer.row.reference)


def _key(row: PromptRow) -> tuple[Any, ...]:
    """Return the key that a prompt's answers with and without a draft share."""
    condition = row.condition or Condition()
    return row.prompt_index, condition.thinking, condition.context_len


def _share(count: int, total: int, interval: Interval | None) -> str:
    """`61.0% [54.1%, 67.5%], 122 of 200`."""
    return f"{value_text(count / total, interval, '.1%')}, {count} of {total}"
