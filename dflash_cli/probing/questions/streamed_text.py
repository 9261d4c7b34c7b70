"""Ask a chat in one piece and as a stream: does the stream have the whole text?

A verify step commits several tokens at once, and the last one comes with the end of the answer. A server that sends one
token per step, or nothing with the end, loses text of a stream. A parser of reasoning that misses its end within a step
puts it into the text. A character may need several tokens. A server that sends each token's bytes at
once writes U+FFFD instead.
"""

from collections.abc import Iterator

from dflash_cli.probing.asking.chat_findings import find_protocol_faults, find_run_on
from dflash_cli.probing.asking.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import ServedToolCall, has_letters, verb_of_stream
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import shorten

ANSWER_LEN, MIN_CHARS, NUM_TRIES = 64, 16, 2
RIVERS = "Write two sentences about rivers."
LETTERS = "Copy this line: “Café naïve — Čeština, 日本語, 한국어, 🌊🚀🧪, मानक, 👨‍👩‍👧”"
MARKS = ("<think>", "</think>")
BROKEN = "\ufffd"
"""The replacement character, which stands for invalid bytes."""


@QUESTIONS.register("streamed-text")
def ask(session: QuestionSession) -> Outcome:
    """Findings if a stream lacks text, has some of it twice, or breaks characters. It must do so each time."""
    answers: list[ServedToolCall] = []
    try:
        found = _ask_text(session, answers)
    except NotJudged as error:
        found = Outcome(seen=str(error))
    run_on, protocol = find_run_on(answers), find_protocol_faults(answers[::2], answers[1::2])
    if run_on or protocol or found.findings:
        return Outcome(seen=found.seen, findings=run_on or [*protocol, *found.findings])
    characters = _ask_characters(session)
    return Outcome(seen=f"{found.seen}; {characters.seen}", findings=characters.findings)


def _ask_characters(session: QuestionSession) -> Outcome:
    """A finding if a stream breaks or lacks characters beyond ASCII that the same answer in one piece has."""
    seen, end = "", ""
    for _ in range(NUM_TRIES):
        whole, streamed = (_chat(session, LETTERS, is_streamed=item) for item in (False, True))
        # The limit may cut the last character of either answer.
        texts = [_letters(item).rstrip(BROKEN) for item in (whole, streamed)]
        counts, wide = [text.count(BROKEN) for text in texts], [_num_wide(text) for text in texts]
        seen = f"{counts[1]} replacement characters and {wide[1]} other characters beyond ASCII streamed, "
        seen += f"{counts[0]} and {wide[0]} in one piece"
        lacks = wide[1] < wide[0] and has_letters(*texts) and len(texts[0]) - len(texts[1]) == wide[0] - wide[1]
        if counts[0] or streamed.is_cut or not (counts[1] or lacks):
            return Outcome(seen=seen)
        end = shorten(repr(texts[1][-40:]), 60)
    finding = ServedFinding(
        id="streamed-characters-broken",
        severity="error",
        seen=f"{seen}, as in {end}",
        follows="the stream sends the bytes of a token before its character is complete. Whether the draft is the "
        "reason is not known",
        next="ask without streaming, and repeat without the draft; report it to the engine",
    )
    return Outcome(seen=seen, findings=[finding])


def _num_wide(text: str) -> int:
    return sum(not letter.isascii() and letter != BROKEN for letter in text)


def _ask_text(session: QuestionSession, answers: list[ServedToolCall]) -> Outcome:
    """The texts in one piece and streamed, which are added to `answers`."""
    seen, broken = "", []
    for _ in range(NUM_TRIES):
        whole, streamed = (_chat(session, RIVERS, is_streamed=item) for item in (False, True))
        answers += [whole, streamed]
        texts = [_letters(item) for item in (whole, streamed)]
        if streamed.is_cut:
            raise NotJudged("the stream ends early")
        if min(map(len, texts)) < MIN_CHARS:
            raise NotJudged(f"an answer has less than {MIN_CHARS} letters")
        seen = f"{len(texts[0])} letters in one piece, {len(texts[1])} streamed"
        if texts[0] == texts[1]:
            broken = list(_misplaced(whole, streamed))
            seen += f", the same text{', divided otherwise' if broken else ''}"
            if broken:
                continue
            return Outcome(seen=seen)
        if whole.finish_reason != streamed.finish_reason or not any(
            has_letters(*pair) for pair in (texts, texts[::-1])
        ):
            raise NotJudged("the two answers are different texts")
        broken = list(_broken(whole, streamed))
    return Outcome(seen=seen, findings=broken)


def _chat(session: QuestionSession, text: str, *, is_streamed: bool) -> ServedToolCall:
    messages = ({"role": "user", "content": text},)
    try:
        found = session.server.call_tool(messages, None, max_new_tokens=ANSWER_LEN, is_streamed=is_streamed)
    except RequestError as error:
        raise NotJudged(f"the server takes no chat: {shorten(error.message, 100)}") from error
    session.charge(found.num_tokens or ANSWER_LEN)
    return found


def _letters(answer: ServedToolCall) -> str:
    """The text without white space, which parsers strip from an answer in one piece."""
    return _plain(answer.thought + answer.text)


def _plain(text: str) -> str:
    """A text without white space and marks of reasoning."""
    for mark in MARKS:
        text = text.replace(mark, "")
    return "".join(text.split())


def _misplaced(whole: ServedToolCall, streamed: ServedToolCall) -> Iterator[ServedFinding]:
    """Reasoning that only one of the answers has in its text. Reasoning that a limit cut is not judged in one piece.

    An answer that ends by itself without a text has lost its text to the reasoning, so the other one is sound.
    """
    sizes = [len(_plain(item.text)) for item in (whole, streamed)]
    if not sizes[0] and whole.finish_reason == "stop":
        return
    is_cut = not sizes[0] or not sizes[1] or "length" in (whole.finish_reason, streamed.finish_reason)
    if sizes[1] > sizes[0] or (sizes[1] < sizes[0] and not is_cut):
        where = ["in one piece", "streamed"]
        yield ServedFinding(
            id="reasoning-misplaced",
            severity="error",
            seen=f"{sizes[0]} letters of text and {len(_plain(whole.thought))} of reasoning {where[0]}, {sizes[1]} and "
            f"{len(_plain(streamed.thought))} {where[1]}",
            follows=f"the answer {where[sizes[1] > sizes[0]]} has reasoning in its text: the parser misses where it "
            "ends, which may be in the middle of a step. Whether the draft is the reason is not known",
            next="ask in both ways without the draft; report it to the engine",
        )


def _broken(whole: ServedToolCall, streamed: ServedToolCall) -> Iterator[ServedFinding]:
    ends = [shorten(repr((item.thought + item.text)[-40:]), 60) for item in (whole, streamed)]
    yield ServedFinding(
        id="text-stream-broken",
        severity="error",
        seen=f"a text in one piece ends with {ends[0]}, the streamed one with {ends[1]}, and letters differ in number",
        follows=f"the stream {verb_of_stream(_letters(whole), _letters(streamed))} text; servers that expect one token "
        "per step do so with drafts. Whether the draft is the reason is not known",
        next="ask without streaming, and repeat without the draft; report it to the engine",
    )
