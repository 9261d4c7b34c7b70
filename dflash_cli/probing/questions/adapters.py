"""Ask the model's adapters for the measured prompts: is much less accepted than with the model itself?

A draft is trained for the model alone. An adapter changes the target, and the draft does not follow.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

from dflash_cli.probing.question import QUESTIONS, CountedAnswer, NotJudged, Outcome, QuestionSession, pooled_length
from dflash_cli.probing.served_finding import ServedFinding
from dflash_runtime.phrases import plural

MAX_ADAPTERS, FIRST, MORE = 2, slice(0, 4), slice(4, 12)
SOUND, HALF, MIN_STEPS = 2.0, 0.5, 40
"""Adapters lower acceptance if the model has SOUND tokens per step, and the next draft token of an adapter is accepted
less than HALF as often, for FIRST and for MORE prompts."""


@QUESTIONS.register("adapters")
def ask(session: QuestionSession) -> Outcome:
    """Findings about adapters that accept little, and about adapters that were not asked."""
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
    found = _ask(session, name, FIRST)
    length, num_steps = pooled_length(found)
    if length is None or num_steps < MIN_STEPS or not _is_low(length, usual):
        return length
    more, num_steps = pooled_length(_ask(session, name, MORE))
    return more if num_steps >= MIN_STEPS else None


def _is_low(length: float, usual: float) -> bool:
    return _rate(length) < HALF * _rate(usual)


def _rate(length: float) -> float:
    """How often the next draft token is accepted, if that is as likely at each position."""
    return (length - 1) / length


def _ask(session: QuestionSession, name: str, places: slice) -> Sequence[CountedAnswer]:
    server = copy.copy(session.server)
    server.model = name
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
