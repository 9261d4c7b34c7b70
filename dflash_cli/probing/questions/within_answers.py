"""Ask for the beginning of measured answers: are draft tokens accepted in the rest of the answers, too?

A draft that loses the tokens it has generated drafts well at first, and later no draft token is accepted. The beginning
of a greedy answer is the same text, so the difference of both counts belongs to the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.served_finding import ServedFinding
from dflash_runtime.phrases import plural

FIRST, MORE, MIN_ANSWERS = slice(0, 4), slice(4, 12), 3
MIN_LEN, START = 48, 16
"""Of answers of MIN_LEN tokens and more the first START tokens are asked again."""
SOUND, LATE, LOWER, EACH, MOST = 1.5, 1.3, 0.4, 0.7, 0.75
"""Acceptance falls if an answer starts with SOUND tokens per step, goes on with LATE or fewer, and the rest has less
than LOWER of the accepted draft tokens. For MOST answers the share must be below EACH."""


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """Accepted draft tokens and tokens of an answer's start and of its rest."""

    accepted: tuple[int, int]
    tokens: tuple[int, int]


@QUESTIONS.register("within-answers")
def ask(session: QuestionSession) -> Outcome:
    """A finding if acceptance collapses within answers."""
    if session.asking.asked.temperature > 0:
        raise NotJudged("answers are sampled; only a greedy answer begins with the same text again")
    long = [answer for answer in session.first.answers if len(answer.output.token_ids) >= MIN_LEN]
    found = _split(session, long[FIRST])
    if len(found) < MIN_ANSWERS:
        raise NotJudged(f"{plural(len(found), 'answer')} of {MIN_LEN} tokens and more began with the same text again")
    falls = _falls(found)
    if falls:
        more = _split(session, long[MORE])
        falls = len(more) >= MIN_ANSWERS and _falls(more)
        found += more
    early, late = _lengths(found)
    seen = f"{early:.2f} tokens per step in the first {START} tokens of {plural(len(found), 'answer')}, {late:.2f} then"
    finding = ServedFinding(
        id="acceptance-falls-within-answers",
        severity="warning",
        seen=seen,
        follows="the draft does not follow the answer: it may lack the keys and values or the positions of accepted "
        "tokens. Which one is not known",
        next="compare --max-new-tokens 16 with 256; report it to the engine",
    )
    return Outcome(seen=seen, findings=[finding] if falls else [])


def _split(session: QuestionSession, answers: Sequence[Answer]) -> list[SplitAnswer]:
    """The answers that begin with the same tokens again."""
    found = []
    for answer in answers:
        prompt_ids, token_ids = answer.output.prompt_token_ids, answer.output.token_ids
        start = session.ask(prompt_ids, START)
        if start.served.token_ids != token_ids[:START]:
            continue
        whole: int | None = sum(answer.output.acceptance_lengths) - len(answer.output.acceptance_lengths)
        if not answer.output.acceptance_lengths:
            again = session.ask(prompt_ids, len(token_ids))
            whole = again.num_accepted if again.served.token_ids == token_ids else None
        if start.num_accepted is None or whole is None:
            raise NotJudged("the accepted draft tokens of an answer are not known")
        rest = max(0, whole - start.num_accepted)
        found.append(SplitAnswer((start.num_accepted, rest), (START - 1, len(token_ids) - START)))
    return found


def _lengths(found: Sequence[SplitAnswer]) -> tuple[float, float]:
    """Tokens per step at the start and in the rest, if each step drafts and commits one token that no draft has."""
    early, late = (
        sum(item.accepted[side] for item in found) / sum(item.tokens[side] for item in found) for side in (0, 1)
    )
    return 1 / (1 - min(early, 0.99)), 1 / (1 - min(late, 0.99))


def _falls(found: Sequence[SplitAnswer]) -> bool:
    early, late = _lengths(found)
    shares = [tuple(item.accepted[side] / item.tokens[side] for side in (0, 1)) for item in found]
    num_lower = sum(late < EACH * early for early, late in shares)
    return early >= SOUND and late <= LATE and late - 1 < LOWER * (early - 1) and num_lower >= MOST * len(found)
