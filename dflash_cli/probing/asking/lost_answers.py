"""Find chats that end by themselves with neither content nor a call, because a parser puts the answer elsewhere.

A parser of reasoning may take for granted that the model thinks first. The answer of a model that does not think is
then taken for reasoning as a whole, and a call in it is not parsed. An answer that a limit of tokens or a string of the
request ends may lack its content for good reasons, so such answers are not judged.
"""

import re
from collections import Counter
from collections.abc import Sequence

from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import AnsweredChat
from dflash_runtime.phrases import shorten

BY_ITSELF = ("stop", "tool_calls")
MIN_LOST, MOST = 2, 0.5
"""Lost answers that are a fault, and their share among the chats of one form that end by themselves."""
MIN_LETTERS, MIN_TOKENS = 16, 8
"""A chat has an answer if one of its forms has this many letters or tokens."""
MARKS = re.compile(r"</?[^<>\s]{1,40}>")
"""Marks of templates, which do not count as content."""


def find_lost_answers(chats: Sequence[AnsweredChat]) -> list[ServedFinding]:
    """A finding if several chats have lost their answer: an error, which says whether the reasoning has the text."""
    ended = [item for item in chats if item.answer.finish_reason in BY_ITSELF and item.stop is None]
    lost = [item for item in ended if _is_lost(item, chats)]
    if _num_typical(ended, lost) < MIN_LOST:
        return []
    kinds = {
        "chats without a tool": [item for item in ended if not item.tool],
        "answers to required tool calls": [item for item in ended if item.tool],
    }
    counts = [f"{sum(item in lost for item in own)} of {len(own)} {kind}" for kind, own in kinds.items() if own]
    seen = f"{' and '.join(counts)} end by themselves with neither content nor a call"
    thoughts = [item.answer.thought for item in sorted(lost, key=lambda item: not item.tool) if _thinks(item)]
    seen += f"; their text is in the reasoning, such as {shorten(repr(thoughts[0]), 80)}" if thoughts else ""
    finding = ServedFinding(
        id="answers-in-reasoning" if thoughts else "answers-empty",
        severity="error",
        seen=seen,
        follows=(IN_REASONING if thoughts else EMPTY) + (STREAMED if all(i.is_streamed for i in lost) else WHOLE),
        next="switch the server's parser of reasoning off or choose the one of this model (--reasoning-parser of vLLM "
        "and SGLang, --reasoning-format of llama.cpp); or switch thinking on in the chat template",
    )
    return [finding]


IN_REASONING = (
    "the parser of reasoning takes whole answers for reasoning, as if the model always thought first: clients get "
    "empty answers, and calls are not parsed. "
)
EMPTY = "the model has written tokens, and a parser or a gateway drops their text. "
WHOLE = "Answers in one piece are parsed after their end, so the draft is not the reason"
STREAMED = (
    "Only streams lose them: a parser that expects one token at a time may miss the end of the reasoning within a "
    "step. Whether the draft is the reason is not known"
)


def _num_typical(ended: Sequence[AnsweredChat], lost: Sequence[AnsweredChat]) -> int:
    """Lost answers of each form that loses most answers: with a tool or without, streamed or in one piece."""
    every, own = (Counter((bool(item.tool), item.is_streamed) for item in items) for items in (ended, lost))
    return sum(number for form, number in own.items() if number >= MOST * every[form])


def _is_lost(item: AnsweredChat, chats: Sequence[AnsweredChat]) -> bool:
    """Whether the answer has neither content nor a call, and the model wrote more than its end."""
    answer = item.answer
    if answer.name or answer.arguments is not None or MARKS.sub("", answer.text).strip():
        return False
    if item.tool and _thinks(item):
        return item.tool in answer.thought  # other thoughts may lead to no call
    own = [other.answer for other in chats if other.question == item.question]
    return any(other.num_letters >= MIN_LETTERS or (other.num_tokens or 0) >= MIN_TOKENS for other in own)


def _thinks(item: AnsweredChat) -> bool:
    return bool(item.answer.thought.strip())
