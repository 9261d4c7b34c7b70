"""Problems that several rules report in the same form."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash_cli.formats.fields import SCALES
from dflash_cli.rules.rule import Problem
from dflash_cli.rules.subject import Subject


def different_values(subject: Subject, field: str) -> str | None:
    """The text of a problem if several keys state a field with different values."""
    return different({item.key: item.raw for item in subject.stated.values(field)})


def different(stated: Mapping[str, Any]) -> str | None:
    """Return the text of a problem if two of the keys state different values."""
    values = list(stated.values())
    if all(value == values[0] for value in values):
        return None
    return f"stated twice with different values: {', '.join(f'{key} {value}' for key, value in stated.items())}"


def stated_scales(subject: Subject, fields: Iterable[str] = tuple(SCALES)) -> Iterator[Problem]:
    """A problem for each of these scales that is stated and changes something."""
    for field in fields:
        value, neutral = subject.stated.value(field), SCALES[field] or 0
        if value not in (None, neutral):
            yield Problem(subject.at(field), f"found {value}, expected {neutral:g} or no value")


def layout_in_words(is_anchor_first: bool) -> str:
    """The layout of a block: `anchor-first`, or `fill-in`."""
    return "anchor-first" if is_anchor_first else "fill-in"


def reduced_vocabulary(subject: Subject) -> Iterator[Problem]:
    """A problem if the draft proposes over a part of the target's vocabulary."""
    sizes = subject.stated.vocabulary_sizes
    if sizes is not None and sizes[0] < sizes[1]:
        yield Problem(subject.expected_at("draft_vocab_size"), f"{sizes[0]} of the target's {sizes[1]} ids")
