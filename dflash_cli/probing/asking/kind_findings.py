"""Find kinds of requests that are not drafted, whose drafts are rejected, or that are slow."""

from collections.abc import Iterator, Sequence

from dflash_cli.probing.asking.question import CONTROL_LEN, CountedAnswer, QuestionSession, pooled_length
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_runtime.phrases import plural

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
