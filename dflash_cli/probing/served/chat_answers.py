"""Answers to chats in the form of OpenAI's chat completions, which all engines share, and their tool calls."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_cli.documents.reading import text_lines
from dflash_cli.probing.served.chat_protocol import list_calls, stream_faults, whole_faults
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.json_values import as_object, is_int

MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedToolCall:
    """The first tool call of an answer. `arguments` is None without a call; `text` is the rest of the answer.

    `thought` is the text that a parser of reasoning has moved out of the answer. `faults` says what differs from
    OpenAI's protocol. Arguments that are an object are written as JSON, so that their contents are judged alone.
    A stream is cut (`is_cut`) if it ends without a reason, an error and `[DONE]`.
    """

    name: str | None
    arguments: str | None
    text: str
    finish_reason: str | None
    num_tokens: int | None
    thought: str = ""
    faults: tuple[str, ...] = ()
    is_cut: bool = False

    @property
    def letters(self) -> str:
        """The reasoning, the text and the arguments without white space."""
        return "".join(f"{self.thought}{self.text}{self.arguments or ''}".split())

    @property
    def num_letters(self) -> int:
        return len(self.letters)


def has_letters(whole: str, part: str) -> bool:
    """Whether a text is left if some letters of `whole` are taken out."""
    letters: Iterable[str] = iter(whole)
    return all(letter in letters for letter in part)


def verb_of_stream(whole: str, streamed: str) -> str:
    """A word for the change of a text in a stream: it loses, doubles or changes text."""
    if has_letters(whole, streamed):
        return "loses"
    return "doubles" if has_letters(streamed, whole) and set(streamed) <= set(whole) else "changes"


def read_call(document: Any) -> ServedToolCall:
    """The first tool call of an answer in one piece. Raises LookupError, TypeError or AttributeError of other forms."""
    choice = document["choices"][0]
    message = choice["message"]
    calls = list_calls(message.get("tool_calls")) or [{}]
    function = as_object(calls[0].get("function"))
    arguments = function.get("arguments")
    return ServedToolCall(
        name=_text(function.get("name")),
        arguments=json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments),
        text=_text(message.get("content")) or "",
        finish_reason=_text(choice.get("finish_reason")),
        num_tokens=_count(as_object(document.get("usage")).get("completion_tokens")),
        thought=_thought(message),
        faults=whole_faults(document),
    )


def read_streamed_call(text: str) -> ServedToolCall:
    """The first tool call of a stream of events, put together from its pieces. Also raises ValueError."""
    name, arguments, content, thought, reason = None, None, "", "", None
    lines = [line.removeprefix("data:").strip() for line in text_lines(text) if line.startswith("data:")]
    events = _events(lines, is_open=not text.endswith(("\n", "\r")))
    for event in events:
        for choice in event.get("choices") or []:
            delta = as_object(choice.get("delta"))
            content += _text(delta.get("content")) or ""
            thought += _thought(delta)
            reason = _text(choice.get("finish_reason")) or reason
            for call in list_calls(delta.get("tool_calls")):
                function = as_object(call.get("function"))
                if not call.get("index"):
                    name, part = _text(function.get("name")) or name, function.get("arguments")
                    text_part = json.dumps(part) if isinstance(part, dict) else _text(part)
                    arguments = (arguments or "") + (text_part or "")
    failed = any(event.get("error") for event in events) or any(
        line.startswith(("error:", "event: error")) for line in text_lines(text)
    )
    is_cut = bool(events) and reason is None and not failed and "[DONE]" not in lines
    return ServedToolCall(
        name=name,
        arguments=arguments,
        text=content,
        finish_reason=reason,
        num_tokens=None,
        thought=thought,
        faults=stream_faults(events, is_cut=is_cut),
        is_cut=is_cut,
    )


def _events(lines: Sequence[str], *, is_open: bool) -> list[Mapping[str, Any]]:
    """The events of a stream. If `is_open`, the last line is unfinished and may hold a part of an event."""
    found = []
    for place, data in enumerate(lines):
        try:
            found += [] if data == "[DONE]" else [as_object(loads(data.encode()))]
        except ValueError:
            if not (is_open and place == len(lines) - 1):
                raise
    return found


def _thought(message: Mapping[str, Any]) -> str:
    """The reasoning of a message. Names differ between engines and releases."""
    return _text(message.get("reasoning_content")) or _text(message.get("reasoning")) or ""


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if is_int(value) and 0 <= value < MAX_TOKENS else None


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """An answer to a chat. `question` is the same for the same messages.

    stop  a string of the request that ends the answer
    tool  the name of the tool that the answer must call
    """

    question: str
    is_streamed: bool
    answer: ServedToolCall
    stop: str | None = None
    tool: str | None = None
