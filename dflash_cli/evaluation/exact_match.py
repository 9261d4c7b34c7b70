"""Whether the final number of an answer is that of its reference, with the draft and without."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from dflash_cli.evaluation.proportions import mcnemar_p_value, paired_share_interval, wilson_interval
from dflash_cli.evaluation.statistics import Interval
from dflash_cli.generation.answers import Answer
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
class ExactMatch:
    """Of answers with a reference, how many come to its number; `plain_correct` and what follows, of the same prompts
    without the draft, are None where these were not asked.

    `num_cut` were ended by the limit on tokens, before they may have come to a number.
    """

    condition: str | None
    num_scored: int
    num_correct: int
    num_cut: int
    confidence: float
    num_pairs: int | None = None
    plain_correct: int | None = None
    num_only_draft: int | None = None
    num_only_plain: int | None = None
    num_same_text: int | None = None

    @property
    def interval(self) -> Interval | None:
        return wilson_interval(self.num_correct, self.num_scored, self.confidence)

    @property
    def difference(self) -> Interval | None:
        """Interval of how much larger the share is with the draft than without, over the pairs."""
        if not self.num_pairs:
            return None
        assert self.plain_correct is not None and self.num_only_plain is not None and self.num_only_draft is not None
        both = self.plain_correct - self.num_only_plain
        return paired_share_interval(both, self.num_only_plain, self.num_only_draft, self.num_pairs, self.confidence)

    @property
    def p_value(self) -> float | None:
        if self.num_only_draft is None or self.num_only_plain is None:
            return None
        return mcnemar_p_value(self.num_only_plain, self.num_only_draft)

    @property
    def lines(self) -> list[str]:
        """For people."""
        under = f" ({self.condition})" if self.condition is not None else ""
        cut = f"; {self.num_cut} answers were cut before their end" if self.num_cut else ""
        found = [f"exact match{under} {_share(self.num_correct, self.num_scored, self.interval)}{cut}"]
        if self.difference is not None and self.num_pairs and self.plain_correct is not None:
            plain = wilson_interval(self.plain_correct, self.num_pairs, self.confidence)
            assert self.num_only_draft is not None and self.num_only_plain is not None and self.p_value is not None
            gap = (self.num_only_draft - self.num_only_plain) / self.num_pairs
            found += [
                f"  without the draft {_share(self.plain_correct, self.num_pairs, plain)}",
                f"  difference {gap:+.1%} [{self.difference.low:+.1%}, {self.difference.high:+.1%}]: right only with "
                f"the draft {self.num_only_draft}, only without {self.num_only_plain}, p = {self.p_value:.3f}",
                f"  texts that are the same {self.num_same_text} of {self.num_pairs}",
            ]
        return found

    def to_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "confidence"}
        return found | {
            "interval": self.interval.to_json() if self.interval is not None else None,
            "difference_interval": self.difference.to_json() if self.difference is not None else None,
            "p_value": self.p_value,
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
    right = [(_is_right(answer), _is_right(other)) for answer, other in pairs]
    counts = ExactMatch(
        condition=condition,
        num_scored=len(answers),
        num_correct=sum(map(_is_right, answers)),
        num_cut=sum(answer.output.finish_reason is FinishReason.LENGTH for answer in answers),
        confidence=confidence,
    )
    if not pairs:
        return counts
    return ExactMatch(
        condition=condition,
        num_scored=counts.num_scored,
        num_correct=counts.num_correct,
        num_cut=counts.num_cut,
        confidence=confidence,
        num_pairs=len(pairs),
        plain_correct=sum(other for _, other in right),
        num_only_draft=right.count((True, False)),
        num_only_plain=right.count((False, True)),
        num_same_text=sum(answer.output.token_ids == other.output.token_ids for answer, other in pairs),
    )


def _is_right(answer: Answer) -> bool:
    return final_number(answer.text or "") == parse_number(answer.row.reference)


def _key(row: PromptRow) -> tuple[Any, ...]:
    """What a prompt's answers with and without a draft have in common."""
    condition = row.condition
    return (row.prompt_index, *((condition.thinking, condition.context_len) if condition is not None else ()))


def _share(count: int, total: int, interval: Interval | None) -> str:
    """`61.0% [54.1%, 67.5%], 122 of 200`."""
    span = f" [{interval.low:.1%}, {interval.high:.1%}]" if interval is not None else ""
    return f"{count / total:.1%}{span}, {count} of {total}"
