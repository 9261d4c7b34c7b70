"""Tokens and steps of each conversation of a result. Two results are compared by these counts."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

from dflash_runtime.checkpoint.stored.digests import digest_text
from dflash_runtime.documents import NOT_REQUIRED, Limits
from dflash_runtime.json_values import is_number

if TYPE_CHECKING:
    from dflash_cli.acceptance.journal import JournalRow
    from dflash_cli.generation.answers import Answer
    from dflash_runtime.scheduling.request_output import RequestOutput

AT_LEAST_0 = Limits(least=0)
COUNTED = ("num_tokens", "num_steps", "num_far_tokens", "num_far_steps")
FAR = 256
"""A step is far if its context is at least twice as long as the first prompt, and this many tokens longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationCounts:
    """Number of tokens that a conversation's verify steps committed, and number of steps, over all its turns.

    Far steps, with a context at least twice as long as at the first step, are also counted separately. The same prompt
    has the same `digest` in another result. `name` is for messages. `condition` is None for a run without conditions.
    """

    digest: Annotated[str, "of the prompt; results are paired by it"]
    name: str
    category: str | None = None
    condition: Annotated[str | None, "under which the prompt was answered, if there were several"] = None
    num_tokens: Annotated[float, AT_LEAST_0, "tokens that the conversation's verify steps committed"]
    num_steps: Annotated[int, AT_LEAST_0]
    num_far_tokens: Annotated[
        float, AT_LEAST_0, "tokens of steps with a context at least twice as long as at the first step"
    ] = 0
    num_far_steps: Annotated[int, AT_LEAST_0] = 0
    histogram: Annotated[
        tuple[int, ...], NOT_REQUIRED, "number of steps that committed 1, 2, ... tokens; empty if not known"
    ] = ()

    def __post_init__(self) -> None:
        for name in COUNTED:
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:  # counts may come from another program's file
                raise ValueError(f"{name} of {self.name}: found {value!r}, expected a number, 0 or more")
        for far, all_of_them in (("num_far_tokens", self.num_tokens), ("num_far_steps", self.num_steps)):
            if getattr(self, far) > all_of_them:
                raise ValueError(f"{far} of {self.name}: found {getattr(self, far)!r}, expected {all_of_them} at most")
        told = sum(place * count for place, count in enumerate(self.histogram, start=1)), sum(self.histogram)
        if self.histogram and (min(self.histogram) < 0 or told != (self.num_tokens, self.num_steps)):
            raise ValueError(
                f"histogram of {self.name}: found {told[0]} tokens in {told[1]} steps, expected {self.num_tokens:g} in "
                f"{self.num_steps}"
            )

    def num_accepted(self, position: int) -> int:
        """Return the number of steps that accepted a draft position, counted from 1, and all positions before it."""
        return sum(self.histogram[position:])

    @classmethod
    def of_turns(
        cls, turns: "Sequence[RequestOutput | JournalRow]", *, id: str | int | None, prompt_index: int, **known: Any
    ) -> "ConversationCounts":
        """Return the counts of a conversation's turns. Without an id, its name is the number of its prompt."""
        steps = [
            TurnSteps(len(item.prompt_token_ids), item.acceptance_lengths, item.committed_lengths) for item in turns
        ]
        return cls(name=f"prompt {prompt_index + 1}" if id is None else str(id), **known | count_turns(steps))


@dataclass(frozen=True, slots=True)
class TurnSteps:
    """The steps of one turn: length of the prompt, tokens committed per step, and how many of them the answer kept."""

    prompt_len: int
    acceptance_lengths: Sequence[int]
    committed_lengths: Sequence[int]


def count_conversations(answers: "Sequence[Answer]") -> tuple[ConversationCounts, ...]:
    """Return the counts of each conversation, in input order."""
    turns: dict[int, list[Answer]] = {}
    for answer in answers:
        turns.setdefault(answer.row.index, []).append(answer)
    return tuple(_count(turns[index]) for index in sorted(turns))


def pool_conditions(conversations: Iterable[ConversationCounts]) -> tuple[ConversationCounts, ...]:
    """Return one conversation per prompt, with its counts under all conditions added up.

    Answers to one prompt under several conditions are not independent samples.
    """
    groups: dict[tuple[str, ...], list[ConversationCounts]] = {}
    for item in conversations:
        groups.setdefault((item.name,) if item.condition is not None else (item.name, item.digest), []).append(item)
    return tuple(_add_up(members) if members[0].condition is not None else members[0] for members in groups.values())


def pool_repeats(conversations: Iterable[ConversationCounts]) -> tuple[ConversationCounts, ...]:
    """Return one conversation per distinct prompt: counts of repeats are added up, because they are not independent."""
    groups: dict[str, list[ConversationCounts]] = {}
    for item in conversations:
        groups.setdefault(item.digest, []).append(item)
    return tuple(_sum(members) for members in groups.values())


Pair = tuple[ConversationCounts | None, ConversationCounts | None]
"""Counts of a conversation in two results. Results of different prompts have None on one side."""


def pool_pairs(pairs: Iterable[Pair]) -> tuple[tuple[ConversationCounts, ...], tuple[ConversationCounts, ...]]:
    """Return the conversations of each side, one per distinct prompt."""
    base, other = ([item for item in side if item] for side in zip(*pairs, strict=True))
    return pool_repeats(base), pool_repeats(other)


def distinct_prompts(answers: "Sequence[Answer]") -> list[str]:
    """Return the name of each answer's distinct prompt: its digest under the first condition that has an answer."""
    names: dict[int, str] = {}
    for answer in sorted(answers, key=lambda item: item.row.index):
        names.setdefault(answer.row.prompt_index, answer.row.digest)
    return [names[answer.row.prompt_index] for answer in answers]


def _add_up(items: Sequence[ConversationCounts]) -> ConversationCounts:
    digests = " ".join(sorted(item.digest for item in items))
    condition = ", ".join(item.condition or "" for item in items)
    return replace(_sum(items), digest=digest_text(digests), condition=condition)


def _sum(items: Sequence[ConversationCounts]) -> ConversationCounts:
    if len(items) == 1:
        return items[0]
    histogram = tuple(map(sum, zip_longest(*(item.histogram for item in items), fillvalue=0)))
    counts = {name: sum(getattr(item, name) for item in items) for name in COUNTED}
    return replace(items[0], **counts, histogram=histogram if all(item.histogram for item in items) else ())


def _count(answers: "Sequence[Answer]") -> ConversationCounts:
    row = answers[0].row
    return ConversationCounts.of_turns(
        [answer.output for answer in answers],
        id=row.id,
        prompt_index=row.prompt_index,
        digest=row.digest,
        category=row.category,
        condition=row.condition_name,
    )


def count_turns(turns: Sequence[TurnSteps]) -> dict[str, Any]:
    """Return tokens, steps and the histogram of a conversation's turns, by the field names of `ConversationCounts`."""
    counts: dict[str, Any] = dict.fromkeys(COUNTED, 0)
    lengths = Counter(length for turn in turns for length in turn.acceptance_lengths)
    counts["histogram"] = tuple(lengths[length] for length in range(1, max(lengths, default=0) + 1))
    far = max(2 * turns[0].prompt_len, turns[0].prompt_len + FAR)
    for turn in turns:
        context = turn.prompt_len
        for length, kept in zip(turn.acceptance_lengths, turn.committed_lengths, strict=True):
            counts["num_tokens"] += length
            counts["num_steps"] += 1
            counts["num_far_tokens"] += length if context >= far else 0
            counts["num_far_steps"] += context >= far
            context += kept
    return counts
