"""Scripted servers that take answers for reasoning, keep only the state after an answer, or rewrite a schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_testing.fake_engines import Ids, Text
from dflash_testing.scripted_servers import LONG, Script

OTHER_KEYS = json.dumps({"answer": {"common_name": "oak"}, "note": "a plant"})


@dataclass
class Swallowing(Script):
    """The text of some answers is in the field `into`, or nowhere, and their content is null.

    ends     the reason for the end of such answers
    written  what the model writes in place of a call, if that is not the call
    """

    of: Literal["all", "tools", "chats", "streams", "whole", "every second"] = "all"
    into: str = "reasoning_content"
    ends: str = "stop"
    written: str = ""
    content: str | None = None
    num_chats: int = 0

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, _, count = super().tool_call()
        self.num_chats += 1
        is_struck = {
            "all": True,
            "tools": "tools" in self.body,
            "chats": "tools" not in self.body,
            "streams": bool(self.body.get("stream")),
            "whole": not self.body.get("stream"),
            "every second": self.num_chats % 2 == 0,
        }[self.of]
        if not is_struck:
            return message, "tool_calls" if message.get("tool_calls") else "stop", count
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        text = message["content"] or "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
        text = self.written if calls and self.written else text
        found = {"role": "assistant", "content": self.content} | ({self.into: text} if self.into else {})
        return found, self.ends, count

    def as_thought(self, message: Mapping[str, Any]) -> str:
        return str(message.get(self.into) or "")


class KeepsEnds(Script):
    """Only a prompt that goes on from an earlier long prompt is found in the cache."""

    def find_turn(self, ids: Ids) -> int:
        return max(
            (len(item) for item in list(self.num_asked) if LONG <= len(item) < len(ids) and ids[: len(item)] == item),
            default=0,
        )


@dataclass
class AnyJson(Script):
    """Answers by a schema have other keys, or only answers to a request with `response_format` do."""

    is_rewritten: bool = True

    def json_answer(self, ids: Ids, *, is_plain: bool) -> Text:
        text = super().json_answer(ids, is_plain=is_plain)
        return replace(text, text=OTHER_KEYS) if "response_format" in self.body or not self.is_rewritten else text
