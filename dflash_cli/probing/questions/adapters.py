"""Ask with and without adapters for the measured prompts: is much less accepted than with the model itself?

A draft is trained for the model alone. An adapter changes the target, and the draft does not follow. Where the server
applies an adapter to the measured requests, the same prompts are asked without it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from dflash_cli.probing.asking.question import (
    QUESTIONS,
    CountedAnswer,
    NotJudged,
    Outcome,
    QuestionSession,
    pooled_length,
)
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.inference_server import InferenceServer
from dflash_runtime.errors import RequestError, UnsupportedError
from dflash_runtime.phrases import plural

MAX_ADAPTERS, FIRST, MORE = 2, slice(0, 4), slice(4, 12)
SOUND, HALF, MIN_STEPS = 2.0, 0.5, 40
"""Adapters lower acceptance if the model has SOUND tokens per step, and the next draft token of an adapter is accepted
less than HALF as often, for FIRST and for MORE prompts."""


@QUESTIONS.register("adapters")
def ask(session: QuestionSession) -> Outcome:
    """Findings about adapters that accept little, and about adapters that were not asked."""
    if session.facts.active_adapter is not None:
        return _ask_active(session, session.facts.active_adapter)
    names = session.facts.adapters
    usual = session.first.total.counts.acceptance_len
    if not names:
        raise NotJudged("the server names no adapter of the model")
    if usual is None or usual < SOUND:
        raise NotJudged("the model itself accepts too little")
    lengths = {name: _length(session, name, usual) for name in names[:MAX_ADAPTERS]}
    shown = ", ".join(
        f"{'unknown' if found is None else f'{found:.2f}'} with {name}" for name, found in lengths.items()
    )
    seen = f"{usual:.2f} tokens per step with {session.facts.model}, {shown}"
    low = [name for name, length in lengths.items() if length is not None and _is_low(length, usual)]
    return Outcome(seen=seen, findings=[*_low(low, seen), *_unasked(names[MAX_ADAPTERS:])])


def _length(session: QuestionSession, name: str, usual: float) -> float | None:
    """Tokens per step of an adapter; None if unknown. A low length is measured again on more prompts."""
    return _measure(session, session.server.with_model(name), lambda length: _is_low(length, usual))


def _measure(session: QuestionSession, server: InferenceServer | None, is_odd: Callable[[float], bool]) -> float | None:
    """Tokens per step of a server; None if unknown. An odd length is measured again on more prompts."""
    if server is None:
        return None
    length, num_steps = pooled_length(_ask(session, server, FIRST))
    if length is None or num_steps < MIN_STEPS or not is_odd(length):
        return length
    more, num_steps = pooled_length(_ask(session, server, MORE))
    return more if num_steps >= MIN_STEPS else None


def _ask_active(session: QuestionSession, name: str) -> Outcome:
    """A finding if an adapter that the measured requests had lowers acceptance, by the same prompts without it."""
    usual, alone = session.first.total.counts.acceptance_len, None
    if usual is None:
        raise NotJudged("the tokens per step are not known")
    with suppress(RequestError, UnsupportedError):
        alone = _measure(session, session.server.without_adapter(), lambda length: _is_low(usual, length))
    seen = f"{usual:.2f} tokens per step with {name}, {'unknown' if alone is None else f'{alone:.2f}'} without it"
    is_likely = alone is None and usual < SOUND
    is_low = is_likely or (alone is not None and _is_low(usual, alone))
    return Outcome(seen=seen, findings=_active(seen, name, is_likely=is_likely) if is_low else [])


def _active(seen: str, name: str, *, is_likely: bool) -> list[ServedFinding]:
    follows = f"the draft does not follow {name}, which the server applies to the target: it is trained for the model "
    follows += "without the adapter"
    if is_likely:
        follows = f"{name} changes the target, and a draft trained without it does not follow. That is likely the "
        follows += "reason; a request without the adapter was not possible"
    finding = ServedFinding(
        id="active-adapter-lowers-acceptance",
        severity="warning",
        seen=seen,
        follows=follows,
        next="train a draft on answers of the adapter, or serve the adapter without a draft",
    )
    return [finding]


def _is_low(length: float, usual: float) -> bool:
    return _rate(length) < HALF * _rate(usual)


def _rate(length: float) -> float:
    """How often the next draft token is accepted, if that is as likely at each position."""
    return (length - 1) / length


def _ask(session: QuestionSession, server: InferenceServer, places: slice) -> Sequence[CountedAnswer]:
    other = replace(session, server=server)
    found = [other.ask(item, session.asking.asked.max_new_tokens) for item in session.prompts[places]]
    session.num_requests, session.num_tokens = (
        session.num_requests + other.num_requests,
        session.num_tokens + other.num_tokens,
    )
    return found


def _low(names: Sequence[str], seen: str) -> list[ServedFinding]:
    finding = ServedFinding(
        id="adapter-lowers-acceptance",
        severity="warning",
        seen=seen,
        follows=f"the draft does not follow {', '.join(names)}: it is trained for the model without the adapter",
        next="train a draft on answers of the adapter, or serve the adapter without a draft",
    )
    return [finding] if names else []


def _unasked(names: Sequence[str]) -> list[ServedFinding]:
    finding = ServedFinding(
        id="adapters-not-measured",
        severity="info",
        seen=f"{plural(len(names), 'further adapter')}: {', '.join(names[:8])}",
        follows="their acceptance is not known",
        next="probe each with --served-model NAME",
    )
    return [finding] if names else []
