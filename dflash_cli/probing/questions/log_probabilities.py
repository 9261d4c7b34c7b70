"""Ask for answers with log-probabilities: does the server tell the target's own for drafted tokens?

The first token of an answer comes from the prompt, without a draft. A server that tells wrong log-probabilities of it,
too, tells other ones by a setting, such as after the temperature.
"""

from itertools import takewhile

from dflash_cli.probing.inference_server import MEASURED, Asked, Variant
from dflash_cli.probing.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.served_finding import ServedFinding

NUM_ANSWERS, ANSWER_LEN, MIN_TOKENS = 2, 64, 32
OFF_NATS, SHARE = 0.2, 0.15
"""Log-probabilities are wrong if SHARE of those after the first are off by OFF_NATS. Rounding moves a few by less."""

Pairs = list[tuple[float, float]]
"""The log-probability that the server tells, and the target's own, of each token of an answer."""


@QUESTIONS.register("log-probabilities")
def ask(session: QuestionSession) -> Outcome:
    """A finding if log-probabilities of drafted tokens are wrong."""
    if not (session.server.can_score or session.server.can_answer_plainly):
        raise NotJudged("the server gives no log-probabilities without drafts")
    answers = [_pairs(session, prompt_ids) for prompt_ids in session.prompts[:NUM_ANSWERS]]
    later = [pair for pairs in answers for pair in pairs[1:]]
    if len(later) < MIN_TOKENS:
        raise NotJudged("too few tokens with log-probabilities")
    gaps = [abs(told - own) for told, own in later]
    num_off = sum(gap > OFF_NATS for gap in gaps)
    seen = f"{num_off} of {len(gaps)} log-probabilities after the first token are off by more than {OFF_NATS} nats"
    seen += f", at most {max(gaps):.2f}"
    is_first_right = all(abs(told - own) <= OFF_NATS for pairs in answers for told, own in pairs[:1])
    is_wrong = is_first_right and num_off >= SHARE * len(gaps) and not session.facts.is_quantised
    finding = ServedFinding(
        id="logprobs-wrong",
        severity="error",
        seen=f"{seen}; log-probabilities of the first tokens are right",
        follows="the server tells wrong log-probabilities of drafted tokens; its answers may be right",
        next="do not use them for scores or filters; ask the same without the draft, and report it to the engine",
    )
    return Outcome(seen=seen, findings=[finding] if is_wrong else [])


def _pairs(session: QuestionSession, prompt_ids: tuple[int, ...]) -> Pairs:
    """Log-probabilities of an answer with drafts, beside the target's own scores or the same answer without drafts."""
    told = _told(session, prompt_ids, MEASURED)
    token_ids = [token for token, _ in told]
    if session.server.can_score:
        session.charge(len(prompt_ids) + len(told))
        scores = session.server.score(prompt_ids, token_ids)
        if any(token not in own for token, own in zip(token_ids, scores, strict=False)):
            raise NotJudged("the scores lack a token of the answer")
        return [(value, own[token]) for (token, value), own in zip(told, scores, strict=False)]
    plain = _told(session, prompt_ids, Variant(is_plain=True))
    alike = takewhile(lambda pair: pair[0][0] == pair[1][0], zip(told, plain, strict=False))
    return [(with_draft[1], without[1]) for with_draft, without in alike]


def _told(session: QuestionSession, prompt_ids: tuple[int, ...], variant: Variant) -> list[tuple[int, float]]:
    found = session.server.told_logprobs(prompt_ids, Asked(max_new_tokens=ANSWER_LEN), variant)
    session.charge(len(prompt_ids) + len(found), session.server.num_requests_of(len(found), variant))
    return found
