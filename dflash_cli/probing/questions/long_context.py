"""Ask long prompts that end with measured ones: is much less accepted than after the short prompts?

Texts differ, so acceptance does too. A few prompts that show a fall are therefore followed by more.
"""

from collections.abc import Mapping, Sequence

from dflash_cli.probing.inference_server import Variant
from dflash_cli.probing.long_prompts import ANSWER_LEN, make_long_prompts
from dflash_cli.probing.question import QUESTIONS, CountedAnswer, NotJudged, Outcome, QuestionSession, pooled_length
from dflash_cli.probing.served_finding import ServedFinding
from dflash_runtime.phrases import plural

FIRST, MORE = slice(0, 3), slice(3, 11)
SOUND, HALF, EACH, MOST, MIN_STEPS = 2.0, 0.5, 0.7, 0.75, 20
"""Acceptance falls with context if the length is SOUND after short prompts, and HALF of the draft tokens or fewer are
accepted after long ones. For MOST prompts the share must be below EACH."""

Pair = tuple[CountedAnswer, Sequence[int]]


@QUESTIONS.register("long-context")
def ask(session: QuestionSession) -> Outcome:
    """A finding if acceptance collapses after long prompts."""
    short = {
        answer.output.prompt_token_ids: answer.output.acceptance_lengths
        for answer in session.first.answers
        if answer.output.acceptance_lengths
    }
    pairs = _pairs(session, short, FIRST)
    falls = len(pairs) > 1 and _falls(pairs)
    if falls:
        more = _pairs(session, short, MORE)
        falls = _falls(more)
        pairs += more
    before, after, num_steps = _lengths(pairs)
    size = f"{plural(len(pairs), 'long prompt')} that end with the same ({num_steps} steps)"
    seen = f"{before:.2f} tokens per step after short prompts, {after:.2f} after {size}"
    finding = ServedFinding(
        id="acceptance-falls-with-context",
        severity="warning",
        seen=seen,
        follows="the draft does not read long contexts; the cause is not known: rope, window, or training",
        next="dflash eval-acceptance DRAFT --target TARGET --context-lengths 512,2048",
    )
    return Outcome(seen=seen, findings=[finding] if falls else [])


def _pairs(session: QuestionSession, short: Mapping[tuple[int, ...], Sequence[int]], places: slice) -> list[Pair]:
    """Each answer after a long prompt, with the steps of the answer after the short prompt that ends it."""
    prompts = [item for item in make_long_prompts(session, places) if item.last in short]
    found = [(session.ask(item.token_ids, ANSWER_LEN, Variant()), short[item.last]) for item in prompts]
    if not found or any(answer.num_steps is None or answer.num_accepted is None for answer, _ in found):
        raise NotJudged("the steps of an answer are not known")
    return found


def _lengths(pairs: Sequence[Pair]) -> tuple[float, float, int]:
    """Tokens per step after short and after long prompts, and the number of steps after long ones."""
    long_len, num_steps = pooled_length([answer for answer, _ in pairs])
    lengths = [length for _, steps in pairs for length in steps]
    return sum(lengths) / len(lengths), 1.0 if long_len is None else long_len, num_steps


def _falls(pairs: Sequence[Pair]) -> bool:
    before, after, num_steps = _lengths(pairs)
    each = [_lengths([pair])[:2] for pair in pairs]
    num_lower = sum(own - 1 < EACH * (usual - 1) for usual, own in each)
    is_lower = after - 1 < HALF * (before - 1) and num_lower >= MOST * len(each)
    return num_steps >= MIN_STEPS and before >= SOUND and is_lower
