"""Tokens and steps of each conversation of a result: what two results are compared by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_cli.generation.answers import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationCounts:
    """Tokens that the steps of one conversation gave, and how many steps there were, over all its turns.

    `digest` is the same for the same prompt in another result; `name` is what people call it.
    """

    digest: str
    name: str
    category: str | None = None
    num_tokens: float
    num_steps: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def count_conversations(answers: Sequence[Answer]) -> tuple[ConversationCounts, ...]:
    """The conversations of answers, in input order."""
    turns: dict[int, list[Answer]] = {}
    for answer in answers:
        turns.setdefault(answer.row.index, []).append(answer)
    return tuple(_count(turns[index]) for index in sorted(turns))


def _count(answers: Sequence[Answer]) -> ConversationCounts:
    row = answers[0].row
    lengths = [length for answer in answers for length in answer.output.acceptance_lengths]
    return ConversationCounts(
        digest=row.digest,
        name=str(row.id) if row.id is not None else f"prompt {row.index + 1}",
        category=row.category,
        num_tokens=sum(lengths),
        num_steps=len(lengths),
    )


def pool_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[ConversationCounts, ...]:
    """Conversations from rows of turns, which have `key` and the fields of `ConversationCounts`; first one first."""
    pooled: dict[Any, dict[str, Any]] = {}
    for row in rows:
        kept = pooled.setdefault(row["key"], {**row, "num_tokens": 0, "num_steps": 0})
        kept["num_tokens"] += row["num_tokens"]
        kept["num_steps"] += row["num_steps"]
    return tuple(
        ConversationCounts(**{name: value for name, value in kept.items() if name != "key"}) for kept in pooled.values()
    )
