"""Ask with and without drafts in turn: is decoding with drafts slower? Only where a request can switch drafts off.

A server's own times of decoding leave out the prompt and the network. Without them the clock decides. Noise is alike
on both sides, so medians over pairs with a margin are compared. Before a slow draft is named, 12 pairs more must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dflash_cli.probing.asking.question import QUESTIONS, CountedAnswer, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.phrases import plural

FIRST, MORE = slice(0, 4), slice(4, 16)
SLOWER, EACH, MOST = 1.25, 1.1, 0.75
"""Drafts are slower by SLOWER in the median of pairs. In MOST pairs it must be EACH."""
ANSWER_LEN, MIN_TOKENS, MIN_SECONDS = 64, 16, 0.02
"""The clock counts for answers of MIN_SECONDS and more; shorter ones are noise."""


@dataclass(frozen=True, slots=True)
class Paired:
    """An answer with drafts and one without, to the same prompt."""

    drafted: CountedAnswer
    plain: CountedAnswer

    @property
    def ratios(self) -> list[float]:
        """Time per token with drafts over that without, by the server and by the clock, where each is known."""
        sides = (self.drafted, self.plain)
        own = [item.served.decode_ms for item in sides]
        found = [_ratio(own, sides)] if all(own) else []
        seconds = [item.seconds for item in sides]
        return [*found, _ratio(seconds, sides)] if max(seconds) >= MIN_SECONDS else found


@QUESTIONS.register("without-drafts")
def ask(session: QuestionSession) -> Outcome:
    """A finding if answers with drafts are slower."""
    if not session.server.can_switch_off:
        raise NotJudged("a request cannot switch drafts off")
    if session.first.includes_others:
        raise NotJudged("other clients ask meanwhile, so times say little")
    pairs = _pairs(session, FIRST)
    ratios = _ratios(pairs)
    seen = f"{ratios[0]:.2f} times the time per token with drafts, in the median of {plural(len(pairs), 'pair')}"
    is_slower = _is_slower(pairs)
    if is_slower:
        more = _pairs(session, MORE)
        pairs, is_slower = [*pairs, *more], _is_slower(more)
        seen = f"{' and '.join(f'{item:.2f}' for item in _ratios(pairs))} times the time per token with drafts, in the "
        seen += f"median of {plural(len(pairs), 'pair')}, by the server's times or the clock"
    finding = ServedFinding(
        id="drafts-slower-than-none",
        severity="warning",
        seen=seen,
        follows="a verify step costs more than its accepted tokens save: a slow draft, or more drafted tokens than pay",
        next="draft fewer tokens per step, place the draft on the accelerator, or start without it",
    )
    return Outcome(seen=seen, findings=[finding] if is_slower else [])


def _pairs(session: QuestionSession, places: slice) -> list[Paired]:
    """Which side comes first alternates, so that a drift of the speed is on both sides."""
    found = []
    for place, prompt_ids in enumerate(session.prompts[places]):
        order = (False, True) if place % 2 else (True, False)
        both = {is_plain: session.ask(prompt_ids, ANSWER_LEN, Variant(is_plain=is_plain)) for is_plain in order}
        if both[True].served.num_drafted:
            raise NotJudged("the server drafts although the request switches drafts off")
        if both[False].served.num_drafted and min(item.num_tokens for item in both.values()) >= MIN_TOKENS:
            found.append(Paired(both[False], both[True]))
    if len(found) < len(session.prompts[FIRST]) / 2 or not found or not all(item.ratios for item in found):
        raise NotJudged("too few answers have drafts, enough tokens and known times")
    return found


def _ratio(times: Sequence[float | None], sides: Sequence[CountedAnswer]) -> float:
    drafted, plain = (max(time or 0, 1e-9) / side.num_tokens for time, side in zip(times, sides, strict=True))
    return drafted / plain


def _ratios(pairs: Sequence[Paired]) -> list[float]:
    """The median of each way to measure that all pairs have."""
    return [median(way) for way in zip(*(item.ratios for item in pairs), strict=False)]


def _is_slower(pairs: Sequence[Paired]) -> bool:
    """Whether every way to measure says so."""
    ways = list(zip(*(item.ratios for item in pairs), strict=False))
    return len(pairs) > 1 and all(
        median(way) >= SLOWER and sum(item >= EACH for item in way) >= MOST * len(way) for way in ways
    )
