"""Ask for sampled answers: are they drafted, and are they sampled at all? Most users sample.

An engine may draft greedy requests alone, or verify every request greedily. A target that is sure of its text gives the
greedy answer at a moderate temperature as well. A high temperature over the whole vocabulary then decides. If answers
differ, `sampled_choices` says whether more than their first tokens are sampled.

Rounding may move a sampled token near the bound between two of them. Only the first tokens of answers that are asked
one at a time count for seeds, therefore, and most prompts must have another answer each time. Greedy answers must stay
the same.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from dflash_cli.probing.asking.kind_findings import find_undrafted
from dflash_cli.probing.asking.question import (
    QUESTIONS,
    CountedAnswer,
    NotJudged,
    Outcome,
    QuestionSession,
    pooled_length,
)
from dflash_cli.probing.asking.sampled_choices import WHOLE, find_greedy_choices, is_surely_greedy
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.inference_server import MEASURED, Variant
from dflash_runtime.phrases import plural

NUM_ANSWERS, ANSWER_LEN, TEMPERATURE = 3, 64, 0.7
FLAT, FLAT_TEMPERATURE, NUM_FLAT, MIN_FLAT_TOKENS = Variant(decoding="flat"), 2.0, 8, 64
"""Tokens at a high temperature that a sampling server gives as the greedy ones with hardly any probability."""
NUM_PROMPTS, MIN_PROMPTS, NUM_FIRST = 3, 2, 16
"""MIN_PROMPTS of NUM_PROMPTS must change within the first NUM_FIRST tokens."""


@QUESTIONS.register("sampled-answers")
def ask(session: QuestionSession) -> Outcome:
    """A finding if sampled answers are not drafted."""
    if session.asking.asked.temperature > 0:
        raise NotJudged("the measured answers are sampled already")
    found = [session.ask(item, ANSWER_LEN, MEASURED, TEMPERATURE) for item in session.prompts[:NUM_ANSWERS]]
    length, num_steps = pooled_length(found)
    ignored = list(_ignored(session, found)) or list(find_greedy_choices(session)) or list(find_ignored_seeds(session))
    if any(item.num_steps is None for item in found) and not ignored:
        raise NotJudged("the steps of an answer are not known")
    shown = "no verify step" if length is None else f"{length:.2f} tokens per step ({num_steps} steps)"
    return Outcome(
        seen=f"{shown} in {plural(len(found), 'answer')} at temperature {TEMPERATURE}",
        findings=[*ignored, *find_undrafted(session, found, "sampled-answers", "sampled answers")],
    )


def _ignored(session: QuestionSession, found: Sequence[CountedAnswer]) -> Iterator[ServedFinding]:
    """A finding if all sampled answers are the greedy ones, at a high temperature as well."""
    if not _are_greedy(session, found):
        return
    prompts = enumerate(session.prompts[:NUM_FLAT])
    flat = [session.ask(item, ANSWER_LEN, FLAT, seed=place + 1) for place, item in prompts]
    if sum(item.num_tokens for item in flat) < MIN_FLAT_TOKENS or not _are_greedy(session, flat):
        return
    if is_surely_greedy(session, flat, FLAT_TEMPERATURE):
        yield ServedFinding(
            id="temperature-ignored",
            severity="error",
            seen=f"{plural(len(found) + len(flat), 'answer')} at temperatures {TEMPERATURE} and 2 have the tokens of "
            "greedy answers",
            follows="the server decodes greedily whatever the temperature: a proxy drops it, or the engine verifies "
            "drafts greedily. Engines do so on devices that lack a kernel for sampling",
            next="ask twice at temperature 1 without the proxy, then without the draft; look for greedy verification "
            "in the server's log",
        )


def _are_greedy(session: QuestionSession, found: Sequence[CountedAnswer]) -> bool:
    """Whether the answers to the first prompts begin as the measured greedy ones."""
    greedy = {answer.output.prompt_token_ids: answer.output.token_ids for answer in session.first.answers}
    pairs = [(item.served.token_ids, greedy[ids]) for ids, item in zip(session.prompts, found, strict=False)]
    return all(own and own[: len(other)] == other[: len(own)] for own, other in pairs)


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
