"""A measured acceptance for `dflash compare`, from this tool or another program.

The content of a file tells its format: each format of `importers/` recognises its own files and reads them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.curve_shape import CurveShape, find_shapes
from dflash_cli.documents.reading import parse_object, read_text, text_lines
from dflash_runtime.checkpoint.stored.strict_json import MAX_ROWS_BYTES, loads
from dflash_runtime.documents import HIDDEN, computed_key, from_json
from dflash_runtime.errors import CheckpointNotFound, InvalidConfig, UsageError
from dflash_runtime.metrics import AcceptanceCounts
from dflash_runtime.phrases import shorten
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.comparing.importers"
MAX_SHOWN_CHARS = 300
ROUNDING = 1e-3
"""The largest relative difference between the stated acceptance length and the length that the counts give."""
HOW_TO_WRITE = (
    "write one with: dflash eval-acceptance DRAFT --json > result.json; with --output FILE --resume, from the answers "
    "in a file"
)
Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class MeasuredResult:
    """One compared result.

    A file with totals only lacks conversations, and `why_no_rows` gives the reason. `counts` is set if the file has
    counts by position. `definition` is a key of `statistics.DEFINITIONS`, or describes another definition. `facts`
    describe the measurement.
    """

    name: str
    source: Annotated[str, "the program that wrote the file"]
    acceptance_len: float
    conversations: Annotated[tuple[ConversationCounts, ...], HIDDEN] = ()
    why_no_rows: str | None = None
    definition: Annotated[str, HIDDEN] = "vllm"
    has_first_token: Annotated[bool, HIDDEN, "whether tokens include the one that the prefill returns"] = False
    counts: Annotated[AcceptanceCounts | None, HIDDEN] = None
    facts: Annotated[Mapping[str, Any], HIDDEN] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.acceptance_len, bool) or not 1 <= self.acceptance_len < math.inf:
            raise ValueError(f"acceptance length: found {self.acceptance_len!r}, expected a number, 1 or more")

    def check_counts(self) -> "MeasuredResult":
        """Require lengths from 1 to K + 1 tokens per step, and counts and rows that add up to the totals.

        Raises:
            ValueError: naming the length or the sums.
        """
        counts = self.counts
        num_drafted = counts.num_speculative_tokens if counts else self.facts.get("num_speculative_tokens")
        if not num_drafted:
            return self
        block = num_drafted + 1 + self.has_first_token
        lengths = {item.name: (item.num_tokens, item.num_steps) for item in self.conversations if item.num_steps}
        for name, (tokens, steps) in {"the total": (self.acceptance_len, 1), **lengths}.items():
            if not steps <= tokens <= block * steps:
                raise ValueError(f"acceptance length of {name}: found {tokens / steps:g}, expected 1 to {block}")
        if counts is None:
            return self
        counted = counts.acceptance_len or math.nan
        if not math.isclose(self.acceptance_len, counted, rel_tol=ROUNDING):
            raise ValueError(f"acceptance length: found {self.acceptance_len:g}, but the counts give {counted:g}")
        sums = tuple(sum(getattr(item, name) for item in self.conversations) for name in ("num_tokens", "num_steps"))
        expected = (counts.num_drafts + counts.num_accepted_tokens, counts.num_drafts)
        if self.conversations and sums != expected:
            raise ValueError(f"tokens and steps of all prompts: found {sums}, but the totals are {expected}")
        return self

    @property
    @computed_key
    def num_conversations(self) -> int:
        """Number of conversations; 0 if the file has totals only."""
        return len(self.conversations)

    @property
    @computed_key
    def shapes(self) -> list[CurveShape]:
        """Shapes of the acceptance curve that point to a fault."""
        return find_shapes(self.counts, self.conversations, self.facts)


class ResultFile:
    """A file named on the command line: its text, and the text parsed as JSON or JSON Lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise CheckpointNotFound("no such file", id="file-not-found", path=path)
        if path.is_dir():
            raise UsageError(
                "is a directory, expected a file with a result", id="result-is-directory", path=path,
                expected="a file with a result", hint=HOW_TO_WRITE,
            )  # fmt: skip
        self.text = read_text(path, MAX_ROWS_BYTES)

    @cached_property
    def document(self) -> Any:
        """The JSON document of the file, or None if the file is not JSON."""
        return _parse(self.text)

    def has(self, *keys: str) -> bool:
        """Return whether the file is a JSON object with these keys."""
        return isinstance(self.document, dict) and self.document.keys() >= {*keys}

    @cached_property
    def parsed(self) -> dict[str, Any]:
        """The JSON object of the file, parsed strictly.

        Raises:
            UsageError: the file is not a JSON object.
        """
        if self.document is None and len(self.rows) > 1:
            raise UsageError(
                "has one JSON object per line, expected one result", id="rows-instead-of-result", path=self.path,
                found="JSON Lines", expected="one JSON object", hint=HOW_TO_WRITE,
            )  # fmt: skip
        return parse_object(self.text.encode(), self.path)

    def read(self, kind: type[Read], hint: str | None = None) -> Read:
        """Read the file strictly as a document of ours.

        Raises:
            UsageError: the file is not JSON, or a key is missing, unknown or holds a wrong value.
        """
        return from_json(kind, self.parsed, path=self.path, error=UsageError, hint=hint)

    def read_rows(self, kind: type[Read]) -> list[Read]:
        """Read every line after the first strictly as a document of ours.

        Raises:
            UsageError: naming the line and the key.
        """
        rows = list(self.numbered_rows.items())[1:]
        return [from_json(kind, row, path=f"{self.path}:{number}", error=UsageError) for number, row in rows]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The objects of the file's lines; see `numbered_rows`."""
        return [*self.numbered_rows.values()]

    @cached_property
    def numbered_rows(self) -> dict[int, dict[str, Any]]:
        """The objects of the file's lines by line number, without a last line that was cut off.

        A file that is one object on several lines has this object. Empty if the first line is not an object otherwise.

        Raises:
            UsageError: another line is not an object.
        """
        if isinstance(self.document, dict):
            return {1: self.document}
        lines = text_lines(self.text)
        rows = {number: (line, _parse(line)) for number, line in enumerate(lines, start=1) if line.strip()}
        if not rows or not isinstance(next(iter(rows.values()))[1], dict):
            return {}
        for number, (line, row) in rows.items():
            if not isinstance(row, dict) and number < len(lines):
                text = f"found {line[:20]!r}, expected a JSON object"
                raise UsageError(text, id="not-an-object", path=f"{self.path}:{number}", found=line)
        return {number: row for number, (_, row) in rows.items() if isinstance(row, dict)}

    def refuse(self, what: str, hint: str | None = None, *, id: str) -> UsageError:
        """Return an error about this file."""
        return UsageError(what, id=id, path=self.path, hint=hint)


def _parse(text: str) -> Any:
    """Return a JSON value, or None if the text is not JSON."""
    try:
        return loads(text)
    except ValueError:
        return None


class ResultFormat(ABC):
    """A file format with acceptance results. `title` names the format in messages and results."""

    title: ClassVar[str]

    def of_length(self, file: ResultFile, acceptance_len: float, **known: Any) -> MeasuredResult:
        """Return the result of a file with this acceptance length."""
        return MeasuredResult(name=str(file.path), source=self.title, acceptance_len=acceptance_len, **known)

    def of_counts(self, file: ResultFile, counts: AcceptanceCounts, **known: Any) -> MeasuredResult:
        """Return the result of a file with these counts by position.

        Raises:
            UsageError: the counts lack verify steps.
        """
        if counts.acceptance_len is None:
            raise file.refuse("the file lacks verify steps, so acceptance is unknown", id="no-steps")
        return self.of_length(file, counts.acceptance_len, counts=counts, **known)

    @abstractmethod
    def recognises(self, file: ResultFile) -> bool:
        """Return whether the content of a file has this format."""

    @abstractmethod
    def read(self, file: ResultFile) -> MeasuredResult:
        """Return the result in the file.

        Raises:
            UsageError: the file lacks data that a result needs.
        """


RESULT_FORMATS: Registry[type[ResultFormat]] = Registry("result format")


def read_result(path: Path) -> MeasuredResult:
    """Read a result of any known format.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: no format recognises the file, or the file lacks data that a result needs.
    """
    RESULT_FORMATS.discover(PACKAGE)
    file = ResultFile(path)
    formats = [kind() for kind in RESULT_FORMATS.values()]
    for item in formats:
        if item.recognises(file):
            return _read(item, file)
    if file.document is None and not file.rows and file.text.lstrip().startswith(("{", "[")):
        parse_object(file.text.encode(), path)  # refuses it with line and column
    known = ", ".join(item.title for item in formats)
    raise file.refuse("not a result in a known format", f"known formats: {known}", id="unknown-result-format")


MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError, InvalidConfig)
"""Errors of the readers of other programs' files: a value is of another type or out of range."""


def _read(kind: ResultFormat, file: ResultFile) -> MeasuredResult:
    try:
        return kind.read(file).check_counts()
    except MALFORMED as error:
        what = str(error) if type(error) is ValueError else repr(error)
        text = f"malformed file of {kind.title}: {shorten(what, MAX_SHOWN_CHARS)}"
        raise file.refuse(text, id="malformed-result") from error
