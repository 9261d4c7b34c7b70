"""Ask for the beginning of measured answers: are draft tokens accepted in the rest of the answers, too?

A draft that loses the tokens it has generated drafts well at first, and later no draft token is accepted. The beginning
of a greedy answer is the same text, so the difference of both counts belongs to the rest. Answers often begin with set
phrases, so a fall is named only if almost nothing is accepted in the last thirds. Before that, whole answers are asked
again, so that beginnings and whole answers are repeats alike.

A draft that sees only the prompt drafts well in one step alone. If hardly anything is accepted, the beginning is asked
again with as many tokens as one step can commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.asking.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_runtime.phrases import plural

FIRST, ALL, MIN_ANSWERS = slice(0, 4), slice(0, 12), 3
MIN_LEN, START = 48, 16
"""Answers of MIN_LEN tokens or more are split after START tokens, in doubt after two thirds. The first part is
asked again."""
SOUND, LOWER, LAST = 1.5, 0.4, 1.12
"""Acceptance falls if answers start with SOUND tokens per step, accept less than LOWER of the draft tokens in the rest,
and end with LAST tokens per step or fewer."""
MIN_LAST_STEPS = 60
"""Fewest steps in the last quarters that are judged."""
ONE_STEP = 1.15
"""Tokens per step. Only the first step is good if its tokens reach this rate, and later tokens reach at most LAST. If
the order of steps is known, the first steps must commit SOUND tokens."""


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """Accepted draft tokens and tokens of an answer's beginning and of its rest."""

    accepted: tuple[int, int]
    tokens: tuple[int, int]


@QUESTIONS.register("within-answers")
def ask(session: QuestionSession) -> Outcome:
    """A finding if acceptance collapses within answers."""
    if session.asking.asked.temperature > 0:
        raise NotJudged("answers are sampled; only a greedy answer begins with the same text again")
    long = [answer for answer in session.first.answers if len(answer.output.token_ids) >= MIN_LEN]
    found = [item for answer in long[FIRST] if (item := _split(session, answer, START)) is not None]
    if len(found) < MIN_ANSWERS:
        raise NotJudged(f"{plural(len(found), 'answer')} of {MIN_LEN} tokens and more began with the same text again")
    early, late = _length(found, 0), _length(found, 1)
    seen = f"{early:.2f} tokens per step in the first {START} tokens of {plural(len(found), 'answer')}, {late:.2f} then"
    if late <= LAST and early < SOUND:
        return _ask_one_step(session, long[ALL], seen)
    if early < SOUND or late - 1 >= LOWER * (early - 1):
        return _see_last_quarters(session, long, seen)
    thirds = [_split(session, answer, 2 * len(answer.output.token_ids) // 3, is_again=True) for answer in long[ALL]]
    ends = [item for item in thirds if item is not None]
    if len(ends) < MIN_ANSWERS:
        raise NotJudged(f"{plural(len(ends), 'answer')} began with the same text again")
    last = _length(ends, 1)
    seen += f", {last:.2f} in the last thirds of {plural(len(ends), 'answer')}"
    follows = (
        "the draft does not follow the answer: it may lack the keys and values or the positions of accepted tokens. "
    )
    return Outcome(seen=seen, findings=[_fall(seen, f"{follows}Which one is not known")] if last <= LAST else [])


def _see_last_quarters(session: QuestionSession, answers: Sequence[Answer], seen: str) -> Outcome:
    """Whether almost nothing is accepted in the last quarters of the first run, if the order of its steps is known."""
    if not session.first.is_ordered:
        return Outcome(seen=seen)
    before: list[int] = []
    last: list[int] = []
    for answer in answers:
        place, end = 0, 3 * len(answer.output.token_ids) // 4
        for length in answer.output.acceptance_lengths:
            (before if place < end else last).append(length)
            place += length
    if len(last) < MIN_LAST_STEPS or sum(last) > LAST * len(last) or sum(before) < SOUND * len(before):
        return Outcome(seen=seen)
    seen = f"{sum(before) / len(before):.2f} tokens per step in the first three quarters of answers, "
    seen += f"{sum(last) / len(last):.2f} in the last ones ({plural(len(last), 'step')})"
    follows = "the draft does not follow long answers: a limit of its context, or lost keys and values. "
    return Outcome(seen=seen, findings=[_fall(seen, f"{follows}Which one is not known")])


def _ask_one_step(session: QuestionSession, answers: Sequence[Answer], seen: str) -> Outcome:
    """Whether the first step after the prompt is good and later ones are not."""
    known = session.facts.num_draft_tokens or session.first.total.counts.num_speculative_tokens
    size = min(START, (known or START) + 1)
    splits = [_split(session, answer, size, is_again=True) for answer in answers]
    found = [item for item in splits if item is not None]
    if len(found) < MIN_ANSWERS:
        return Outcome(seen=seen)
    first, rest = _length(found, 0), _length(found, 1)
    seen = f"{first:.2f} tokens per step in the first {size} tokens of {plural(len(found), 'answer')}, {rest:.2f} then"
    ordered = _by_step(session.first)
    seen += "" if ordered is None else f"; the first step commits {ordered[0]:.2f} tokens, later steps {ordered[1]:.2f}"
    if ordered is not None:
        first, rest = ordered
    if first < (ONE_STEP if ordered is None else SOUND) or rest > LAST or rest - 1 >= LOWER * (first - 1):
        return Outcome(seen=seen)
    follows = (
        "only the first step after the prompt has usable drafts: the draft lacks the features of generated tokens, or "
    )
    return Outcome(seen=seen, findings=[_fall(seen, f"{follows}their keys and values. Which one is not known")])


def _by_step(run: ServerRun) -> tuple[float, float] | None:
    """Tokens of first steps and of later ones; None if the order of steps is not known."""
    each = [answer.output.acceptance_lengths for answer in run.answers if len(answer.output.acceptance_lengths) > 1]
    if not run.is_ordered or not each:
        return None
    later = [length for lengths in each for length in lengths[1:]]
    return sum(lengths[0] for lengths in each) / len(each), sum(later) / len(later)


def _fall(seen: str, follows: str) -> ServedFinding:
    return ServedFinding(
        id="acceptance-falls-within-answers",
        severity="warning",
        seen=seen,
        follows=follows,
        next="compare --max-new-tokens 16 with 256; report it to the engine",
    )


def _split(session: QuestionSession, answer: Answer, size: int, *, is_again: bool = False) -> SplitAnswer | None:
    """The answer's first `size` tokens and the rest; None if it begins with other tokens now.

    With `is_again` the whole answer is asked again, too, because a server may draft repeated prompts in another way.
    """
    prompt_ids, token_ids = answer.output.prompt_token_ids, answer.output.token_ids
    start = session.ask(prompt_ids, size)
    if start.served.token_ids != token_ids[:size]:
        return None
    lengths = answer.output.acceptance_lengths
    whole = _kept(sum(lengths) - len(lengths), len(lengths), len(token_ids))
    if is_again or not lengths:
        again = session.ask(prompt_ids, len(token_ids))
        whole = _kept(again.num_accepted, again.num_steps, len(token_ids))
    begun = _kept(start.num_accepted, start.num_steps, size)
    if begun is None or whole is None:
        raise NotJudged("the accepted draft tokens of an answer are not known")
    return SplitAnswer((begun, max(0, whole - begun)), (size - 1, len(token_ids) - size))


def _kept(num_accepted: int | None, num_steps: int | None, num_tokens: int) -> int | None:
    """Accepted draft tokens that are in an answer. Its last step may accept tokens past its end."""
    if num_accepted is None or num_steps is None:
        return num_accepted
    return max(0, min(num_accepted, num_tokens - 1 - num_steps))


def _length(found: Sequence[SplitAnswer], side: int) -> float:
    """Tokens per step of one side, if each step commits its accepted draft tokens and one token more."""
    accepted, tokens = sum(item.accepted[side] for item in found), sum(item.tokens[side] for item in found)
    return 1 / (1 - min(accepted / tokens, 0.99))
