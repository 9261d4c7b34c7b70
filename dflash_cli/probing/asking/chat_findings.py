"""Find faults that any answer to a chat may show: an early end, text behind the end, and fields of other types.

A stream says at its end why it ends (`finish_reason`), and engines send `[DONE]` behind it. A stream with neither one
was cut. Its text is compared with the same chat in one piece.
"""

import re
from collections.abc import Sequence

from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import AnsweredChat, ServedToolCall
from dflash_runtime.phrases import plural, shorten


def find_cut_streams(chats: Sequence[AnsweredChat]) -> list[ServedFinding]:
    """A finding if streams lack their end: an error if all of them do."""
    streams = [item for item in chats if item.is_streamed]
    cut = [item for item in streams if item.answer.is_cut]
    if not cut:
        return []
    sizes: dict[str, int] = {}
    for item in chats:
        if not item.is_streamed:
            sizes[item.question] = max(sizes.get(item.question, 0), item.answer.num_letters)
    pairs = [(item.answer.num_letters, size) for item in cut if (size := sizes.get(item.question))]
    had, whole = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    seen = f"{len(cut)} of {plural(len(streams), 'stream')} of chats end without finish_reason and [DONE]"
    if whole:
        seen += f", after {had} of the {whole} letters that the same answers have in one piece"
    follows = (
        "something ends streams early, and clients take a part for the answer. Parsers lack the text that is missing"
    )
    if whole and had >= whole:
        follows = "the last events of streams are missing, so clients cannot tell a whole answer from a part"
    finding = ServedFinding(
        id="streams-cut",
        severity="error" if len(cut) == len(streams) else "warning",
        seen=seen,
        follows=follows,
        next="ask the engine at its own address; look for limits of the proxy or gateway before it: idle timeout, "
        "buffering of answers, size of a body",
    )
    return [finding]


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


def find_protocol_faults(whole: Sequence[ServedToolCall], streamed: Sequence[ServedToolCall]) -> list[ServedFinding]:
    """A finding if answers in one piece or streamed differ from OpenAI's protocol."""
    forms = {"in one piece": whole, "streamed": streamed}
    faults = {form: list(dict.fromkeys(fault for item in own for fault in item.faults)) for form, own in forms.items()}
    seen = [f"{form}: {'; '.join(found)}" for form, found in faults.items() if found]
    if not seen:
        return []
    sound = [form for form, found in faults.items() if not found and forms[form]]
    finding = ServedFinding(
        id="chat-protocol-broken",
        severity="error",
        seen=", ".join(seen) + (f"; answers {sound[0]} are as the protocol says" if sound else ""),
        follows="clients of OpenAI's protocol fail on such answers or miss the call. Types of fields do not depend on "
        "the draft: the server's writer of chat answers or a gateway is the reason",
        next="look for a newer release or another parser of tool calls, and report it to the engine",
    )
    return [finding]
