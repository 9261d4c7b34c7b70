"""Read prompts from arguments, a JSON Lines file or stdin, and turn them into token ids.

A row has exactly one of these keys:

    prompt             text, continued as it is, or a user message with --chat
    messages           a conversation for the target's chat template
    turns              user messages. Each is answered before the next is asked
    prompt_token_ids   token ids, which need no tokenizer

A row may also have `id`, `category`, `tools` for the chat template and, to score its answer, `reference`.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from dflash_cli.documents.reading import bounded_lines, open_text
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.checkpoint.stored.digests import digest_text
from dflash_runtime.checkpoint.stored.strict_json import MAX_JSON_BYTES, parse_json, too_large_json
from dflash_runtime.documents import HIDDEN, OPTIONAL
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, RequestError, UsageError
from dflash_runtime.json_values import is_int
from dflash_runtime.phrases import shorten

KINDS = ("prompt", "messages", "turns", "prompt_token_ids")

Message = dict[str, Any]
Sample = Literal["stratified", "head", "random"]
"""How a subset is chosen: from each category in proportion, the first rows, or at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row of prompts, as given. `where` names it in messages: a line of a file, or a number from 1 on.

    Under several conditions, a prompt has one row per condition. Each of these has its own `index`, and all have the
    same `prompt_index`.
    """

    index: int
    kind: str
    value: Any
    id: str | int | None = None
    category: str | None = None
    where: Annotated[str, HIDDEN] = "prompt"
    reference: str | None = None
    condition: Condition | None = None
    prompt_index: int = -1
    tools: Annotated[Sequence[Mapping[str, Any]] | None, OPTIONAL] = None

    def __post_init__(self) -> None:
        if self.prompt_index < 0:
            object.__setattr__(self, "prompt_index", self.index)

    @property
    def num_turns(self) -> int:
        return len(self.value) if self.kind == "turns" else 1

    @property
    def is_plain(self) -> bool:
        """Whether the target answers this row without its draft."""
        return self.condition is not None and self.condition.is_plain

    @property
    def is_free(self) -> bool:
        """Whether the answer to this row does not follow the run's grammar."""
        return self.condition is not None and self.condition.grammar == "off"

    @property
    def condition_name(self) -> str | None:
        """The name of the row's condition; None without conditions."""
        return self.condition.name if self.condition is not None else None

    @property
    def digest(self) -> str:
        """Hash of the prompt and its condition. A resumed run finds stored answers by it."""
        under: list[Any] = [] if self.condition is None else [self.condition.name]
        under += [] if self.tools is None else [self.tools]
        text = json.dumps([self.kind, self.value, *under], ensure_ascii=False, sort_keys=True)
        return digest_text(text)


@contextmanager
def naming_row(row: PromptRow) -> Iterator[None]:
    """Add the file and line of a row to errors of code that knows only the row's tokens."""
    try:
        yield
    except RequestError as error:
        if not error.message.startswith(row.where):
            error.message = f"{row.where}: {error.message}"
            error.args = (error.message,)
        raise


@dataclass(slots=True)
class Conversation:
    """A row and its progress through its turns."""

    row: PromptRow
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    @property
    def is_done(self) -> bool:
        return self.turn >= self.row.num_turns

    def next_prompt(self, tokenizer: Tokenizer | None, *, chat: bool) -> list[int]:
        """Return the token ids of the next turn.

        Raises:
            RequestError: text without a tokenizer, or messages without a chat template.
        """
        kind, value = self.row.kind, self.row.value
        if kind == "prompt_token_ids":
            return list(value)
        if tokenizer is None:
            raise RequestError(
                f"{self.row.where}: the row holds text, but the target's directory lacks a tokenizer",
                id="no-tokenizer",
                field=kind,
                hint="give rows with prompt_token_ids, or a target directory with tokenizer.json",
            )
        if kind == "prompt" and not chat:
            return tokenizer.encode(value)
        if not tokenizer.has_template:
            field = "--chat" if kind == "prompt" else kind
            raise RequestError(
                f"{self.row.where}: {field} needs a chat template, which the target's tokenizer lacks",
                id="no-chat-template",
                field=field,
                hint="give rows with prompt, without --chat, or a target that was trained on chats",
            )
        if kind == "messages":
            self.messages = list(value)
        else:
            self.messages.append({"role": "user", "content": value[self.turn] if kind == "turns" else value})
        options = {} if self.row.condition is None else dict(self.row.condition.template_options)
        if self.row.tools is not None:
            options["tools"] = list(self.row.tools)
        return tokenizer.render(self.messages, where=self.row.where, options=options)

    def fail(self) -> None:
        """End the conversation, because later turns build on a turn that failed."""
        self.turn = self.row.num_turns

    def add_answer(self, text: str | None) -> None:
        """Store the answer to the current turn."""
        self.messages.append({"role": "assistant", "content": text or ""})
        self.turn += 1


def gather_rows(arguments: Sequence[str], prompts: str | None) -> list[PromptRow]:
    """Return rows from the command line's arguments or `--prompts`.

    Raises:
        UsageError: both are given, or none of them.
        RequestError: a row is malformed; the error names file and line.
    """
    if arguments and prompts is not None:
        raise UsageError(
            "prompts are given both as arguments and by --prompts",
            id="two-prompt-sources",
            hint="leave out one of them",
        )
    if arguments:
        texts = [_read_stdin() if text == "-" else text for text in arguments]
        return [
            PromptRow(index=index, kind="prompt", value=text, where=f"prompt {index + 1}")
            for index, text in enumerate(texts)
        ]
    if prompts == "-":
        with open_text(None) as lines:
            return parse_rows(lines, "stdin")
    if prompts is None:
        raise UsageError(
            "no prompt was given", id="no-prompt", hint='dflash generate "def fibonacci(n):", or --prompts FILE.jsonl'
        )
    path = Path(prompts)
    try:
        with open_text(path) as lines:
            return parse_rows(lines, str(path))
    except CheckpointNotFound as error:
        if "://" not in prompts:
            raise
        hint = "download it, and name the file"
        raise CheckpointNotFound("no such file", id=error.id, path=prompts, hint=hint) from error


def parse_rows(stream: TextIO, name: str) -> list[PromptRow]:
    """Parse JSON Lines. Blank lines are skipped.

    Raises:
        RequestError: naming the line, the field, the value found and the value expected.
    """
    rows: list[PromptRow] = []
    for number, line in bounded_lines(stream, name):
        rows.append(_parse_row(line, f"{name}:{number}", len(rows)))
    if not rows:
        raise RequestError("found no rows, expected one JSON object per line", id="no-rows", path=name)
    return rows


def sample_rows(rows: Sequence[PromptRow], count: int, *, seed: int, sample: Sample = "stratified") -> list[PromptRow]:
    """Return `count` rows in input order: in proportion from each category, the first ones, or at random.

    With the same seed, a smaller sample is part of a larger sample, so its answers can be used again.
    """
    if sample == "head":
        return list(rows[:count])
    generator = random.Random(seed)
    categories: dict[str | None, list[PromptRow]] = {}
    for row in rows:
        categories.setdefault(None if sample == "random" else row.category, []).append(row)
    places = []
    for members in categories.values():
        drawn = generator.sample(members, len(members))
        tie = generator.random()
        places += [((place + 0.5) / len(drawn), tie, row.index) for place, row in enumerate(drawn)]
    chosen = {index for _, _, index in sorted(places)[:count]}
    return [row for row in rows if row.index in chosen]


def digest_rows(rows: Iterable[PromptRow]) -> str:
    """Return a hash over all rows in order. Results store it, so that runs on the same prompts can be recognised."""
    return digest_text("".join(row.digest for row in rows))


def _read_stdin() -> str:
    with open_text(None) as stream:
        text = stream.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise too_large_json(len(text), Path("stdin"))
    if not text:
        raise UsageError("stdin: empty, expected a prompt", id="empty-stdin")
    return text


def _parse_row(line: str, where: str, index: int) -> PromptRow:
    try:
        row = parse_json(line.encode(), Path(where))
    except CheckpointError as error:
        raise RequestError(error.message, id=error.id, hint=_how_to_convert(line)) from error
    return make_row(row, where, index)


def _how_to_convert(line: str) -> str | None:
    """Return how to make JSON Lines of a file with this line, None if the line begins as an object does."""
    if line[0] == "[":
        return "expected JSON Lines, one object per line; jq -c '.[]' converts a list"
    if line.lstrip().startswith("{"):
        return None
    return 'expected JSON Lines, such as {"prompt": "..."}; jq -R \'{prompt: .}\' makes a prompt of each line of a text'


def make_row(row: Mapping[str, Any], where: str, index: int) -> PromptRow:
    """Return the row of an object with one of KINDS.

    Raises:
        RequestError: naming the row, the field, the value found and the value expected.
    """
    kinds = [kind for kind in KINDS if row.get(kind) is not None] or [kind for kind in KINDS if kind in row]
    if len(kinds) != 1:
        found = " and ".join(kinds) or ", ".join(row) or "nothing"
        hint = None if kinds else "name the field with the text prompt, or turns if it is a list of questions"
        text = f"found {found}, expected exactly one of {', '.join(KINDS)}"
        raise RequestError(text, id="not-one-prompt", path=where, found=list(row), hint=hint)
    kind = kinds[0]
    expected = _problem(kind, row[kind])
    if expected is not None:
        text = f"{kind}: found {_brief(row[kind])}, expected {expected}"
        raise RequestError(text, path=where, field=kind, found=row[kind], expected=expected)
    category = row.get("category")
    return PromptRow(
        index=index,
        kind=kind,
        value=row[kind],
        id=row.get("id"),
        category=str(category) if category is not None else None,
        where=where,
        reference=str(row["reference"]) if isinstance(row.get("reference"), str | int | float) else None,
        tools=_tools_of(row, where),
    )


def _tools_of(row: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools of a row, or None.

    Raises:
        RequestError: they are not a list of objects.
    """
    tools = row.get("tools")
    if tools is None or (isinstance(tools, list) and tools and all(isinstance(item, dict) for item in tools)):
        return tools
    expected = "a list of one or more objects"
    text = f"tools: found {_brief(tools)}, expected {expected}"
    raise RequestError(text, path=where, field="tools", found=tools, expected=expected)


def _problem(kind: str, value: Any) -> str | None:
    """Return the expected form of a value that is malformed, or None if the value is well-formed."""
    if kind == "prompt":
        return None if isinstance(value, str) else "a string"
    if kind == "prompt_token_ids":
        is_ids = isinstance(value, list) and value and all(is_int(item) for item in value)
        return None if is_ids else "a list of one or more ids"
    if kind == "turns":
        is_turns = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
        return None if is_turns else "a list of one or more strings"
    is_messages = isinstance(value, list) and value and all(_is_message(item) for item in value)
    return None if is_messages else "a list of objects with role and content"


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _brief(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False), 60)
