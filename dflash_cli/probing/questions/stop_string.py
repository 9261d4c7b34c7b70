"""Ask a chat to end at a word of its own text: does it end there?

A verify step commits several tokens at once. A server that looks for the string among the last tokens only misses it in
the middle of a step. The answer then goes on, or its end has text of the same step.
"""

import re

from dflash_cli.probing.asking.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import ServedToolCall
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import shorten

TEXT, ANSWER_LEN = "Write two sentences about rivers.", 64
MIN_LETTERS, NUM_WORDS, NUM_TRIES = 4, 4, 2
"""Words of MIN_LETTERS that come once in a text are strings to stop at."""


@QUESTIONS.register("stop-string")
def ask(session: QuestionSession) -> Outcome:
    """A finding if an answer goes on after a string at which it must end, each time."""
    first = _chat(session, None)
    whole = first.text
    words = [word for word in _words(whole) if word not in first.thought]
    if not words:
        raise NotJudged(f"no word of {MIN_LETTERS} letters or more comes once in the answer")
    num_ended, missed = 0, ""
    for word in words:
        start = whole.find(word)
        ends = [_chat(session, word).text]
        if _ends(ends[0], whole, word):
            num_ended += 1
            continue
        ends += [_chat(session, word).text for _ in range(NUM_TRIES - 1)]
        if not all(item.startswith(whole[:start].rstrip()) for item in ends):
            raise NotJudged("the same chat gets other texts")
        if not any(_ends(item, whole, word) for item in ends):
            missed = missed or f"{word!r} is followed by {shorten(repr(ends[0][start:][:40]), 60)}"
    seen = f"{num_ended} of {len(words)} chats end at a word of their text"
    return Outcome(seen=seen, findings=[_missed(f"{seen}; {missed}")] if missed else [])


def _ends(text: str, whole: str, word: str) -> bool:
    """Whether a text ends at the word, with or without it."""
    start = whole.find(word)
    return text.rstrip() in (whole[:start].rstrip(), whole[: start + len(word)])


def _chat(session: QuestionSession, stop: str | None) -> ServedToolCall:
    messages = ({"role": "user", "content": TEXT},)
    try:
        found = session.server.call_tool(messages, None, max_new_tokens=ANSWER_LEN, stop=stop)
    except RequestError as error:
        raise NotJudged(f"the server takes no chat: {shorten(error.message, 100)}") from error
    session.charge(found.num_tokens or ANSWER_LEN)
    return found


def _words(text: str) -> list[str]:
    """Words spread over the text after its first quarter."""
    quarter = len(text) // 4
    found = re.findall(rf"[A-Za-z]{{{MIN_LETTERS},}}", text[quarter:])
    once = [word for word in dict.fromkeys(found) if text.count(word) == 1][:-1]
    return once[:: max(1, len(once) // NUM_WORDS)][:NUM_WORDS]


def _missed(seen: str) -> ServedFinding:
    return ServedFinding(
        id="stop-string-missed",
        severity="error",
        seen=seen,
        follows="the server looks for the string in a part of the committed tokens only. Whether the draft is the "
        "reason is not known",
        next="ask the same without the draft, and report it to the engine; ids of stop tokens may work meanwhile",
    )
