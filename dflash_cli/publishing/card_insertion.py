"""Insert a block of Markdown and metadata into an existing model card, between marks.

The marks are comments: of Markdown around the block, of YAML around the metadata at the head of the card. All bytes
outside the marks stay the same. Metadata that the card already states outside the marks is not inserted.
"""

from dataclasses import dataclass
from pathlib import Path

from dflash_cli.documents.yaml_text import FENCE, read_yaml, split_card, to_yaml
from dflash_cli.publishing.model_card import ModelCard
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural

BLOCK_MARKS = "<!-- dflash card: begin -->", "<!-- dflash card: end -->"
METADATA_MARKS = "# dflash card: begin", "# dflash card: end"


@dataclass(frozen=True, slots=True)
class Insertion:
    """The text of a card with the block, and the names in `left`: metadata that the card already stated."""

    text: str
    left: tuple[str, ...] = ()


def insert_card(existing: str, card: ModelCard, path: Path | None = None) -> Insertion:
    """Insert a card's block and metadata into an existing text, in place of an earlier block and metadata.

    The first block goes to the end of the text. Inserted lines end like the first line of the text. `path` is for
    errors.

    Raises:
        UsageError: a mark is missing or repeated, or the head of the text is not YAML.
    """
    head, body, ends = split_card(existing, path)
    fence = FENCE + ends
    marks = _Marks(*METADATA_MARKS, ends, path)
    stated = read_yaml(marks.outside(head), "metadata of the card", path)
    metadata = {key: value for key, value in card.metadata.items() if key not in stated}
    head = marks.replace(head, to_yaml(metadata) if metadata else "", at_end=head)
    body = _Marks(*BLOCK_MARKS, ends, path).replace(body, card.block, at_end=_with_blank_line(body, ends))
    return Insertion(fence + head + fence + body, tuple(key for key in card.metadata if key in stated))


@dataclass(frozen=True, slots=True)
class _Marks:
    """The first and last line of a region that this module writes, and the line ends of the card."""

    begin: str
    end: str
    ends: str
    path: Path | None

    def outside(self, text: str) -> str:
        """Return the text without the region."""
        bounds = self.bounds(text)
        return text if bounds is None else text[: bounds[0]] + text[bounds[1] :]

    def replace(self, text: str, inside: str, *, at_end: str) -> str:
        """Return the text with a new region in place of the old one, or `at_end` and the new region."""
        bounds, region = self.bounds(text), f"{self.begin}\n{inside}{self.end}\n".replace("\n", self.ends)
        return at_end + region if bounds is None else text[: bounds[0]] + region + text[bounds[1] :]

    def bounds(self, text: str) -> tuple[int, int] | None:
        """Return start and end of the region, marks included, or None without any mark.

        Raises:
            UsageError: a mark is missing or repeated.
        """
        begin, end = self.begin + self.ends, self.end + self.ends
        counts = text.count(begin), text.count(end)
        if counts == (0, 0):
            return None
        first, last = text.find(begin), text.find(end)
        if counts != (1, 1) or last < first:
            raise UsageError(
                f"found {plural(counts[0], 'line')} {self.begin!r} and {plural(counts[1], 'line')} {self.end!r}, "
                "expected one of each, in this order",
                id="card-marks",
                path=self.path,
                field=self.begin,
                found=counts,
                hint="delete these lines and the text between them, then insert again",
            )
        return first, last + len(end)


def _with_blank_line(body: str, ends: str) -> str:
    """Return the text with a blank line at its end; an empty text stays empty."""
    if not body or body.endswith(2 * ends):
        return body
    return body + (ends if body.endswith(ends) else 2 * ends)
