"""Find answers of chats that go on behind the end of their turn."""

import re
from collections.abc import Sequence

from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import ServedToolCall
from dflash_runtime.phrases import shorten

MARK = re.compile(
    r"<\|(?:im_end|im_start|eot_id|end_of_turn|endoftext|end_of_text|start_header_id|user)\|>"
    r"|<(?:start|end)_of_turn>|</s>|\[INST\]"
)
"""Marks between the turns of a chat, by the templates of common models. No answer has text behind one."""


def find_run_on(answers: Sequence[ServedToolCall]) -> list[ServedFinding]:
    """A finding if all answers have a mark between turns in their text, and text behind it."""
    found = [MARK.search(item.text) for item in answers]
    rests = [item.text[mark.start() :] for item, mark in zip(answers, found, strict=True) if mark is not None]
    if len(rests) < max(2, len(answers)) or not all(MARK.sub("", rest).strip() for rest in rests):
        return []
    finding = ServedFinding(
        id="chats-go-on",
        severity="error",
        seen=f"{len(rests)} of {len(answers)} chats go on behind the mark of a turn's end, such as "
        f"{shorten(repr(rests[0][:60]), 80)}",
        follows="the server passes over the end of a turn, which may be in the middle of a step. Whether the draft is "
        "the reason is not known",
        next="ask the same without the draft; check the ids of end tokens in the server's settings",
    )
    return [finding]
