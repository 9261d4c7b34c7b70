"""Make long prompts that end with measured ones, so that both have comparable answers."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_cli.probing.asking.question import NotJudged, QuestionSession

ANSWER_LEN = 64
MIN_LEN, MAX_LEN = 1536, 12_288


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """Token ids that end with a measured prompt. Other prompts in a new order come first, so that no cache has them."""

    token_ids: tuple[int, ...]
    last: tuple[int, ...]


def make_long_prompts(session: QuestionSession, places: slice) -> list[LongPrompt]:
    """A long prompt for each measured prompt at `places`, of two blocks of the prefix cache or more.

    Raises:
        NotJudged: the server's limit is too low for them.
    """
    block = session.facts.cache_block or 1
    reserve = ANSWER_LEN + (session.facts.num_draft_tokens or 0) + 2
    limit = min(MAX_LEN, (session.facts.max_len or MAX_LEN) - reserve)
    length = min(max(MIN_LEN, 2 * block + block // 2), limit)
    if length < 2 * block + 1:
        raise NotJudged(f"a block of the prefix cache has {block} tokens, and a prompt at most {limit}")
    chosen = [last for last in session.prompts[places] if 2 * len(last) < length]
    if not chosen:
        raise NotJudged(f"every prompt has {length // 2} tokens or more")
    order = random.Random(time.time_ns())
    return [LongPrompt((*_filler(session.prompts, length - len(last), order), *last), last) for last in chosen]


def _filler(prompts: Sequence[Sequence[int]], length: int, order: random.Random) -> list[int]:
    found: list[int] = []
    while len(found) < length:
        some = order.choice(prompts)
        found += some[order.randrange(len(some)) :]
    return found[:length]
