"""Ask a chat in one piece and as a stream: does the stream have the whole text?

A verify step commits several tokens at once, and the last one comes with the end of the answer. A server that sends one
token per step, or nothing with the end, loses text of a stream. A character may need several tokens, and a server that
sends each token's bytes at once writes U+FFFD in its place.
"""

from collections.abc import Iterable, Iterator

from dflash_cli.probing.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.served_finding import ServedFinding
from dflash_cli.probing.tool_calls import ServedToolCall
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import plural, shorten

ANSWER_LEN, MIN_CHARS, NUM_TRIES = 64, 16, 2
RIVERS = "Write two sentences about rivers."
LETTERS = "Copy this line: “Café naïve — Čeština, 日本語, 한국어, 🌊🚀🧪, मानक, 👨‍👩‍👧”"
BROKEN = "\ufffd"
"""The replacement character, which stands for bytes that are no character."""


@QUESTIONS.register("streamed-text")
def ask(session: QuestionSession) -> Outcome:
    """Findings if a stream lacks text, has some of it twice, or breaks characters. It must do so each time."""
    characters, told = _ask_characters(session)
    if characters:
        return Outcome(seen=told, findings=characters)
    found = _ask_text(session)
    return Outcome(seen=f"{found.seen}; {told}", findings=found.findings)


def _ask_characters(session: QuestionSession) -> tuple[list[ServedFinding], str]:
    """A finding if a stream has replacement characters and the same answer in one piece has none."""
    seen = ""
    for _ in range(NUM_TRIES):
        whole, streamed = (_chat(session, LETTERS, is_streamed=item) for item in (False, True))
        # The limit may cut the last character of either answer.
        texts = [_letters(item).rstrip(BROKEN) for item in (whole, streamed)]
        counts = [text.count(BROKEN) for text in texts]
        num_wide = sum(not letter.isascii() for letter in texts[0])
        seen = f"{counts[1]} replacement characters streamed, {counts[0]} in one piece"
        seen += f", which has {plural(num_wide, 'other character')} beyond ASCII"
        if counts[0] or not counts[1]:
            return [], seen
    finding = ServedFinding(
        id="streamed-characters-broken",
        severity="error",
        seen=f"{seen}, as in {shorten(repr(texts[1][-40:]), 60)}",
        follows="the stream sends the bytes of a token before its character is complete. Whether the draft is the "
        "reason is not known",
        next="ask without streaming, and repeat without the draft; report it to the engine",
    )
    return [finding], seen


def _ask_text(session: QuestionSession) -> Outcome:
    seen, broken = "", []
    for _ in range(NUM_TRIES):
        whole, streamed = (_chat(session, RIVERS, is_streamed=item) for item in (False, True))
        texts = [_letters(item) for item in (whole, streamed)]
        if min(map(len, texts)) < MIN_CHARS:
            raise NotJudged(f"an answer has less than {MIN_CHARS} letters")
        seen = f"{len(texts[0])} letters in one piece, {len(texts[1])} streamed"
        if texts[0] == texts[1]:
            return Outcome(seen=f"{seen}, the same text")
        if whole.finish_reason != streamed.finish_reason or not any(_has(*pair) for pair in (texts, texts[::-1])):
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
    return "".join((answer.thought + answer.text).split())


def _has(whole: str, part: str) -> bool:
    """Whether a text is left if some letters of `whole` are taken out."""
    letters: Iterable[str] = iter(whole)
    return all(letter in letters for letter in part)


def _broken(whole: ServedToolCall, streamed: ServedToolCall) -> Iterator[ServedFinding]:
    ends = [shorten(repr((item.thought + item.text)[-40:]), 60) for item in (whole, streamed)]
    yield ServedFinding(
        id="text-stream-broken",
        severity="error",
        seen=f"a text in one piece ends with {ends[0]}, the streamed one with {ends[1]}, and letters differ in number",
        follows="the stream loses or repeats text; servers that expect one token per step do so with drafts. "
        "Whether the draft is the reason is not known",
        next="ask without streaming, and repeat without the draft; report it to the engine",
    )
