"""Compare greedy answers with the target alone: its own scores of their tokens, or its answers without drafts.

A target's first choice at each token is what plain decoding takes. One request scores a whole answer, and the server
drafts nothing for it. Batches of another shape round differently, so tokens that are nearly as likely may swap.

A wrong prefix cache looks like wrong tokens of the draft, because answers or their parts may read it. The requests that
differ are therefore asked again without the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dflash_cli.probing.asking.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.asking.wrong_repeats import find_cache_fault
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import TokenDifference, TokenEquality, TokenText, compare_texts
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import plural

NUM_ANSWERS, NUM_IN_PIECES = 16, 8
"""Answers to compare, and how many if the server needs several requests for one without drafts."""
PIECE = 2
"""Tokens of each of these requests."""


@QUESTIONS.register("plain-decoding")
def ask(session: QuestionSession) -> Outcome:
    """A finding if answers hold tokens that the target alone would not have taken."""
    is_in_pieces = session.server.can_answer_plainly and not session.server.can_switch_off
    texts = session.greedy_texts(NUM_IN_PIECES if is_in_pieces else NUM_ANSWERS)
    if session.server.can_score:
        equality = _against_scores(session, texts)
    elif session.server.can_answer_plainly:
        equality = _against_plain(session, texts)
    else:
        raise NotJudged("the server neither scores tokens nor switches drafts off")
    same = equality.num_compared - len(equality.differences)
    seen = f"{same} of {plural(equality.num_compared, 'answer')} as by the target alone"
    if equality.differences:
        unjudged = len(equality.differences) - equality.num_near_ties - equality.num_unexplained
        seen += f", {plural(equality.num_near_ties, 'near-tie')}, {equality.num_unexplained} faults"
        seen += f", {unjudged} not judged" if unjudged else ""
    return Outcome(seen=seen, findings=list(_judge(session, texts, equality)), equality=equality)


def _against_scores(session: QuestionSession, texts: Sequence[TokenText]) -> TokenEquality:
    """Each answer's least likely token against the target's first choice at that position."""
    found = []
    for text in texts:
        try:
            difference = session.find_worst(text)
        except RequestError as error:
            raise NotJudged(f"the server does not score tokens: it answered {error.found}") from error
        found += [difference] if difference is not None else []
    return TokenEquality(
        base=session.first.name, other="the target alone", num_compared=len(texts), num_unlike=0,
        differences=tuple(found),
    )  # fmt: skip


def _against_plain(session: QuestionSession, texts: Sequence[TokenText]) -> TokenEquality:
    """Each answer against the answer of a request that switches drafts off."""
    drafted, plain = {}, {}
    for number, text in enumerate(texts):
        found = session.ask(text.prompt_ids, len(text.token_ids), Variant(is_plain=True))
        if found.num_steps and found.served.num_drafted:
            raise NotJudged("the server drafts although the request switches drafts off")
        is_cut = found.served.finish_reason == "length"
        drafted["", number] = text
        plain["", number] = TokenText(
            name=text.name, prompt_ids=text.prompt_ids, token_ids=found.served.token_ids, is_cut=is_cut
        )
    return compare_texts(
        drafted,
        plain,
        names=(session.first.name, "without drafts"),
        next_logprobs=session.likeliest,
        near_tie_nats=session.near_tie_nats,
    )


def _judge(session: QuestionSession, texts: Sequence[TokenText], equality: TokenEquality) -> Iterator[ServedFinding]:
    wrong = equality.unexplained
    if not wrong:
        return
    most = max(item.gap_nats or 0 for item in wrong)
    seen = f"{len(wrong)} of {plural(equality.num_compared, 'greedy answer')} differ from {equality.other} by up to "
    seen += f"{most:.2f} nats"
    if not equality.shows_fault(is_quantised=session.facts.is_quantised):
        yield ServedFinding(
            id="answers-near-the-limit",
            severity="info",
            seen=seen,
            follows="a little more than rounding explains; the cause is not known",
            next="repeat with more prompts, or raise --near-tie for a target in few bits",
        )
        return
    yield from _of_cache(session, texts, equality) or [
        ServedFinding(
            id="answers-not-greedy",
            severity="error",
            seen=seen,
            follows="the server accepts tokens that its target does not choose; rounding does not explain the gap. "
            "Whether the draft or plain decoding is at fault is not known",
            next="start the server without the draft and repeat with --result; if the gap is gone, it is the draft",
        )
    ]


def _of_cache(session: QuestionSession, texts: Sequence[TokenText], equality: TokenEquality) -> list[ServedFinding]:
    """A finding if the prefix cache explains the differences: of the answers, or of the answers without drafts."""
    pairs = [(item, _text_of(item, texts)) for item in equality.unexplained]
    if session.server.can_score:
        return find_cache_fault(session, [text.prompt_ids for _, text in pairs], session.asking.asked.max_new_tokens)[0]
    if session.server.can_switch_off:
        return []  # an answer without drafts is one request, which reads no cache
    walked = [item for item, text in pairs if _stays(session, text, item)]
    others = [item for item in equality.differences if item not in walked]
    if replace(equality, differences=tuple(others)).shows_fault(is_quantised=session.facts.is_quantised):
        return []
    most = max(item.gap_nats or 0 for item in walked)
    size = plural(equality.num_compared, "answer")
    seen = (
        f"{len(walked)} of {size} without drafts, in requests of {PIECE} tokens that each go on from the one before, "
    )
    seen += (
        f"differ from drafted ones by up to {most:.2f} nats. Without the cache the same requests get the drafted tokens"
    )
    return [
        ServedFinding(
            id="second-turn-changes-answers",
            severity="error",
            seen=seen,
            follows="what the server keeps of an answer is wrong, and a prompt that goes on from it reads it from the "
            "prompt cache. Drafted answers to new prompts are right",
            next="ask with cache_prompt false, start the server without its prompt cache, then without the draft, and "
            "report it to the engine",
        )
    ]


def _text_of(item: TokenDifference, texts: Sequence[TokenText]) -> TokenText:
    """The answer of a difference. Turns of one conversation have one name."""
    named = [text for text in texts if text.name == item.name]
    return next((text for text in named if item.tokens[0] in text.token_ids[item.position :][:1]), named[0])


def _stays(session: QuestionSession, text: TokenText, item: TokenDifference) -> bool:
    """Whether the request of the answer without drafts has the drafted answer's token, if it reads no cache."""
    start = item.position // PIECE * PIECE
    found = session.ask((*text.prompt_ids, *text.token_ids[:start]), PIECE, Variant(is_plain=True))
    return found.served.token_ids[item.position - start :][:1] == (item.tokens[0],)
