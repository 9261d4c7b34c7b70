"""Writing a block and metadata into a model card between marks, and nothing else of it.

The block stands between two comments of Markdown, the metadata between two comments of YAML at the head of the card.
Every byte outside of them stays, and metadata that a card states itself is left to it.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from dflash_cli.publishing.model_card import ModelCard, to_yaml
from dflash_runtime.errors import UsageError

BLOCK_MARKS = "<!-- dflash card: begin -->", "<!-- dflash card: end -->"
METADATA_MARKS = "# dflash card: begin", "# dflash card: end"
FENCE = "---"


@dataclass(frozen=True, slots=True)
class Insertion:
    """A card with the block in it, and the metadata that it states itself, which was left."""

    text: str
    left: tuple[str, ...] = ()


def insert_card(existing: str, card: ModelCard) -> Insertion:
    """Put a card's block and metadata into a text, in place of those that stand there.

    Without a block so far it goes to the end. Line ends are those of the text.

    Raises:
        UsageError: one of two marks is missing, they stand twice, or the head of the text is no YAML.
    """
    ends = "\r\n" if existing.partition("\n")[0].endswith("\r") else "\n"
    fence = FENCE + ends
    head, body = _split(existing, fence)
    stated = _stated(_without(head, _Marks(*METADATA_MARKS, ends)))
    metadata = {key: value for key, value in card.metadata.items() if key not in stated}
    head = _replaced(head, to_yaml(metadata) if metadata else "", _Marks(*METADATA_MARKS, ends), at_end=head)
    body = _replaced(body, card.block, _Marks(*BLOCK_MARKS, ends), at_end=_ended(body, ends))
    return Insertion(fence + head + fence + body, tuple(key for key in card.metadata if key in stated))


@dataclass(frozen=True, slots=True)
class _Marks:
    """The lines between which we write, and how lines of the card end."""

    begin: str
    end: str
    ends: str

    def around(self, text: str) -> str:
        return f"{self.begin}\n{text}{self.end}\n".replace("\n", self.ends)

    def bounds(self, text: str) -> tuple[int, int] | None:
        """Where the marked region begins and ends, marks and the end of its last line included."""
        begin, end = self.begin + self.ends, self.end + self.ends
        counts = text.count(begin), text.count(end)
        if counts == (0, 0):
            return None
        first, last = text.find(begin), text.find(end)
        if counts != (1, 1) or last < first:
            raise UsageError(
                f"the card has {counts[0]} of {self.begin!r} and {counts[1]} of {self.end!r}, expected one line each",
                hint="take them out, with what stands between, and insert again",
            )
        return first, last + len(end)


def _split(text: str, fence: str) -> tuple[str, str]:
    """The YAML between the fences at the head of a card, its last line's end included, and what comes after."""
    if not text.startswith(fence):
        return "", text
    ends = fence.removeprefix(FENCE)
    head, found, body = text[len(FENCE) :].partition(f"{ends}{fence}")
    if not found:
        raise UsageError("the card's metadata has no end", hint="close it with a line ---")
    return f"{head}{ends}".removeprefix(ends), body


def _stated(head: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(head) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"the card's metadata is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise UsageError("the card's metadata is no mapping of names to values")
    return found


def _without(text: str, marks: _Marks) -> str:
    bounds = marks.bounds(text)
    return text if bounds is None else text[: bounds[0]] + text[bounds[1] :]


def _replaced(text: str, inside: str, marks: _Marks, *, at_end: str) -> str:
    """The text with the region in place of the old one, or after `at_end`, which is the text made ready for it."""
    bounds, region = marks.bounds(text), marks.around(inside)
    return at_end + region if bounds is None else text[: bounds[0]] + region + text[bounds[1] :]


def _ended(body: str, ends: str) -> str:
    """The text with an empty line at its end."""
    if not body or body.endswith(2 * ends):
        return body
    return body + (ends if body.endswith(ends) else 2 * ends)
