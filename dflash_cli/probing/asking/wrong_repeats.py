"""Find out which answers to repeated prompts are wrong: answers that read the prefix cache, drafted ones, or repeats.

Each prompt is asked a few times more, with the prefix cache and without it in turn. An answer is wrong if the target's
own scores say so. If the server gives none, an answer without the cache decides. A property is the reason if each wrong
answer has it, and chance gives that to wrong answers less than once in a hundred probes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Literal

from dflash_cli.probing.asking.question import CountedAnswer, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import FAULT_NATS, TokenText, compare_texts
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.errors import RequestError, UnsupportedError
from dflash_runtime.phrases import plural

NUM_PROMPTS, TURNS, MOST_TURNS = 3, 3, 9
"""Each prompt is asked with and without the cache TURNS times, and in doubt up to MOST_TURNS times."""
MOST_LUCK = 0.01
EARLY, MIN_WHOLE = 0.25, 8
"""An answer stops early with this share of the tokens of a whole one. It ends at once if it has one token or none where
another one to its prompt has MIN_WHOLE."""
UNKNOWN = "the cause is not known"
CACHED, FRESH = Variant(uses_cache=True), Variant(is_fresh=True)
Tokens = tuple[int, ...]
Reason = Literal["cached", "drafted", "repeated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An answer to one of the prompts.

    of         the prompt. `prompt_ids` may have its parts exchanged
    is_repeat  the server has answered the same token ids before
    is_fresh   the request kept from the prefix cache
    """

    prompt_ids: Tokens
    answer: CountedAnswer
    of: Tokens
    is_repeat: bool
    is_fresh: bool = False
    is_wrong: bool = False

    @property
    def text(self) -> TokenText:
        served = self.answer.served
        is_cut = served.finish_reason == "length"
        return TokenText(name="", prompt_ids=self.prompt_ids, token_ids=served.token_ids, is_cut=is_cut)

    def has(self, reason: Reason) -> bool:
        if reason == "cached":
            number = self.answer.num_cached
            return self.is_repeat and not self.is_fresh if number is None else number > 0
        return bool(self.answer.num_steps) if reason == "drafted" else self.is_repeat


@dataclass(frozen=True, slots=True)
class Tried:
    """All answers to the prompts."""

    trials: tuple[Trial, ...]

    @property
    def wrong(self) -> list[Trial]:
        return [item for item in self.trials if item.is_wrong]

    @property
    def reason(self) -> Reason | None:
        """The property that explains the wrong answers."""
        reasons: tuple[Reason, ...] = ("cached", "drafted", "repeated")
        return next((item for item in reasons if len(self.wrong) > 1 and self._luck(item) <= MOST_LUCK), None)

    @property
    def may_be_cached(self) -> bool:
        """Whether there are wrong answers, and each of them read the cache."""
        return bool(self.wrong) and all(item.has("cached") for item in self.wrong)

    def _luck(self, reason: Reason) -> float:
        """The chance that all wrong answers have a property which does not matter; 1 if one of them lacks it."""
        if not all(item.has(reason) for item in self.wrong):
            return 1.0
        num_wrong = len(self.wrong)
        return comb(sum(item.has(reason) for item in self.trials), num_wrong) / comb(len(self.trials), num_wrong)

    @property
    def seen(self) -> str:
        """How many answers with and without the prefix cache are wrong."""
        groups = [[item.is_wrong for item in self.trials if item.has("cached") is side] for side in (True, False)]
        text = f"{sum(groups[0])} of {plural(len(groups[0]), 'answer')} that read the prefix cache are wrong, "
        return text + f"{sum(groups[1])} of {len(groups[1])} others"

    @property
    def ends(self) -> str:
        """Words about wrong answers that end early."""
        whole = max((item.answer.num_tokens for item in self.trials if not item.is_wrong), default=0)
        return ends_text([item.answer for item in self.wrong], whole)


def ask_more(session: QuestionSession, asked: Mapping[Tokens, Sequence[CountedAnswer]], size: int) -> Tried:
    """The answers so far to new prompts, in order, and more with and without the prefix cache, of up to `size` tokens.

    Without an answer so far, a prompt counts as one that the server has answered before. If all wrong answers read the
    cache and chance may do the same, the prompts are asked further.
    """
    prompts = list(asked)[:NUM_PROMPTS]
    trials = [
        Trial(prompt_ids=ids, answer=item, of=ids, is_repeat=bool(place))
        for ids in prompts
        for place, item in enumerate(asked[ids])
    ]
    gaps: dict[tuple[Tokens, Tokens], float | None] = {}
    for turn in range(1, MOST_TURNS + 1):
        for ids in prompts:
            trials.append(Trial(prompt_ids=ids, answer=session.ask(ids, size, CACHED), of=ids, is_repeat=True))
            trials.append(_fresh(session, ids, size, turn))
        if turn % TURNS == 0:
            tried = Tried(tuple(item for ids in prompts for item in _judged(session, trials, ids, gaps)))
            if tried.reason == "cached" or not tried.may_be_cached:
                break
    return tried


def find_cache_fault(session: QuestionSession, prompts: Sequence[Tokens], size: int) -> tuple[list[ServedFinding], str]:
    """A finding if answers to these prompts, asked before, are wrong only where they read the cache; what was seen."""
    if session.facts.has_prefix_cache is False or session.ask(prompts[0], 1, CACHED).num_cached == 0:
        return [], ""
    tried = ask_more(session, {ids: () for ids in prompts}, size)
    seen = f"{plural(min(len(prompts), NUM_PROMPTS), 'prompt')} asked again: {tried.seen}"
    return [cache_finding(seen, tried.ends)] if tried.reason == "cached" else [], seen + tried.ends


def cache_finding(seen: str, ends: str) -> ServedFinding:
    """The finding that reading the prefix cache changes answers. `ends` are words of `ends_text`."""
    effect = "ends answers early" if ends else "changes answers"
    return ServedFinding(
        id="prefix-cache-changes-answers",
        severity="error",
        seen=seen + ends,
        follows=f"reading the prefix cache {effect}: it restores another state than the prompt has. Rounding does not "
        "explain it",
        next="start the server without its prefix cache, and report it to the engine",
    )


def not_repeatable(seen: str, reason: Reason | None = None) -> ServedFinding:
    """The finding that answers to one prompt change, and that the prefix cache is not shown to be the reason."""
    why = {"drafted": "only answers with drafts do", "repeated": "only repeats of a prompt do"}
    return ServedFinding(
        id="answers-not-repeatable",
        severity="warning",
        seen=seen,
        follows=f"greedy answers to one prompt change by more than near-ties; {why.get(reason or '', UNKNOWN)}",
        next="repeat the probe without other clients, then without the prefix cache, then without the draft",
    )


def ends_text(wrong: Sequence[CountedAnswer], whole: int) -> str:
    """Words about wrong answers that stop early, if most do. A whole answer has `whole` tokens."""
    lengths = [
        item.num_tokens for item in wrong if item.served.finish_reason != "length" and item.num_tokens <= EARLY * whole
    ]
    if not lengths or 2 * len(lengths) < len(wrong):
        return ""
    size = plural(max(lengths), "token") if len(set(lengths)) == 1 else f"{min(lengths)} to {max(lengths)} tokens"
    return f"; {len(lengths)} of them {'ends' if len(lengths) == 1 else 'end'} after {size}, a whole one has {whole}"


def ends_at_once(answer: CountedAnswer, whole: int) -> bool:
    """Whether an answer stops with one token or none, and another one to its prompt has `whole` tokens."""
    return answer.num_tokens <= 1 and answer.served.finish_reason != "length" and whole >= MIN_WHOLE


def _fresh(session: QuestionSession, prompt_ids: Tokens, size: int, turn: int) -> Trial:
    """An answer without the cache. If the server takes no field for that, its prompt has its parts exchanged."""
    try:
        answer = session.ask(prompt_ids, size, FRESH)
    except RequestError:
        answer = None
    if answer is not None and not (answer.num_cached and session.server.can_score):
        return Trial(prompt_ids=prompt_ids, answer=answer, of=prompt_ids, is_repeat=True, is_fresh=True)
    middle = turn * len(prompt_ids) // (MOST_TURNS + 1)
    exchanged = (*prompt_ids[middle:], *prompt_ids[:middle])
    answer = session.ask(exchanged, size, CACHED)
    return Trial(prompt_ids=exchanged, answer=answer, of=prompt_ids, is_repeat=False, is_fresh=True)


def _judged(
    session: QuestionSession,
    trials: Sequence[Trial],
    prompt_ids: Tokens,
    gaps: dict[tuple[Tokens, Tokens], float | None],
) -> Iterator[Trial]:
    """The trials of one prompt, each with `is_wrong`. `gaps` has the answers that were judged before."""
    own = [item for item in trials if item.of == prompt_ids]
    whole = max(item.answer.num_tokens for item in own)
    base = next(item.text for item in own if item.is_fresh)
    limit = FAULT_NATS if session.facts.is_quantised else session.near_tie_nats
    for item in own:
        text = item.text
        key = (text.prompt_ids, text.token_ids)
        if key not in gaps:
            gaps[key] = _gap(session, text, base)
        gap = gaps[key]
        yield replace(item, is_wrong=ends_at_once(item.answer, whole) if gap is None else gap > limit)


def _gap(session: QuestionSession, text: TokenText, base: TokenText) -> float | None:
    """How much less likely a token of an answer is than the target's choice, in nats; None if that is not known."""
    try:
        if session.server.can_score:
            found = session.find_worst(text) if text.token_ids else None
        else:
            texts = ({("", 0): item} for item in (text, base))
            equality = compare_texts(*texts, names=("", ""), next_logprobs=session.likeliest)
            found = equality.differences[0] if equality.differences else None
    except (RequestError, UnsupportedError):
        return None
    return None if found is None else found.gap_nats
