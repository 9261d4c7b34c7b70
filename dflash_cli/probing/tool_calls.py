"""Read tool calls from answers in the form of OpenAI's chat completions, which all engines share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.checkpoint.strict_json import loads
from dflash_runtime.json_values import as_object, is_int

MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedToolCall:
    """The first tool call of an answer. `arguments` is None without a call; `text` is the rest of the answer.

    `thought` is the text that a parser of reasoning has moved out of the answer.
    """

    name: str | None
    arguments: str | None
    text: str
    finish_reason: str | None
    num_tokens: int | None
    thought: str = ""


def read_call(document: Any) -> ServedToolCall:
    """The first tool call of an answer in one piece. Raises LookupError, TypeError or AttributeError of other forms."""
    choice = document["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or [{}]
    function = as_object(calls[0].get("function"))
    return ServedToolCall(
        name=_text(function.get("name")),
        arguments=_text(function.get("arguments")),
        text=_text(message.get("content")) or "",
        finish_reason=_text(choice.get("finish_reason")),
        num_tokens=_count(as_object(document.get("usage")).get("completion_tokens")),
        thought=_thought(message),
    )


def read_streamed_call(text: str) -> ServedToolCall:
    """The first tool call of a stream of events, put together from its pieces. Also raises ValueError."""
    name, arguments, content, thought, reason = None, None, "", "", None
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        for choice in as_object(loads(data.encode())).get("choices") or []:
            delta = as_object(choice.get("delta"))
            content += _text(delta.get("content")) or ""
            thought += _thought(delta)
            reason = _text(choice.get("finish_reason")) or reason
            for call in delta.get("tool_calls") or []:
                function = as_object(call.get("function"))
                if not call.get("index"):
                    name = _text(function.get("name")) or name
                    arguments = (arguments or "") + (_text(function.get("arguments")) or "")
    return ServedToolCall(
        name=name, arguments=arguments, text=content, finish_reason=reason, num_tokens=None, thought=thought
    )


def _thought(message: Mapping[str, Any]) -> str:
    """The reasoning of a message. Names differ between engines and releases."""
    return _text(message.get("reasoning_content")) or _text(message.get("reasoning")) or ""


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if is_int(value) and 0 <= value < MAX_TOKENS else None
