"""Ask the first prompts again, one at a time and after all other questions: does acceptance change with time?

Every comparison of a later condition with the first run is also a comparison of a later time. The same greedy answer
of a sound server has the same steps at any time. If it has not, load, context and sampling are not the reason. Prompts
that are new to the server then tell the time from the repeat.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.asking.changing_answers import explain_changes
from dflash_cli.probing.asking.fresh_prompts import HIGHER, find_repeats
from dflash_cli.probing.asking.question import LAST, QUESTIONS, CountedAnswer, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.asking.wrong_repeats import find_cache_fault, not_repeatable
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import TokenText, Turn, compare_texts
from dflash_runtime.phrases import plural

FIRST, MORE = slice(0, 6), slice(6, 14)
LOWER, MOST, MIN_STEPS, WHOLE = 0.93, 0.75, 20, 0.02
"""Acceptance falls if steps accept less than LOWER of the draft tokens that they accepted before, and fewer for MOST
prompts. A server with another mean than a WHOLE number of draft tokens per step chooses their number by itself."""


@dataclass(frozen=True, slots=True)
class Again:
    """Accepted draft tokens and steps of one prompt's answer, in the first run and now."""

    accepted: tuple[int, int]
    steps: tuple[int, int]

    @property
    def share(self) -> float:
        """Accepted draft tokens per step now, as a share of the first run's."""
        before, now = (number / max(1, steps) for number, steps in zip(self.accepted, self.steps, strict=True))
        return now / before if before else math.inf if now else 1.0


@QUESTIONS.register(LAST)
def ask(session: QuestionSession) -> Outcome:
    """Findings about the time."""
    if session.asking.asked.temperature > 0:
        raise NotJudged("answers are sampled; only a greedy answer has the same steps again")
    answers = session.first.answers
    pairs = [(item, _again(session, item)) for item in answers[FIRST]]
    findings = [*_changed(session, pairs), *_ended(session, pairs)]
    if not _alike(session, pairs):
        return Outcome(seen="no answer has the same tokens and known steps again", findings=findings)
    before, now, falls = _figures(session, pairs)
    falls = falls and not _chooses_widths(session)
    repeats: list[ServedFinding] = []
    if falls or _rises(session, pairs):
        repeats = list(find_repeats(session))
    if falls and not repeats:
        pairs += [(item, _again(session, item)) for item in answers[MORE]]
        before, now, falls = _figures(session, pairs)
    seen = f"{before:.2f} tokens per step in the first run, {now:.2f} at the end, alone, for the same "
    seen += plural(len(_alike(session, pairs)), "answer")
    findings += repeats
    if falls and not repeats:
        findings.append(
            ServedFinding(
                id="acceptance-falls-with-time",
                severity="error",
                seen=seen,
                follows="acceptance falls with the time or the requests since the start, whatever the load; the cause "
                "is not known, such as blocks of the draft's cache that are never freed",
                next="restart the server and repeat: if acceptance is back, report it to the engine",
            )
        )
    return Outcome(seen=seen, findings=findings)


def _again(session: QuestionSession, answer: Answer) -> CountedAnswer:
    """With another seed, on which a greedy answer does not depend."""
    asked = session.asking.asked
    return session.ask(answer.output.prompt_token_ids, asked.max_new_tokens, seed=asked.seed + 1)


def _chooses_widths(session: QuestionSession) -> bool:
    """Whether the server chooses draft lengths by itself, and so may come to choose others."""
    widths = session.first.widths
    return session.server.drafts_every_step and widths is not None and abs(widths.mean - round(widths.mean)) > WHOLE


def _alike(session: QuestionSession, pairs: Sequence[tuple[Answer, CountedAnswer]]) -> list[Again]:
    """The pairs with the same tokens and known steps, or known sums where an answer has no more."""
    found = []
    for answer, now in pairs:
        output, lengths = answer.output, answer.output.acceptance_lengths
        before: tuple[int, int] | None = (sum(lengths) - len(lengths), len(lengths)) if lengths else None
        again = (now.num_accepted, now.num_steps)
        if before is None:
            before = session.first.sums.get(output.prompt_token_ids)
            again = (now.served.num_accepted, now.served.num_steps)
        if output.token_ids == now.served.token_ids and before and again[0] is not None and again[1]:
            found.append(Again((before[0], again[0]), (before[1], again[1])))
    return found


def _figures(session: QuestionSession, pairs: Sequence[tuple[Answer, CountedAnswer]]) -> tuple[float, float, bool]:
    """Tokens per step of the first run and now, and whether they fall."""
    alike = _alike(session, pairs)
    accepted = [sum(item.accepted[side] for item in alike) for side in (0, 1)]
    steps = [sum(item.steps[side] for item in alike) for side in (0, 1)]
    before, now = accepted[0] / steps[0], accepted[1] / steps[1]
    num_lower = sum(item.share < 1 for item in alike)
    falls = now < LOWER * before and num_lower >= MOST * len(alike) and steps[1] >= MIN_STEPS and len(alike) > 1
    return 1 + before, 1 + now, falls


def _rises(session: QuestionSession, pairs: Sequence[tuple[Answer, CountedAnswer]]) -> bool:
    """Whether most answers accept surely more than in the first run."""
    alike = _alike(session, pairs)
    before, now, _ = _figures(session, pairs)
    num_higher = sum(item.share > HIGHER for item in alike)
    return now - 1 > HIGHER * (before - 1) and num_higher >= MOST * len(alike) and len(alike) > 1


def _changed(session: QuestionSession, pairs: Sequence[tuple[Answer, CountedAnswer]]) -> Iterator[ServedFinding]:
    """Other tokens than in the first run, under the same condition."""
    if session.first.concurrency != 1:
        return
    first: dict[Turn, TokenText] = {}
    again: dict[Turn, TokenText] = {}
    for place, (answer, now) in enumerate(pairs):
        ids = (answer.output.prompt_token_ids, answer.output.token_ids, now.served.token_ids)
        is_cut = (answer.output.finish_reason == "length", now.served.finish_reason == "length")
        for texts, token_ids, cut in zip((first, again), ids[1:], is_cut, strict=True):
            texts["", place] = TokenText(name=str(place), prompt_ids=ids[0], token_ids=token_ids, is_cut=cut)
    equality = compare_texts(
        first,
        again,
        names=(session.first.name, "the end"),
        next_logprobs=session.likeliest,
        near_tie_nats=session.near_tie_nats,
    )
    is_fault = equality.shows_fault(is_quantised=session.facts.is_quantised)
    is_blind = bool(equality.differences) and all(item.gap_nats is None for item in equality.differences)
    if not is_fault and not (is_blind and len(equality.differences) >= len(pairs) / 2):
        return
    prompts = [first["", int(item.name)].prompt_ids for item in equality.differences]
    reasons, tried = find_cache_fault(session, prompts, session.asking.asked.max_new_tokens)
    reasons = reasons or explain_changes(session, prompts)
    yield from reasons
    if is_fault and not reasons:
        most = max(item.gap_nats or 0 for item in equality.unexplained)
        size = plural(len(pairs), "greedy answer")
        yield not_repeatable(
            f"{equality.num_unexplained} of {size} change from the first run to the end, both one at a time, by up to "
            f"{most:.2f} nats{f'; {tried}' if tried else ''}"
        )


def _ended(session: QuestionSession, pairs: Sequence[tuple[Answer, CountedAnswer]]) -> Iterator[ServedFinding]:
    """No step where the first run had some."""
    if session.first.is_engaged and pairs and all(now.num_steps == 0 and now.num_tokens > 1 for _, now in pairs):
        yield ServedFinding(
            id="partly-drafted",
            severity="warning",
            seen=f"drafts in the first run, none at the end in {plural(len(pairs), 'answer')} to the same prompts",
            follows="the server has stopped drafting; load and kind of request are not the reason",
            next="look in the server's log for a failure of the draft, and restart it",
        )
