"""Ask long prompts again: is the prefix cache used, and are tokens and acceptance the same with it?

The first answer computes the prompt, the others may read it from the cache. A cache that is wrong at times shows it in
several readings only. They cost little: where the server computes a prompt again, the prompt is asked twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.probing.asking.long_prompts import ANSWER_LEN, make_long_prompts
from dflash_cli.probing.asking.question import QUESTIONS, CountedAnswer, Outcome, QuestionSession, pooled_length
from dflash_cli.probing.asking.wrong_repeats import CACHED, ask_more, cache_finding, ends_at_once, not_repeatable
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import FAULT_NATS, TokenText, compare_texts
from dflash_runtime.phrases import plural

NUM_PROMPTS = 3
LOWER, MIN_MORE_STEPS = 0.7, 10
"""A warm answer is slower if its length is below this share of the cold one, over this many steps more."""
LITTLE = 0.25
"""Less than this share of each prompt in the cache is a fault. Whole blocks are more of a long prompt."""
FOUND = "; a prompt that goes on from a prompt and its answer is found"
CANNOT_GO_BACK = (
    "the cache keeps the state after an answer and cannot go back, as for a recurrent or hybrid model or a sliding "
    "window without checkpoints"
)
KEEP_STATES = (
    "raise --ctx-checkpoints, or give --swa-full for a sliding window (llama.cpp; with -lv 4 its log names "
    "each full re-processing of a prompt); then "
)
NUM_RETRIES = 3
"""The probe asks an uncached prompt again this often, because one of several servers may have answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A long prompt asked two or three times.

    warm   a repeat. If a repeat has other tokens than the first answer, it is the one that is further off
    again  the other repeat; None if the server computes prompts again and gives the same tokens
    """

    prompt_ids: tuple[int, ...]
    cold: CountedAnswer
    warm: CountedAnswer
    again: CountedAnswer | None
    gap_nats: float | None
    is_near_tie: bool

    @property
    def is_same(self) -> bool:
        return self.cold.served.token_ids == self.warm.served.token_ids

    @property
    def ends_at_once(self) -> bool:
        return ends_at_once(self.warm, self.cold.num_tokens)

    @property
    def stays(self) -> bool:
        """Whether both repeats have the same tokens. Answers that end at once may do so by chance."""
        is_same = self.again is not None and self.again.served.token_ids == self.warm.served.token_ids
        return is_same and not self.ends_at_once

    @property
    def is_unlike(self) -> bool:
        """Whether rounding does not explain other tokens."""
        return not self.is_near_tie and (self.gap_nats is not None or self.ends_at_once)


@QUESTIONS.register("repeated-prompt")
def ask(session: QuestionSession) -> Outcome:
    """Findings about the prefix cache."""
    found, num_found = [], 0
    for prompt_ids in (item.token_ids for item in make_long_prompts(session, slice(NUM_PROMPTS))):
        found.append(_repeat(session, prompt_ids))
    if _is_little(found):
        retries = [session.ask(found[0].prompt_ids, ANSWER_LEN, CACHED) for _ in range(NUM_RETRIES)]
        num_found = sum((item.num_cached or 0) >= LITTLE * len(found[0].prompt_ids) for item in retries)
    findings = [
        *([] if num_found else _cache_use(session, found)),
        *_tokens(session, found),
        *_acceptance(found),
    ]
    return Outcome(seen=_figures(found), findings=findings)


def _repeat(session: QuestionSession, prompt_ids: tuple[int, ...]) -> Repeat:
    cold, warm = (session.ask(prompt_ids, ANSWER_LEN, CACHED) for _ in range(2))
    if warm.num_cached == 0 and warm.served.token_ids == cold.served.token_ids:
        return _compared(session, prompt_ids, cold, warm, None)
    again = session.ask(prompt_ids, ANSWER_LEN, CACHED)
    pairs = {pair[0].served.token_ids: pair for pair in ((again, warm), (warm, again))}
    found = [_compared(session, prompt_ids, cold, *pair) for pair in pairs.values()]
    return max(found, key=lambda item: (item.is_unlike, not item.is_same))


def _compared(
    session: QuestionSession,
    prompt_ids: tuple[int, ...],
    cold: CountedAnswer,
    warm: CountedAnswer,
    again: CountedAnswer | None,
) -> Repeat:
    texts = [_text(prompt_ids, item) for item in (cold, warm)]
    asked = {"next_logprobs": session.likeliest, "near_tie_nats": session.near_tie_nats}
    equality = compare_texts({("", 0): texts[0]}, {("", 0): texts[1]}, names=("cold", "warm"), **asked)  # type: ignore[arg-type]
    difference = equality.differences[0] if equality.differences else None
    return Repeat(
        prompt_ids=prompt_ids,
        cold=cold,
        warm=warm,
        again=again,
        gap_nats=None if difference is None else difference.gap_nats,
        is_near_tie=difference is not None and difference.is_near_tie,
    )


def _text(prompt_ids: tuple[int, ...], item: CountedAnswer) -> TokenText:
    is_cut = item.served.finish_reason == "length"
    return TokenText(name="", prompt_ids=prompt_ids, token_ids=item.served.token_ids, is_cut=is_cut)


def _figures(found: Sequence[Repeat]) -> str:
    size = len(found[0].prompt_ids) if found else 0
    cached = _cached(found)
    parts = [
        f"{plural(len(found), 'prompt')} of {size} tokens asked again",
        "cached tokens unknown" if cached is None else f"{cached} of {size * len(found)} tokens cached",
        f"{sum(item.is_same for item in found)} of {len(found)} the same",
    ]
    lengths = [pooled_length([getattr(item, name) for item in found])[0] for name in ("cold", "warm")]
    if None not in lengths:
        parts.append(f"{lengths[0]:.2f} then {lengths[1]:.2f} tokens per step")
    return ", ".join(parts)


def _cached(found: Sequence[Repeat]) -> int | None:
    """Cached tokens of the second answers; None if one of them is unknown."""
    known = [item.warm.num_cached for item in found]
    return None if None in known else sum(item or 0 for item in known)


def _is_little(found: Sequence[Repeat]) -> bool:
    """Whether the cache is known to hold little or nothing of each prompt."""
    return _cached(found) is not None and all(
        (item.warm.num_cached or 0) < LITTLE * len(item.prompt_ids) for item in found
    )


def _cache_use(session: QuestionSession, found: Sequence[Repeat]) -> Iterator[ServedFinding]:
    facts, cached = session.facts, _cached(found)
    if found and _is_little(found) and facts.cache_block and facts.has_prefix_cache is not False:
        size, most = len(found[0].prompt_ids), max(item.warm.num_cached or 0 for item in found)
        goes_on = _goes_on(session, found[-1])
        yield ServedFinding(
            id="prefix-cache-mostly-missed" if cached else "prefix-cache-unused",
            severity="warning",
            seen=f"at most {plural(most, 'cached token')} for each of {plural(len(found), 'prompt')} of {size} tokens, "
            "each asked twice in a row" + (FOUND if goes_on else ""),
            follows="each request computes its whole prompt, or most of it; "
            + (CANNOT_GO_BACK if goes_on else "the reason is not visible from outside"),
            next=f"{KEEP_STATES if goes_on else ''}compare with a start without the draft; if the cache then works, "
            "report it to the engine",
        )


def _goes_on(session: QuestionSession, item: Repeat) -> bool:
    """Whether a prompt that goes on from a prompt and its answer is found in the cache."""
    turn_ids = (*item.prompt_ids, *item.warm.served.token_ids, *session.prompts[-1])
    if session.facts.max_len is not None and len(turn_ids) + ANSWER_LEN > session.facts.max_len:
        return False
    return (session.ask(turn_ids, ANSWER_LEN, CACHED).num_cached or 0) >= LITTLE * len(item.prompt_ids)


def _tokens(session: QuestionSession, found: Sequence[Repeat]) -> Iterator[ServedFinding]:
    """Second answers with other tokens, where a near-tie does not explain it."""
    unlike = [item for item in found if item.is_unlike]
    gaps = [item.gap_nats for item in unlike if item.gap_nats is not None]
    is_small = len(unlike) < 2 or (session.facts.is_quantised and len(gaps) == len(unlike))
    if max(gaps, default=0) < FAULT_NATS and is_small:
        return
    seen = f"{len(unlike)} of {plural(len(found), 'long prompt')} got other tokens when asked again"
    seen += f", {', '.join(f'{gap:.2f}' for gap in gaps)} nats apart" if gaps else ""
    if all(item.stays and item.warm.num_cached for item in unlike):
        yield cache_finding(f"{seen}; a third answer equals the second", "")
        return
    asked = {item.prompt_ids: [answer for answer in (item.cold, item.warm, item.again) if answer] for item in found}
    tried = ask_more(session, asked, ANSWER_LEN)
    seen += f". Asked {plural(len(tried.trials), 'time')} in all: {tried.seen}" if tried.wrong else ""
    if tried.reason == "cached":
        yield cache_finding(seen, tried.ends)
    else:
        yield not_repeatable(seen + tried.ends, tried.reason)


def _acceptance(found: Sequence[Repeat]) -> Iterator[ServedFinding]:
    """Second answers with the same tokens and many more steps."""
    alike = [item for item in found if item.is_same]
    cold, num_cold = pooled_length([item.cold for item in alike])
    warm, num_warm = pooled_length([item.warm for item in alike])
    if cold is None or warm is None or warm >= LOWER * cold or num_warm - num_cold < MIN_MORE_STEPS:
        return
    if any((item.warm.num_steps or 0) < (item.cold.num_steps or 0) for item in alike):
        return
    is_cached = all(item.warm.num_cached for item in alike)
    yield ServedFinding(
        id="prefix-cache-lowers-acceptance" if is_cached else "repeat-lowers-acceptance",
        severity="error" if is_cached else "warning",
        seen=f"{cold:.2f} tokens per step the first time, {warm:.2f} the second time, for the same tokens",
        follows="a cached prompt comes without the draft's context" if is_cached else "the cause is not known",
        next="start the server without its prefix cache and compare; report it to the engine",
    )
