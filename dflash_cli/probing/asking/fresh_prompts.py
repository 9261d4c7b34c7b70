"""Prompts that the server has not seen, asked twice: does acceptance change with the repeat alone?

A lookup of earlier answers, or a draft cache that is replayed, changes the acceptance of a repeated prompt. Time and
load do not explain a change between two requests in a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.probing.asking.question import CountedAnswer, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_runtime.phrases import plural

NUM_PROMPTS, MIN_PAIRS = 6, 3
HIGHER, LOWER, MOST, MIN_STEPS = 1.25, 0.7, 0.75, 20
"""Repeats are higher or lower by these factors of accepted draft tokens per step, and so are MOST of the pairs."""


@dataclass(frozen=True, slots=True)
class RepeatedAnswer:
    """Accepted draft tokens and steps of an answer and of its repeat, which has the same tokens.

    num_cached  prompt tokens that the repeat found in the prefix cache
    """

    accepted: tuple[int, int]
    steps: tuple[int, int]
    num_cached: int | None

    @property
    def change(self) -> float:
        """The repeat's accepted draft tokens per step less the first answer's."""
        first, again = (number / steps for number, steps in zip(self.accepted, self.steps, strict=True))
        return again - first


def find_repeats(session: QuestionSession) -> Iterator[ServedFinding]:
    """At most one finding: repeats of fresh prompts accept surely more or fewer draft tokens than the first answers."""
    size = session.asking.asked.max_new_tokens
    asked = ([session.ask(item, size) for _ in range(2)] for item in _fresh_prompts(session.prompts))
    found = [pair for first, again in asked if (pair := _pair(first, again)) is not None]
    is_cached = any(item.num_cached for item in found)
    steps = [sum(item.steps[side] for item in found) for side in (0, 1)]
    if len(found) < MIN_PAIRS or max(steps) < MIN_STEPS:
        return
    first, again = (sum(item.accepted[side] for item in found) / steps[side] for side in (0, 1))
    num_higher, num_lower = (sum(sign * item.change > 0 for item in found) for sign in (1, -1))
    seen = (
        f"{1 + first:.2f} tokens per step in {plural(len(found), 'answer')} to new prompts, {1 + again:.2f} when each "
    )
    seen += "is asked again at once, for the same tokens"
    if again > HIGHER * first and num_higher >= MOST * len(found):
        yield ServedFinding(
            id="repeat-raises-acceptance",
            severity="warning",
            seen=seen,
            follows="repeated prompts have inflated figures: earlier answers are looked up or replayed. Users with new "
            "prompts get the figures of first answers",
            next="measure with prompts that the server has not answered yet, or restart it; look for an option that "
            "drafts from earlier answers",
        )
    if again < LOWER * first and num_lower >= MOST * len(found):
        yield ServedFinding(
            id="repeat-lowers-acceptance",
            severity="warning",
            seen=seen,
            follows="a repeated prompt loses a part of the draft's context, whatever the time and the load. "
            + ("The repeats read the prefix cache" if is_cached else "No repeat reads a cached token"),
            next="start the server without its prefix cache and compare; report it to the engine",
        )


def _fresh_prompts(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first half of each measured prompt with the second half of another one, as far from it as can be."""
    shift = max(1, len(prompts) // 2)
    others = (*prompts[shift:], *prompts[:shift])
    made = [
        (*one[: (len(one) + 1) // 2], *other[len(other) // 2 :]) for one, other in zip(prompts, others, strict=True)
    ]
    return [item for item in dict.fromkeys(made) if item not in prompts][:NUM_PROMPTS]


def _pair(first: CountedAnswer, again: CountedAnswer) -> RepeatedAnswer | None:
    """Both answers; None if their tokens differ or their steps are not known."""
    if first.served.token_ids != again.served.token_ids or not first.num_steps or not again.num_steps:
        return None
    if first.num_accepted is None or again.num_accepted is None:
        return None
    return RepeatedAnswer(
        (first.num_accepted, again.num_accepted), (first.num_steps, again.num_steps), again.num_cached
    )
