"""Find streams of chats that end early, as behind a proxy with a limit of time or size.

A stream says at its end why it ends (`finish_reason`), and engines send `[DONE]` behind it. A stream with neither one
was cut. Its text is compared with the same chat in one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import ServedToolCall
from dflash_runtime.phrases import plural


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """An answer to a chat. `question` is the same for the same messages."""

    question: str
    is_streamed: bool
    answer: ServedToolCall


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
