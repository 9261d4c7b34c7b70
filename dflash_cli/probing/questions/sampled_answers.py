"""Ask for sampled answers: are they drafted, and are they sampled at all? Most users sample.

An engine may draft greedy requests alone, or verify every request greedily. A target that is sure of its text gives the
greedy answer at a moderate temperature as well. A high temperature over the whole vocabulary then decides. If answers
differ, `sampled_choices` says whether more than their first tokens are sampled, and `seeded_answers` whether by seed.
"""

from collections.abc import Iterator, Sequence

from dflash_cli.probing.asking.kind_findings import find_undrafted
from dflash_cli.probing.asking.question import (
    QUESTIONS,
    CountedAnswer,
    NotJudged,
    Outcome,
    QuestionSession,
    pooled_length,
)
from dflash_cli.probing.asking.sampled_choices import find_greedy_choices, is_surely_greedy
from dflash_cli.probing.asking.seeded_answers import find_ignored_seeds
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.inference_server import MEASURED, Variant
from dflash_runtime.phrases import plural

NUM_ANSWERS, ANSWER_LEN, TEMPERATURE = 3, 64, 0.7
FLAT, FLAT_TEMPERATURE, NUM_FLAT, MIN_FLAT_TOKENS = Variant(decoding="flat"), 2.0, 8, 64
"""Tokens at a high temperature that a sampling server gives as the greedy ones with hardly any probability."""


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
