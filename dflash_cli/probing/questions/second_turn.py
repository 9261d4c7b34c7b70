"""Ask a second turn: is a prompt that goes on from an earlier prompt and its answer answered as by the target alone?

The prefix cache holds the answer of the first turn, with states and keys that verify steps have left. Asking one prompt
twice does not read them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.probing.asking.long_prompts import ANSWER_LEN, make_long_prompts
from dflash_cli.probing.asking.question import (
    QUESTIONS,
    CountedAnswer,
    NotJudged,
    Outcome,
    QuestionSession,
    pooled_length,
)
from dflash_cli.probing.asking.wrong_repeats import ask_more, cache_finding, ends_text, not_repeatable
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import TokenEquality, TokenText, compare_texts
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.errors import DFlashError, RequestError
from dflash_runtime.phrases import plural

FIRST, MORE = slice(0, 2), slice(2, 6)
CACHED = Variant(uses_cache=True)
PART, NUM_RETRIES = 0.3, 3
"""A cache is used if it holds this share of the first prompt. Large blocks hold less than all of it."""
SOUND, LOWER, EACH, MOST, MIN_STEPS = 2.0, 0.4, 0.7, 0.75, 20
"""Second turns are slower if their twins have SOUND tokens per step, and second turns accept less than LOWER of the
draft tokens. For MOST conversations the share must be below EACH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTurns:
    """A long prompt, its answer, and the answer to a prompt that goes on from both."""

    prompt_ids: tuple[int, ...]
    first: CountedAnswer
    turn_ids: tuple[int, ...]
    second: CountedAnswer


@QUESTIONS.register("second-turn")
def ask(session: QuestionSession) -> Outcome:
    """Findings about second turns."""
    if not (session.server.can_score or session.server.can_answer_plainly):
        raise NotJudged("the server neither scores tokens nor computes a prompt without its cache")
    found = _converse(session, FIRST)
    findings = list(_not_cached(session, found))
    try:
        equality = _compare(session, [(item.turn_ids, item.second) for item in found])
    except RequestError:
        if not findings:
            raise
        return Outcome(seen=findings[0].seen, findings=findings)
    findings += _changed(session, found, equality)
    is_slower = _is_slower([(item.first, item.second) for item in found])
    lengths = [pooled_length([getattr(item, side) for item in found])[0] for side in ("first", "second")]
    seen = f"{equality.num_same} of {plural(equality.num_compared, 'second turn')} as by the target alone"
    if None not in lengths:
        seen += f", {lengths[0]:.2f} then {lengths[1]:.2f} tokens per step"
    if is_slower:
        findings += _slower(session, _converse(session, MORE))
    return Outcome(seen=seen, findings=findings)


def _converse(session: QuestionSession, places: slice) -> list[TwoTurns]:
    found = []
    for item in make_long_prompts(session, places):
        first = session.ask(item.token_ids, ANSWER_LEN, CACHED)
        turn_ids = (*item.token_ids, *first.served.token_ids, *item.last)
        if session.facts.max_len is not None and len(turn_ids) + 2 * ANSWER_LEN > session.facts.max_len:
            raise NotJudged(f"a prompt and its answer have at most {session.facts.max_len} tokens")
        second = session.ask(turn_ids, ANSWER_LEN, CACHED)
        found.append(TwoTurns(prompt_ids=item.token_ids, first=first, turn_ids=turn_ids, second=second))
    return found


def _not_cached(session: QuestionSession, found: Sequence[TwoTurns]) -> Iterator[ServedFinding]:
    """Second turns that find little of their first turn in the cache, where the first prompt alone is found.

    Another rank of the server may have answered, so other second turns are asked. By then more ranks hold the first.
    """
    if not found or any(_finds(item, item.second) is not False for item in found):
        return
    again = [session.ask(item.prompt_ids, ANSWER_LEN, CACHED) for item in found]
    if not all(_finds(item, answer) for item, answer in zip(found, again, strict=True)):
        return
    asked, begun = found[0], (*found[0].prompt_ids, *found[0].first.served.token_ids)
    ends = [ids for ids in session.prompts if ids != asked.turn_ids[len(begun) :]][-NUM_RETRIES:]
    if not any(_finds(asked, session.ask((*begun, *ids), ANSWER_LEN, CACHED)) for ids in ends):
        size = len(found[0].prompt_ids)
        yield ServedFinding(
            id="second-turn-not-cached",
            severity="warning",
            seen=f"{sum(item.second.num_cached or 0 for item in found)} cached tokens in "
            f"{plural(len(found), 'second turn')} that go on from prompts of {size} tokens; the prompts alone have "
            f"{sum(item.num_cached or 0 for item in again)}",
            follows="each turn of a conversation computes all turns before it: the cache keeps a prompt's end alone, "
            "as for targets with a recurrent state or a window. Whether the draft is the reason is not known",
            next="look for checkpoints of states in the server's options, and compare with a start without the draft",
        )


def _finds(item: TwoTurns, answer: CountedAnswer) -> bool | None:
    """Whether the cache held a part of the first prompt that is worth naming; None if that is not known."""
    return None if answer.num_cached is None else answer.num_cached >= PART * len(item.prompt_ids)


def _compare(session: QuestionSession, asked: Sequence[tuple[tuple[int, ...], CountedAnswer]]) -> TokenEquality:
    """Answers against the target's own scores, or against answers that read no cache."""
    texts = [_text(str(place), *pair) for place, pair in enumerate(asked)]
    if session.server.can_score:
        worst = [session.find_worst(text) for text in texts]
        return TokenEquality(
            base="second turns", other="the target alone", num_compared=len(texts), num_unlike=0,
            differences=tuple(item for item in worst if item is not None),
        )  # fmt: skip
    anew = [_text(text.name, text.prompt_ids, session.ask(text.prompt_ids, ANSWER_LEN)) for text in texts]
    return compare_texts(
        {("", place): text for place, text in enumerate(texts)},
        {("", place): text for place, text in enumerate(anew)},
        names=("second turns", "without the cache"),
        next_logprobs=session.likeliest,
        near_tie_nats=session.near_tie_nats,
    )


def _text(name: str, prompt_ids: tuple[int, ...], item: CountedAnswer) -> TokenText:
    is_cut = item.served.finish_reason == "length"
    return TokenText(name=name, prompt_ids=prompt_ids, token_ids=item.served.token_ids, is_cut=is_cut)


def _changed(session: QuestionSession, found: Sequence[TwoTurns], equality: TokenEquality) -> Iterator[ServedFinding]:
    """Wrong second turns. If first turns are wrong as well, the cache is not the reason."""
    is_quantised = session.facts.is_quantised
    if not equality.shows_fault(is_quantised=is_quantised):
        return
    wrong = equality.unexplained
    seen = f"{len(wrong)} of {plural(len(found), 'second turn')} differ from {equality.other} by up to "
    seen += f"{max(item.gap_nats or 0 for item in wrong):.2f} nats"
    seconds = [found[int(item.name)].second for item in wrong]
    seen += ends_text(seconds, max(item.first.num_tokens for item in found))
    try:
        before = _compare(session, [(item.prompt_ids, item.first) for item in found])
    except DFlashError:
        return
    is_general = before.shows_fault(is_quantised=is_quantised)
    reasons = [] if is_general else _of_first_turns(session, found, seen)
    yield from reasons
    if reasons:
        return
    yield ServedFinding(
        id="answers-not-greedy" if is_general else "second-turn-changes-answers",
        severity="error",
        seen=f"{seen}; first turns {'do, too' if is_general else 'do not'}",
        follows="the server accepts tokens after long prompts that its target does not choose"
        if is_general
        else "what the server keeps of an answer is wrong, and a prompt that goes on from it reads it"
        + (" from the prefix cache" if all(item.num_cached for item in seconds) else ""),
        next="start the server without its prefix cache, then without the draft, and report it to the engine",
    )


def _of_first_turns(session: QuestionSession, found: Sequence[TwoTurns], seen: str) -> list[ServedFinding]:
    """A finding if first turns that are asked again are wrong, too, so that the kept answer is not the reason."""
    tried = ask_more(session, {item.prompt_ids: (item.first,) for item in found}, ANSWER_LEN)
    seen += f". First turns asked again: {tried.seen}"
    if not tried.wrong:
        return []
    return [cache_finding(seen, tried.ends) if tried.reason == "cached" else not_repeatable(seen, tried.reason)]


def _slower(session: QuestionSession, found: Sequence[TwoTurns]) -> Iterator[ServedFinding]:
    """Second turns against twins that end with the same tokens and begin with others, so that no cache has them."""
    pairs = [(session.ask(_twin(item), ANSWER_LEN, CACHED), item.second) for item in found]
    if _is_slower(pairs):
        usual, second = (pooled_length([pair[side] for pair in pairs])[0] for side in (0, 1))
        yield ServedFinding(
            id="second-turn-lowers-acceptance",
            severity="warning",
            seen=f"{second:.2f} tokens per step in {plural(len(found), 'second turn')}, {usual:.2f} after prompts that "
            "end with the same and go on from no answer",
            follows="the draft's context of the first turn is lost; the prefix cache may hold the target's alone",
            next="start the server without its prefix cache and compare; report it to the engine",
        )


def _twin(item: TwoTurns) -> tuple[int, ...]:
    middle = len(item.prompt_ids) // 2
    return (*item.prompt_ids[middle:], *item.prompt_ids[:middle], *item.turn_ids[len(item.prompt_ids) :])


def _is_slower(pairs: Sequence[tuple[CountedAnswer, CountedAnswer]]) -> bool:
    """Whether the second answer of pairs accepts much less than the first."""
    first, _ = pooled_length([pair[0] for pair in pairs])
    second, num_steps = pooled_length([pair[1] for pair in pairs])
    if first is None or second is None or first < SOUND or num_steps < MIN_STEPS:
        return False
    each = [[pooled_length([item])[0] or 1.0 for item in pair] for pair in pairs]
    num_lower = sum(later - 1 < EACH * (before - 1) for before, later in each)
    return second - 1 < LOWER * (first - 1) and num_lower >= MOST * len(pairs)
