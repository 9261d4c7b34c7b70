"""Find kinds of requests that are not drafted, whose drafts are rejected, that are slow, or that do not end."""

from collections.abc import Callable, Iterator, Sequence

from dflash_cli.probing.asking.question import CONTROL_LEN, CountedAnswer, QuestionSession, pooled_length
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.empty_tail import empty_tail
from dflash_runtime.phrases import plural, shorten

MIN_TOKENS, MIN_STEPS, LOW, SOUND = 24, 20, 1.1, 2.0
"""Drafts of a kind are rejected if LOW tokens per step are committed, and SOUND in measured answers."""


def find_undrafted(
    session: QuestionSession, found: Sequence[CountedAnswer], kind: str, what: str
) -> Iterator[ServedFinding]:
    """A finding if answers of a kind lack drafts or accept hardly any, while measured answers do neither."""
    usual = session.first.total.counts.acceptance_len
    if usual is None or not found or min(item.num_tokens for item in found) < MIN_TOKENS:
        return
    if all(item.num_steps == 0 for item in found):
        if not session.drafts_usually():
            return
        yield ServedFinding(
            id=f"{kind}-not-drafted",
            severity="warning",
            seen=f"no verify step in {plural(sum(item.num_tokens for item in found), 'token')} of {what}",
            follows=f"the server decodes {what} without the draft",
            next="expect the speed of plain decoding for such requests, or look for a release that drafts them",
        )
        return
    length, num_steps = pooled_length(found)
    if length is not None and num_steps >= MIN_STEPS and length <= LOW and usual >= SOUND:
        yield ServedFinding(
            id=f"{kind}-rejected",
            severity="warning",
            seen=f"{length:.2f} tokens per step for {what} ({num_steps} steps), {usual:.2f} otherwise",
            follows=f"almost no draft token is accepted for {what}; the cause is not known",
            next="compare with the same prompts asked greedily, without a schema and with neutral settings",
        )


SLOW, SLOW_SECONDS = 5, 0.5
"""An answer is slow if a token takes this many times as long as in other answers, and the answer this long."""


def find_slow(session: QuestionSession, id: str, what: str, seconds: float, num_tokens: int) -> list[ServedFinding]:
    """A finding if an answer took much longer per token than the measured answers, asked one at a time."""
    if session.first.concurrency != 1 or not session.first.total.num_tokens or seconds < SLOW_SECONDS:
        return []
    usual, own = session.first.seconds / session.first.total.num_tokens, seconds / max(1, num_tokens)
    if own > SLOW * usual and session.prompts:
        # A server that has become slow is slow for all requests.
        now = session.ask(session.prompts[0], CONTROL_LEN)
        usual = max(usual, now.seconds / max(1, now.num_tokens))
    found = ServedFinding(
        id=id,
        severity="warning",
        seen=f"{1000 * own:.0f} ms per token of {what}, {1000 * usual:.0f} ms of other answers",
        follows="such requests are slow on this server; the cause is not known",
        next="start the server without the draft and compare the times",
    )
    return [found] if own > SLOW * usual else []


def find_endless(
    kind: str, what: str, texts: Sequence[str], ends_plainly: Callable[[], bool | None]
) -> list[ServedFinding]:
    """A finding if texts that a length limit has cut end with characters that say nothing.

    texts         each answer that has begun rightly, or an empty text in place of any other answer
    ends_plainly  whether the same answer ends without drafts; None if no request can ask for it
    """
    tails = [(tail, text) for text in texts if (tail := empty_tail(text))]
    if not tails:
        return []
    tail, text = max(tails, key=lambda item: len(item[0]))
    shown = "white space" if tail.isspace() else f"{shorten(repr(tail[:24]), 40)} and so on"
    is_draft = ends_plainly()
    follows = {
        None: "Whether the draft is the reason is not known",
        True: "Without drafts the same answer ends: drafting is the reason",
        False: "Without drafts the answer does not end either: the draft is not the reason",
    }
    return [
        ServedFinding(
            id=f"{kind}-endless",
            severity="error" if is_draft else "warning",
            seen=f"{len(tails)} of {plural(len(texts), 'answer')} with {what} run up to the limit of tokens; the last "
            f"{len(tail)} of {len(text)} characters are {shown}",
            follows="the answer does not end, and more tokens do not help: the grammar allows white space or a "
            f"repetition without a limit, and the model goes on with it. {follows[is_draft]}",
            next="forbid free white space in the grammar (disable_any_whitespace of vLLM, "
            "--constrained-json-whitespace-pattern of SGLang), limit the length of strings and numbers in the schema, "
            "and ask the same without the draft",
        )
    ]
