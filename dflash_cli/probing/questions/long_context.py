"""Ask long prompts that end with measured ones: is much less accepted than after the short prompts, or is it a loop?

A target that computes wrong numbers on long contexts says a few tokens again and again, and drafts agree with it.
Texts differ, so acceptance does too. A few prompts that show a fall are therefore followed by more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.asking.long_prompts import ANSWER_LEN, make_long_prompts
from dflash_cli.probing.asking.question import (
    QUESTIONS,
    CountedAnswer,
    NotJudged,
    Outcome,
    QuestionSession,
    pooled_length,
)
from dflash_cli.probing.findings.answer_faults import find_cut_prompts
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ReadLength
from dflash_runtime.phrases import plural

FIRST, MORE = slice(0, 3), slice(3, 11)
SOUND, HALF, EACH, MOST, MIN_STEPS = 2.0, 0.5, 0.7, 0.75, 20
"""Acceptance falls with context if the length is SOUND after short prompts, and HALF of the draft tokens or fewer are
accepted after long ones. For MOST prompts the share must be below EACH."""

NARROW = 0.7
"""Fewer drafted tokens per step than this share of the usual number are the reason of a fall."""

MAX_LOOP, MIN_TOKENS, SAME, FEW = 4, 32, 0.9, 0.25
"""An answer of MIN_TOKENS is a loop if SAME of its tokens are those MAX_LOOP or fewer places before them. Long prompts
are the reason if FEW answers after short ones are loops."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The answer after a long prompt, and the measured answer after the short prompt that ends it."""

    long: CountedAnswer
    short: Answer
    prompt_len: int

    @property
    def loops(self) -> tuple[bool, bool]:
        """Whether the long prompt's answer is a loop, and whether the short one's is."""
        return is_loop(self.long.served.token_ids), is_loop(self.short.output.token_ids)

    @property
    def short_steps(self) -> Sequence[int]:
        return self.short.output.acceptance_lengths


@QUESTIONS.register("long-context")
def ask(session: QuestionSession) -> Outcome:
    """A finding if answers after long prompts are loops, or if acceptance collapses there."""
    asked = _pairs(session, FIRST)
    lengths = [ReadLength(item.prompt_len, item.long.served.num_prompt or item.prompt_len) for item in asked]
    cut = list(find_cut_prompts([*session.first.read_lengths, *lengths]))
    if cut:
        return Outcome(seen=cut[0].seen, findings=cut)
    if asked and all(item.loops[0] for item in asked):
        more = _pairs(session, MORE)
        num_loops, num_short = (sum(item.loops[side] for item in [*asked, *more]) for side in (0, 1))
        if num_loops - len(asked) >= MOST * len(more) and num_short <= FEW * len([*asked, *more]):
            return _looping(session, (num_loops, num_short), len([*asked, *more]))
    pairs = _judged(asked)
    falls = len(pairs) > 1 and _falls(pairs)
    if falls:
        more = _judged(_pairs(session, MORE))
        falls = _falls(more)
        pairs += more
    before, after, num_steps = _lengths(pairs)
    size = f"{plural(len(pairs), 'long prompt')} that end with the same ({num_steps} steps)"
    seen = f"{before:.2f} tokens per step after short prompts, {after:.2f} after {size}"
    return Outcome(seen=seen, findings=[_fall(session, pairs, seen)] if falls else [])


def _fall(session: QuestionSession, pairs: Sequence[Pair], seen: str) -> ServedFinding:
    """The finding, with fewer drafted tokens per step as the cause if the server reports them."""
    usual = session.first.total.counts.draft_tokens_per_step
    drafted = [(item.long.served.num_drafted, item.long.num_steps) for item in pairs]
    width = sum(count or 0 for count, _ in drafted) / max(1, sum(steps or 0 for _, steps in drafted))
    if usual is not None and all(count is not None for count, _ in drafted) and width < NARROW * usual:
        return ServedFinding(
            id="acceptance-falls-with-context",
            severity="warning",
            seen=f"{seen}; {width:.1f} drafted tokens per step after long prompts, {usual:.1f} in the first run",
            follows="the server drafts fewer tokens after long prompts: the draft's context length or another limit",
            next="raise the context length of the draft, or look for a limit of draft tokens by context",
        )
    return ServedFinding(
        id="acceptance-falls-with-context",
        severity="warning",
        seen=seen,
        follows="the draft does not read long contexts; the cause is not known: rope, window, or training",
        next="dflash eval-acceptance DRAFT --target TARGET --context-lengths 512,2048",
    )


def _pairs(session: QuestionSession, places: slice) -> list[Pair]:
    short = {answer.output.prompt_token_ids: answer for answer in session.first.answers}
    prompts = make_long_prompts(session, places)
    return [Pair(session.ask(item.token_ids, ANSWER_LEN), short[item.last], len(item.token_ids)) for item in prompts]


def _judged(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with known steps of the short answer."""
    found = [item for item in pairs if item.short_steps]
    if not found or any(item.long.num_steps is None or item.long.num_accepted is None for item in found):
        raise NotJudged("the steps of an answer are not known")
    return found


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text is a few tokens again and again."""
    return len(token_ids) >= MIN_TOKENS and any(
        sum(map(eq, token_ids, token_ids[size:])) >= SAME * (len(token_ids) - size) for size in range(1, MAX_LOOP + 1)
    )


def _looping(session: QuestionSession, loops: tuple[int, int], num_asked: int) -> Outcome:
    seen = f"{loops[0]} of {plural(num_asked, 'answer')} after long prompts are {MAX_LOOP} tokens or fewer in turn, "
    seen += f"{loops[1]} after the short prompts that end them"
    hint = f"; keys and values are stored as {session.facts.kv_dtype}" if session.facts.is_quantised else ""
    finding = ServedFinding(
        id="long-prompts-loop",
        severity="warning",
        seen=seen + hint,
        follows="the target computes other numbers on long contexts, and the acceptance of such answers says nothing. "
        "The cause is not known: keys and values in few bits without scales, rope, or an overflow",
        next="compare with unquantised keys and values, then with a start without the draft",
    )
    return Outcome(seen=seen, findings=[finding])


def _lengths(pairs: Sequence[Pair]) -> tuple[float, float, int]:
    """Tokens per step after short and after long prompts, and the number of steps after long ones."""
    long_len, num_steps = pooled_length([item.long for item in pairs])
    lengths = [length for item in pairs for length in item.short_steps]
    return sum(lengths) / len(lengths), 1.0 if long_len is None else long_len, num_steps


def _falls(pairs: Sequence[Pair]) -> bool:
    before, after, num_steps = _lengths(pairs)
    each = [_lengths([pair])[:2] for pair in pairs]
    num_lower = sum(own - 1 < EACH * (usual - 1) for usual, own in each)
    is_lower = after - 1 < HALF * (before - 1) and num_lower >= MOST * len(each)
    return num_steps >= MIN_STEPS and before >= SOUND and is_lower
