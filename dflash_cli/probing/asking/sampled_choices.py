"""How often sampled tokens are the target's likeliest ones, against the target's own probabilities.

An engine may sample the first token of an answer, or the last one of each step, and accept drafts greedily. Such an
answer is not the greedy one, but nearly all its tokens are the likeliest after the text before them. A target that is
sure of its text gives such answers, too. Its own probabilities tell both apart.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflash_cli.probing.asking.question import CountedAnswer, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import plural

NUM_ANSWERS, ANSWER_LEN, NUM_FLAT = 4, 64, 8
WHOLE, FLAT = Variant(decoding="whole"), Variant(decoding="flat")
RARE_NATS = math.log(1e6)
"""-ln of the probability from which a result is rare: sampling gives it once in a million probes."""
PARTLY, WHOLLY = 0.5, 0.1
"""Shares of the expected number of other tokens from which sampling is partly or wholly ignored."""
NUM_PLACES, NUM_CHECKED, MIN_CHECKED = 12, 4, 3
"""NUM_PLACES of an answer are asked one by one. Of NUM_CHECKED places greedy requests must confirm MIN_CHECKED."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token of an answer, the likeliest token at its position, and the probability of both."""

    place: int
    token: int
    likeliest: int
    probability: float
    probability_of_likeliest: float


@dataclass(frozen=True, slots=True)
class Choices:
    """The sampled tokens of several answers, without first tokens, which come from the prompt and no draft.

    items       the choices that are known, at even distances in the answers
    num_tokens  all tokens of the answers after the first; tokens between the known ones are the likeliest
    temperature  1 or more
    """

    items: tuple[Choice, ...]
    num_tokens: int
    temperature: float = 1.0

    @property
    def num_others(self) -> int:
        """Tokens that are not the likeliest."""
        return sum(item.probability < item.probability_of_likeliest for item in self.items)

    @property
    def expected(self) -> float:
        """How many of them sampling gives on average; above temperature 1 at least.

        The square root of a sum is at most the sum of the roots, and so for each power below 1.
        """
        known = 0.0
        for item in self.items:
            first = item.probability_of_likeliest ** (1 / self.temperature)
            others = (1 - item.probability_of_likeliest) ** (1 / self.temperature)
            known += others / (first + others)
        return known * self.num_tokens / max(1, len(self.items))

    @property
    def nats(self) -> float:
        """The least -ln of the probability that sampling gives so few of them (Chernoff's bound)."""
        expected, others = self.expected, self.num_others
        if others >= expected:
            return 0.0
        return expected - others + (others * math.log(others / expected) if others else 0.0)


def find_greedy_choices(session: QuestionSession) -> Iterator[ServedFinding]:
    """A finding if answers at temperature 1 hold too many of the target's likeliest tokens, or ignore the seed."""
    prompts = session.prompts[:NUM_ANSWERS]
    answers = [session.ask(item, ANSWER_LEN, WHOLE, seed=place + 1) for place, item in enumerate(prompts)]
    each = [_scored(session, *pair) for pair in zip(prompts, answers, strict=True)]
    if not all(each):
        yield from _find_without_scores(session, prompts, answers)
        return
    found = list(_judge(session, prompts, answers, each))
    yield from found or _same_seeds(session, prompts[0], answers[0], each[0])


def is_surely_greedy(session: QuestionSession, answers: Sequence[CountedAnswer], temperature: float) -> bool:
    """Whether sampling hardly ever gives these answers, which are the greedy ones, or no probability is known."""
    prompts, some = session.prompts[:NUM_ANSWERS], answers[:NUM_ANSWERS]
    each = [_scored(session, *pair) for pair in zip(prompts, some, strict=True)]
    each = each if all(each) else [_asked(session, *pair) for pair in zip(prompts, some, strict=True)]
    items = tuple(item for found in each for item in found)
    num_tokens = sum(item.num_tokens - 1 for item in answers)
    return not items or Choices(items, num_tokens, temperature).nats >= RARE_NATS


def _find_without_scores(
    session: QuestionSession, prompts: Sequence[tuple[int, ...]], answers: Sequence[CountedAnswer]
) -> Iterator[ServedFinding]:
    """The same where each place takes a request: only if the answers go on as greedy ones do."""
    if not _go_on_greedily(session, prompts, answers):
        return
    each = [_asked(session, *pair) for pair in zip(prompts, answers, strict=True)]
    if all(each):
        yield from _judge(session, prompts, answers, each)
        return
    more = session.prompts[:NUM_FLAT]
    flat = [session.ask(item, ANSWER_LEN, FLAT, seed=place + 1) for place, item in enumerate(more)]
    if _go_on_greedily(session, more, flat):
        number = plural(len(answers) + len(flat), "answer")
        yield _finding(f"{number} at temperatures 1 and 2 go on greedily after their first token", is_whole=True)


def _judge(
    session: QuestionSession,
    prompts: Sequence[tuple[int, ...]],
    answers: Sequence[CountedAnswer],
    each: Sequence[Sequence[Choice]],
) -> Iterator[ServedFinding]:
    num_tokens = sum(item.num_tokens - 1 for item in answers)
    choices = Choices(tuple(item for items in each for item in items), num_tokens)
    others, expected = choices.num_others, choices.expected
    if choices.nats < RARE_NATS or others > PARTLY * expected:
        return
    if not _is_confirmed(session, prompts[0], answers[0], each[0]):
        return
    seen = (
        f"{others} of {num_tokens} tokens at temperature 1 are not the target's likeliest, {expected:.0f} are "
        "expected by its own probabilities; first tokens are left out"
    )
    yield _finding(seen, is_whole=others <= WHOLLY * expected)


def _finding(seen: str, *, is_whole: bool) -> ServedFinding:
    part = "only the first token of an answer is sampled" if is_whole else "a part of the tokens is not sampled, or "
    part += "" if is_whole else "another temperature than the asked one applies"
    return ServedFinding(
        id="temperature-ignored",
        severity="error",
        seen=seen,
        follows=f"{part}: drafts are verified greedily, or sampling settings are dropped where drafts are used. "
        "Engines do so without a kernel or an option for rejection sampling",
        next="ask the same without the draft; look for greedy verification in the server's log and options",
    )


def _same_seeds(
    session: QuestionSession, prompt_ids: tuple[int, ...], first: CountedAnswer, choices: Sequence[Choice]
) -> Iterator[ServedFinding]:
    """A finding if another seed gives the same sampled answer, which sampling hardly ever does."""
    nats = -sum(math.log(max(item.probability, 1e-9)) for item in choices)
    if not session.server.takes_seed or nats < RARE_NATS:
        return
    others = [session.ask(prompt_ids, ANSWER_LEN, WHOLE, seed=seed) for seed in (NUM_ANSWERS + 1, NUM_ANSWERS + 2)]
    each = [item.served.token_ids for item in (first, *others)]
    if all(one == other for one, other in pairwise(each)):
        yield ServedFinding(
            id="seeds-ignored",
            severity="error",
            seen=f"3 requests at temperature 1 with 3 seeds get one answer of {plural(len(each[0]), 'token')}; its "
            f"probability is e^-{nats:.0f}",
            follows="the server samples, but not by the request's seed: users get one answer to a prompt again and "
            "again. A fixed seed of the server or a store of answers may be the reason; which one is not known",
            next="ask twice without a seed, past any gateway, then without the draft",
        )


def _scored(session: QuestionSession, prompt_ids: tuple[int, ...], answer: CountedAnswer) -> list[Choice]:
    """The choices of an answer by the server's scores; empty if it does not score."""
    if not session.server.can_score:
        return []
    try:
        scores = session.server.score(prompt_ids, answer.served.token_ids)
    except RequestError:
        return []
    session.charge(len(prompt_ids) + answer.num_tokens + 1)
    pairs = enumerate(zip(answer.served.token_ids, scores, strict=False))
    return [_choice(place, token, likely) for place, (token, likely) in pairs if place and token in likely]


def _asked(session: QuestionSession, prompt_ids: tuple[int, ...], answer: CountedAnswer) -> list[Choice]:
    """The choices at some places of an answer, each with a request; empty if the server gives no log-probabilities."""
    ids, found = answer.served.token_ids, []
    for place in range(1, len(ids), max(1, len(ids) // NUM_PLACES)):
        likely = session.likeliest((*prompt_ids, *ids[:place]))
        if not likely:
            return []
        found.append(_choice(place, ids[place], likely))
    return found


def _choice(place: int, token: int, likely: Mapping[int, float]) -> Choice:
    first = max(likely, key=lambda item: likely[item])
    own, most = (min(1.0, math.exp(likely.get(item, -math.inf))) for item in (token, first))
    return Choice(place, token, first, own, most)


def _is_confirmed(
    session: QuestionSession, prompt_ids: tuple[int, ...], answer: CountedAnswer, choices: Sequence[Choice]
) -> bool:
    """Whether greedy requests get the likeliest tokens of the scores, so that scores and answers are of one target."""
    places = choices[len(choices) // NUM_CHECKED - 1 :: max(1, len(choices) // NUM_CHECKED)][:NUM_CHECKED]
    found = [session.ask((*prompt_ids, *answer.served.token_ids[: item.place]), 1) for item in places]
    return sum(now.served.token_ids[:1] == (item.likeliest,) for now, item in zip(found, places, strict=True)) >= (
        MIN_CHECKED
    )


def _go_on_greedily(
    session: QuestionSession, prompts: Sequence[tuple[int, ...]], answers: Sequence[CountedAnswer]
) -> bool:
    """Whether greedy answers to each prompt with the sampled first token have the other sampled tokens."""
    for prompt_ids, item in zip(prompts, answers, strict=True):
        ids = item.served.token_ids
        if len(ids) < 2 or session.ask((*prompt_ids, ids[0]), len(ids) - 1).served.token_ids != ids[1:]:
            return False
    return True
