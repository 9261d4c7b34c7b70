"""Find out why greedy answers to one prompt change: several targets behind the address, or requests that are sampled.

The prompt is asked again and again, alone. Several targets give a few texts that come back. A sampled request gives a
new text each time. If the same request then asks for the likeliest tokens without a temperature of 0, its text stays.
Otherwise the reason of new texts is not known.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from dflash_cli.probing.asking.question import QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.inference_server import MEASURED, Variant
from dflash_runtime.phrases import plural

NUM_PROMPTS, NUM_ASKED, NUM_LIKELIEST = 3, 7, 2
MOST_TEXTS = 3
"""Texts of several targets. Sampled answers have more."""
LIKELIEST = Variant(decoding="likeliest")
Tokens = tuple[int, ...]


def explain_changes(session: QuestionSession, prompts: Sequence[Tokens]) -> list[ServedFinding]:
    """A finding with the reason why greedy answers to these prompts change, if there is one."""
    asked = list(dict.fromkeys(prompts))[:NUM_PROMPTS]
    texts = [_answers(session, prompt_ids, MEASURED, NUM_ASKED) for prompt_ids in asked]
    num_texts = [len(set(each)) for each in texts]
    if any(map(_comes_back, texts)) and max(num_texts) <= MOST_TEXTS:
        return [_several_targets(len(asked), max(num_texts))]
    if min(num_texts, default=0) <= MOST_TEXTS:
        return []
    stays = [len(set(_answers(session, prompt_ids, LIKELIEST, NUM_LIKELIEST))) == 1 for prompt_ids in asked]
    return [(_sampled if all(stays) else _always_new)(len(asked), min(num_texts))]


def _answers(session: QuestionSession, prompt_ids: Tokens, variant: Variant, number: int) -> list[Tokens]:
    """Each with another seed, on which a greedy answer does not depend."""
    size = session.asking.asked.max_new_tokens
    return [session.ask(prompt_ids, size, variant, seed=seed + 1).served.token_ids for seed in range(number)]


def _comes_back(texts: Sequence[Tokens]) -> bool:
    """Whether a text comes back after another one, and two texts come more than once."""
    changes = sum(now != before for before, now in pairwise(texts))
    counts = Counter(texts)
    return changes >= len(counts) > 1 and sum(number > 1 for number in counts.values()) > 1


def _found(id: str, num_prompts: int, answers: str, follows: str, next: str) -> ServedFinding:
    """An error about greedy answers that change, with the `answers` that were seen."""
    seen = f"{plural(num_prompts, 'prompt')} asked {NUM_ASKED} times at temperature 0, alone: {answers}"
    return ServedFinding(id=id, severity="error", seen=seen, follows=follows, next=next)


def _several_targets(num_prompts: int, num_texts: int) -> ServedFinding:
    return _found(
        "replicas-answer-differently", num_prompts, f"up to {num_texts} answers, which come back in turn",
        follows="several servers or ranks answer at this address and differ in weights, data types or settings, or one "
        "server changes between states. Scores and drafts of one do not fit answers of another",
        next="start all servers with the same revision, quantisation and options; probe each at its own address",
    )  # fmt: skip


def _sampled(num_prompts: int, num_texts: int) -> ServedFinding:
    return _found(
        "temperature-zero-ignored", num_prompts,
        f"{num_texts} answers or more; with temperature 0.01 and top_k 1 always the same answer",
        follows="requests at temperature 0 are sampled: a proxy or a default drops or replaces the 0. Neither the "
        "draft nor the cache is the reason",
        next="ask the server without the proxy; look for code that drops fields of the value 0, and send top_k 1",
    )  # fmt: skip


def _always_new(num_prompts: int, num_texts: int) -> ServedFinding:
    return _found(
        "answers-change-each-time", num_prompts,
        f"{num_texts} answers or more; with temperature 0.01 and top_k 1 they change, too",
        follows="requests are sampled whatever they ask, or the server computes something else each time; which one is "
        "not known. The load is not the reason",
        next="ask the server without a proxy, then without the draft",
    )  # fmt: skip
