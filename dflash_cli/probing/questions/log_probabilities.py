"""Ask for answers with log-probabilities: does the server tell them of each token, and the target's own?

The first token of an answer comes from the prompt, without a draft. A server that tells wrong log-probabilities of it,
too, may tell other ones by a setting, such as after the temperature. The setting applies to answers of one token as
well. If those differ from drafted answers that say 0, the 0 is wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.probing.asking.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_cli.probing.servers.inference_server import MEASURED, Asked, Variant

NUM_ANSWERS, ANSWER_LEN, MIN_TOKENS = 2, 64, 32
OFF_NATS, SHARE = 0.2, 0.15
"""Log-probabilities are wrong if SHARE of those after the first are off by OFF_NATS. Rounding moves a few by less."""
NUM_CHECKED, MIN_CHECKED, UNSURE_NATS = 24, 3, 0.1
"""Of NUM_CHECKED tokens told as certain, MIN_CHECKED must have less than -UNSURE_NATS as answers of one token."""
PER_STEP = 0.15
"""Entries are one per verify step if the tokens per entry and per step differ by at most this share."""


@dataclass(frozen=True, slots=True)
class ToldAnswer:
    """An answer with its log-probabilities. `pairs`: position -> the told log-probability and the target's own."""

    told: ToldLogprobs
    pairs: dict[int, tuple[float, float]]


@QUESTIONS.register("log-probabilities")
def ask(session: QuestionSession) -> Outcome:
    """Findings if log-probabilities of drafted tokens are missing or wrong."""
    if not (session.server.can_score or session.server.can_answer_plainly):
        raise NotJudged("the server gives no log-probabilities without drafts")
    answers = [_ask(session, prompt_ids) for prompt_ids in session.prompts[:NUM_ANSWERS]]
    seen, missing = _missing(session, answers)
    off = [abs(told - own) for answer in answers for place, (told, own) in answer.pairs.items() if place]
    num_tokens = sum(len(answer.told.token_ids) for answer in answers)
    if len(off) >= MIN_TOKENS:
        seen = f"{seen}; {_off_text(off)}" if missing else _off_text(off)
    elif num_tokens < MIN_TOKENS or not (missing or any(item.told.num_of_others for item in answers)):
        raise NotJudged("too few tokens with log-probabilities")
    return Outcome(seen=seen, findings=[*missing, *_of_others(answers), *_wrong(session, answers, off)])


def _ask(session: QuestionSession, prompt_ids: tuple[int, ...]) -> ToldAnswer:
    """An answer with drafts, beside the target's own scores or the same answer without drafts."""
    told = _told(session, prompt_ids, MEASURED)
    if session.server.can_score:
        session.charge(len(prompt_ids) + len(told.token_ids))
        scores = session.server.score(prompt_ids, told.token_ids)
        if any(token not in own for token, own in zip(told.token_ids, scores, strict=False)):
            raise NotJudged("the scores lack a token of the answer")
        own = {place: item[token] for place, (token, item) in enumerate(zip(told.token_ids, scores, strict=False))}
    else:
        plain = _told(session, prompt_ids, Variant(is_plain=True))
        num_alike = _num_alike(told.token_ids, plain.token_ids)
        own = {place: value for place, value in plain.by_place.items() if place < num_alike}
    return ToldAnswer(told, {place: (value, own[place]) for place, value in told.by_place.items() if place in own})


def _told(session: QuestionSession, prompt_ids: tuple[int, ...], variant: Variant) -> ToldLogprobs:
    found = session.server.told_logprobs(prompt_ids, Asked(max_new_tokens=ANSWER_LEN), variant)
    num_requests = session.server.num_requests_of(len(found.token_ids), variant)
    session.charge(len(prompt_ids) + len(found.token_ids), num_requests)
    return found


def _num_alike(first: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both answers begin with."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(first), len(other)))


def _missing(session: QuestionSession, answers: Sequence[ToldAnswer]) -> tuple[str, list[ServedFinding]]:
    """The number of entries, in words, and a finding if tokens lack entries."""
    num_tokens = sum(len(item.told.token_ids) for item in answers)
    num_entries = sum(len(item.told.entries) for item in answers)
    seen = f"{num_entries} log-probabilities for the {num_tokens} tokens of {len(answers)} answers"
    if num_tokens < MIN_TOKENS or sum(item.told.num_missing for item in answers) < SHARE * num_tokens:
        return seen, []
    if not num_entries and not session.likeliest(session.prompts[0]):
        raise NotJudged("the server gives no log-probabilities")
    length, told = session.first.total.counts.acceptance_len, num_tokens / max(1, num_entries)
    is_per_step = length is not None and abs(told - length) <= PER_STEP * length
    why = "it tells one per verify step, and leaves out the accepted draft tokens" if is_per_step else (
        "tokens without an entry are left out"
    )  # fmt: skip
    finding = ServedFinding(
        id="logprobs-missing",
        severity="error",
        seen=seen + (f"; {length:.2f} tokens per step" if is_per_step else ""),
        follows=f"{why}. A client that pairs tokens and log-probabilities by their order takes them for other tokens",
        next="ask the same without the draft, and report it to the engine; do not use them for scores or filters",
    )
    return seen, [finding]


def _of_others(answers: Sequence[ToldAnswer]) -> Iterator[ServedFinding]:
    """A finding if entries name other tokens than the answer has at the same position."""
    num_entries = sum(len(item.told.entries) for item in answers)
    num_others = sum(item.told.num_of_others for item in answers)
    if num_entries >= MIN_TOKENS and num_others >= SHARE * num_entries:
        yield _finding(
            f"{num_others} of {num_entries} log-probabilities name another token than the answer has at this position"
        )


def _wrong(session: QuestionSession, answers: Sequence[ToldAnswer], off: Sequence[float]) -> Iterator[ServedFinding]:
    """A finding if values are off after the first token, and right for the first one."""
    firsts = [item.pairs[0] for item in answers if 0 in item.pairs]
    is_first_right = bool(firsts) and all(abs(told - own) <= OFF_NATS for told, own in firsts)
    is_wrong = len(off) >= MIN_TOKENS and _num_off(off) >= SHARE * len(off)
    if is_first_right and is_wrong and not session.facts.is_quantised:
        yield _finding(f"{_off_text(off)}; log-probabilities of the first tokens are right")
    else:
        yield from _certain(session, answers)


def _certain(session: QuestionSession, answers: Sequence[ToldAnswer]) -> Iterator[ServedFinding]:
    """A finding if tokens are told as certain, and answers of one token say otherwise.

    Tokens that scores or plain answers call uncertain are asked first. Plain answers may tell certainty, too.
    """
    num_told = sum(len(item.told.by_place) for item in answers)
    certain = [
        (item.pairs.get(place, (told, 0.0))[1], (*prompt_ids, *item.told.token_ids[:place]), item.told.token_ids[place])
        for prompt_ids, item in zip(session.prompts, answers, strict=False)
        for place, told in item.told.by_place.items()
        if told == 0
    ]
    if len(certain) < max(MIN_TOKENS, SHARE * num_told):
        return
    asked = [item for item in certain if item[0] < -UNSURE_NATS]
    asked = asked if len(asked) >= NUM_CHECKED else certain
    checked = asked[:: len(asked) // NUM_CHECKED][:NUM_CHECKED]
    num_unsure = sum(session.likeliest(text_ids).get(token, 0.0) < -UNSURE_NATS for _, text_ids, token in checked)
    if num_unsure >= MIN_CHECKED:
        yield _finding(
            f"{len(certain)} of {num_told} log-probabilities are 0, which is certainty; {num_unsure} of {len(checked)} "
            f"of these tokens have less than {-UNSURE_NATS} nats as answers of one token"
        )


def _num_off(off: Sequence[float]) -> int:
    return sum(gap > OFF_NATS for gap in off)


def _off_text(off: Sequence[float]) -> str:
    text = f"{_num_off(off)} of {len(off)} log-probabilities after the first token are off by more than {OFF_NATS} nats"
    return f"{text}, at most {max(off):.2f}"


def _finding(seen: str) -> ServedFinding:
    return ServedFinding(
        id="logprobs-wrong",
        severity="error",
        seen=seen,
        follows="the server tells wrong log-probabilities of drafted tokens; its answers may be right",
        next="do not use them for scores or filters; ask the same without the draft, and report it to the engine",
    )
