"""Whether a prompt and a seed lead to the same sampled answer again.

Rounding may move a sampled token near the bound between two of them. Only the first tokens of answers that are asked
one at a time count, therefore, and most prompts must have another answer each time. Greedy answers must stay the same.
"""

from collections.abc import Iterator
from itertools import combinations

from dflash_cli.probing.asking.question import QuestionSession
from dflash_cli.probing.asking.sampled_choices import WHOLE
from dflash_cli.probing.findings.served_finding import ServedFinding

NUM_PROMPTS, MIN_PROMPTS, NUM_FIRST = 3, 2, 16
"""MIN_PROMPTS of NUM_PROMPTS must change within the first NUM_FIRST tokens."""


def find_ignored_seeds(session: QuestionSession) -> Iterator[ServedFinding]:
    """A finding if answers to a prompt with one seed differ from the start each time."""
    prompts = session.prompts[:NUM_PROMPTS]
    if not session.server.takes_seed or len(prompts) < MIN_PROMPTS:
        return
    answers = [[_sampled(session, place, item) for _ in range(2)] for place, item in enumerate(prompts)]
    if sum(map(_all_differ, answers)) < MIN_PROMPTS or not _is_repeatable(session, prompts):
        return
    thirds = [[*pair, _sampled(session, place, prompts[place])] for place, pair in enumerate(answers)]
    num_changed = sum(map(_all_differ, thirds))
    if num_changed < MIN_PROMPTS:
        return
    yield ServedFinding(
        id="seeds-ignored",
        severity="warning" if session.server.keeps_seed else "info",
        seen=f"{num_changed} of {len(prompts)} prompts, each asked 3 times with one seed at temperature 1, get 3 "
        f"answers that differ within {NUM_FIRST} tokens; their greedy answers stay the same",
        follows="a seed does not lead to the same answer again: a proxy drops it, or the engine draws without it where "
        "drafts are used. Users cannot repeat sampled answers",
        next="ask twice with a seed past any gateway, then without the draft",
    )


def _sampled(session: QuestionSession, place: int, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    return session.ask(prompt_ids, NUM_FIRST, WHOLE, seed=place + 1).served.token_ids


def _all_differ(answers: list[tuple[int, ...]]) -> bool:
    return all(one != other for one, other in combinations(answers, 2))


def _is_repeatable(session: QuestionSession, prompts: list[tuple[int, ...]]) -> bool:
    """Whether each prompt's greedy answer begins as it did in the first run."""
    greedy = {answer.output.prompt_token_ids: answer.output.token_ids for answer in session.first.answers}
    return all(
        session.ask(item, NUM_FIRST).served.token_ids[:NUM_FIRST] == greedy[item][:NUM_FIRST] for item in prompts
    )
