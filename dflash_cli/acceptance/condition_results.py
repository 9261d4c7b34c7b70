"""Acceptance under each condition of a run, and its difference to the first condition, paired by prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from dflash_cli.acceptance.conversation_counts import count_conversations, distinct_prompts
from dflash_cli.acceptance.intervals.acceptance_difference import no_interval, paired_difference
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


def compare_conditions(
    answers: Sequence[Answer],
    conditions: Sequence[Condition],
    pool: Callable[[Sequence[Answer]], Summary],
    failed: Sequence[str | None],
    confidence: float,
) -> tuple[ConditionResult, ...]:
    """Return a result for each condition with a draft. `failed` has the condition of each failed prompt."""
    drafted = [condition for condition in conditions if condition.name and not condition.is_plain]
    groups = {item.name: [answer for answer in answers if answer.row.condition_name == item.name] for item in drafted}
    counts = {name: _steps(members) for name, members in groups.items()}
    prompts = dict(zip((answer.row.prompt_index for answer in answers), distinct_prompts(answers), strict=True))
    found = []
    for condition in drafted:
        name, base = condition.name, counts[drafted[0].name]
        shared = [key for key in base if key in counts[name]]
        sides = _pool(base, shared, prompts), _pool(counts[name], shared, prompts)
        is_first = condition is drafted[0]
        difference = None if is_first else paired_difference(*sides, confidence)
        found.append(
            ConditionResult(
                condition=condition,
                summary=pool(groups[name]),
                num_failed=failed.count(name),
                prompt_len=_mean_prompt_len(groups[name]),
                num_pairs=0 if is_first else len(shared),
                difference=difference.value if difference is not None else None,
                difference_interval=difference.interval if difference is not None else None,
                difference_no_interval=None if is_first else no_interval(difference, len(sides[0])),
            )
        )
    return tuple(found)


def _steps(answers: Sequence[Answer]) -> dict[int, tuple[float, int]]:
    """Return tokens and steps by prompt."""
    rows = sorted({answer.row.index: answer.row.prompt_index for answer in answers}.items())
    counts = count_conversations(answers)
    return {prompt: (item.num_tokens, item.num_steps) for (_, prompt), item in zip(rows, counts, strict=True)}


def _pool(
    counts: Mapping[int, tuple[float, int]], shared: Sequence[int], prompts: Mapping[int, str]
) -> list[tuple[float, int]]:
    """Return tokens and steps by distinct prompt."""
    found: dict[str, tuple[float, int]] = {}
    for index in shared:
        tokens, steps = found.get(prompts[index], (0, 0))
        found[prompts[index]] = tokens + counts[index][0], steps + counts[index][1]
    return list(found.values())


def _mean_prompt_len(answers: Sequence[Answer]) -> float | None:
    lengths = [len(answer.output.prompt_token_ids) for answer in answers if answer.turn == 0]
    return fmean(lengths) if lengths else None
