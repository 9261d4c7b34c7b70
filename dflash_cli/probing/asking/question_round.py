"""Ask all questions, one after another, and name kinds of requests that get no answer while plain requests do."""

import time
from dataclasses import replace

from dflash_cli.probing.asking.question import (
    CONTROL_LEN,
    LAST,
    QUESTIONS,
    NotJudged,
    Outcome,
    QuestionReport,
    QuestionSession,
)
from dflash_cli.probing.counters.process_identity import identify
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.http_client import WAITED_TOO_LONG, ServerUnreachable, TimeIsUp, told_status
from dflash_runtime.errors import DFlashError
from dflash_runtime.phrases import shorten

PACKAGE = "dflash_cli.probing.questions"
MAX_REASON_CHARS = 160
NO_ANSWER, TOO_MANY = ("no-answer", "connection-refused"), "answered 429"
KINDS = {"json-schema": ("structured-output-fails", "JSON by a schema"), "tool-call": ("tool-call-fails", "tool calls")}
"""Question -> the id of its finding, and the kind of its requests."""
LONG = 4
"""A prompt is long if it has this many times the tokens of each measured one."""


def ask_questions(session: QuestionSession) -> list[QuestionReport]:
    """The reports of all questions, in order of their names, with `LAST` at the end."""
    QUESTIONS.discover(PACKAGE)
    return [_ask(name, session) for name in sorted(QUESTIONS, key=lambda name: (name == LAST, name))]


def _ask(name: str, session: QuestionSession) -> QuestionReport:
    session.num_requests = session.num_tokens = session.last_len = 0
    started, why, found = time.perf_counter(), "", None
    try:
        found = _outcome(name, session)
    except NotJudged as error:
        why = str(error)
    except DFlashError as error:
        why = _reason(error)
    return QuestionReport(
        name=name,
        is_judged=found is not None,
        seen=why if found is None else found.seen,
        num_requests=session.num_requests,
        num_tokens=session.num_tokens,
        seconds=round(time.perf_counter() - started, 3),
        equality=None if found is None else found.equality,
        findings=() if found is None else tuple(found.findings),
    )


def _reason(error: DFlashError) -> str:
    return shorten(error.message.removeprefix(f"{error.path}: "), MAX_REASON_CHARS)


def _outcome(name: str, session: QuestionSession) -> Outcome:
    """The outcome of a question. Where its requests get no answer and a plain one does, it is asked once more."""
    num_readings = len(session.server.readings)
    try:
        try:
            return QUESTIONS[name](session)
        except ServerUnreachable as error:
            if session.is_gone or not _is_no_answer(error) or not _answers(session):
                raise
        return QUESTIONS[name](session)
    except ServerUnreachable as error:
        if session.is_gone or not _is_no_answer(error):
            raise
        num_tokens = session.last_len
        session.is_gone = not _answers(session)
        has_restarted = identify(session.server.readings[num_readings:]) != "one"
        if has_restarted:
            # Counters that fall again and again would look like several servers.
            del session.server.readings[num_readings:]
        found = _failed(name, session, _reason(error), has_restarted)
        return found if session.is_gone or has_restarted else _as_timeout(session, found, num_tokens)


def _as_timeout(session: QuestionSession, found: Outcome, num_tokens: int) -> Outcome:
    """The outcome, with a proxy's limit of time as the likely reason if only a long prompt meets such a limit."""
    (finding,) = found.findings
    status = told_status(finding.seen, WAITED_TOO_LONG)
    if status is None or num_tokens < LONG * max(map(len, session.prompts)):
        return found
    likely = replace(
        finding,
        seen=f"{finding.seen}; the prompt has {num_tokens} tokens",
        follows=f"status {status} is a limit of time, and short prompts are answered: a proxy or gateway likely gives "
        "up before the server has read a long prompt",
        next="ask the same at the server's own address; if it answers there, raise the proxy's limit "
        "(proxy_read_timeout of nginx) above the time of such an answer",
    )
    return replace(found, findings=[likely])


def _is_no_answer(error: ServerUnreachable) -> bool:
    return not isinstance(error, TimeIsUp) and error.id in NO_ANSWER and TOO_MANY not in error.message


def _answers(session: QuestionSession) -> bool:
    """Whether a plain request gets an answer.

    Raises:
        TimeIsUp: no time is left.
    """
    try:
        session.ask(session.prompts[0], CONTROL_LEN)
        session.server.metrics()
    except TimeIsUp:
        raise
    except DFlashError:
        return False
    return True


def _failed(name: str, session: QuestionSession, reason: str, has_restarted: bool) -> Outcome:
    id, what = KINDS.get(name, ("requests-fail", f"requests of the question {name}"))
    control = "a plain request after them got none either" if session.is_gone else "plain requests after them got one"
    seen = f"{what} got no answer ({reason}), {control}"
    follows = "the server fails on such requests. Whether the draft is the reason is not known"
    if session.is_gone:
        follows = "the server has ended; whether such a request is the reason is not known"
    elif has_restarted:
        seen += "; the server's counters fell meanwhile"
        follows = "such a request ends the server or an engine of it, which starts anew"
    finding = ServedFinding(
        id=id,
        severity="error",
        seen=seen,
        follows=follows,
        next="look in the server's log for the error; start the server without the draft and ask the same",
    )
    return Outcome(seen=f"no answer: {reason}", findings=[finding])
