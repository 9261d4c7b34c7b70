"""Acceptance under each condition of a run, and its difference to the first condition, paired by prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from dflash_cli.acceptance.conversation_counts import count_conversations, distinct_prompts
from dflash_cli.acceptance.intervals.acceptance_difference import TokenCounts, no_interval, paired_difference
from dflash_cli.acceptance.intervals.statistics import Interval, Summary
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.conditions import Condition
from dflash_runtime.documents import INLINE, NOT_REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """Acceptance under one condition, and its difference to the first over the prompts measured under both."""

    condition: Annotated[Condition, INLINE]
    summary: Annotated[Summary, INLINE]
    prompt_len: Annotated[float | None, "mean number of tokens per prompt"]
    num_failed: int
    num_pairs: Annotated[int, "prompts that were also measured under the first condition"] = 0
    difference: Annotated[float | None, "acceptance length minus the acceptance length under the first condition"] = (
        None
    )
    difference_interval: Interval | None = None
    difference_no_interval: Annotated[str | None, NOT_REQUIRED, "why the difference has no interval"] = None


@dataclass(frozen=True, slots=True)
class PairedCounts:
    """Tokens and steps of each prompt under each condition: condition -> index of the prompt -> tokens and steps."""

    counts: Mapping[str, Mapping[int, tuple[float, int]]]
    prompts: Mapping[int, str]

    @classmethod
    def of(cls, answers: Sequence[Answer], conditions: Sequence[Condition]) -> "PairedCounts":
        """Return the counts of some answers."""
        return cls(
            {item.name: _steps(_under(answers, item)) for item in conditions},
            dict(zip((answer.row.prompt_index for answer in answers), distinct_prompts(answers), strict=True)),
        )

    def sides(self, first: Condition, second: Condition) -> tuple[TokenCounts, TokenCounts]:
        """Return tokens and steps of the prompts measured under both conditions, by distinct prompt."""
        base, other = self.counts[first.name], self.counts[second.name]
        shared = [key for key in base if key in other]
        return self._pool(base, shared), self._pool(other, shared)

    def num_pairs(self, first: Condition, second: Condition) -> int:
        """Return the number of prompts that were measured under both conditions, repeats included."""
        return len(self.counts[first.name].keys() & self.counts[second.name].keys())

    def _pool(self, counts: Mapping[int, tuple[float, int]], shared: Sequence[int]) -> TokenCounts:
        found: dict[str, tuple[float, int]] = {}
        for index in shared:
            tokens, steps = found.get(self.prompts[index], (0, 0))
            found[self.prompts[index]] = tokens + counts[index][0], steps + counts[index][1]
        return list(found.values())


def drafting(conditions: Sequence[Condition]) -> list[Condition]:
    """Return the conditions with a draft."""
    return [condition for condition in conditions if condition.name and not condition.is_plain]


def compare_conditions(
    answers: Sequence[Answer],
    conditions: Sequence[Condition],
    pool: Callable[[Sequence[Answer]], Summary],
    failed: Sequence[str | None],
    paired: PairedCounts,
    confidence: float,
) -> tuple[ConditionResult, ...]:
    """Return a result for each condition with a draft. `failed` has the condition of each failed prompt."""
    found = []
    for condition in conditions:
        members = _under(answers, condition)
        is_first = condition is conditions[0]
        sides = paired.sides(conditions[0], condition)
        difference = None if is_first else paired_difference(*sides, confidence)
        found.append(
            ConditionResult(
                condition=condition,
                summary=pool(members),
                num_failed=failed.count(condition.name),
                prompt_len=_mean_prompt_len(members),
                num_pairs=0 if is_first else paired.num_pairs(conditions[0], condition),
                difference=difference.value if difference is not None else None,
                difference_interval=difference.interval if difference is not None else None,
                difference_no_interval=None if is_first else no_interval(difference, len(sides[0])),
            )
        )
    return tuple(found)


def _under(answers: Sequence[Answer], condition: Condition) -> list[Answer]:
    return [answer for answer in answers if answer.row.condition_name == condition.name]


def _steps(answers: Sequence[Answer]) -> dict[int, tuple[float, int]]:
    """Return tokens and steps by prompt."""
    rows = sorted({answer.row.index: answer.row.prompt_index for answer in answers}.items())
    counts = count_conversations(answers)
    return {prompt: (item.num_tokens, item.num_steps) for (_, prompt), item in zip(rows, counts, strict=True)}


def _mean_prompt_len(answers: Sequence[Answer]) -> float | None:
    lengths = [len(answer.output.prompt_token_ids) for answer in answers if answer.turn == 0]
    return fmean(lengths) if lengths else None
