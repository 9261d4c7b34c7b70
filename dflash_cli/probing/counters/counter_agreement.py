"""Tell requests of other clients from a counter that counts wrongly.

Another client's tokens raise the counters of tokens and of steps alike. A counter that alone differs from the answers,
while the others show these answers and no more, counts something else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_cli.probing.counters.server_counters import ServerCounters, differ
from dflash_cli.probing.served.served_answer import ServedAnswer
from dflash_runtime.phrases import plural

CLOSE = 0.02
"""A count equals a formula if it differs by this share, or by two tokens per answer."""
OWN_REQUESTS = 1.5
"""A counter of requests alone is wrong from this many requests per answer on. Fewer may be requests without a token."""
Counter = Literal["num_requests", "num_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "steps"]
NAMES: Mapping[str, str] = {
    "num_requests": "requests", "num_tokens": "tokens of answers", "num_drafts": "verify steps",
    "num_draft_tokens": "draft tokens", "num_accepted_tokens": "accepted draft tokens",
    "steps": "steps and accepted draft tokens",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Sums over answers. A sum is None if an answer does not report it.

    num_steps  of answers that list their steps or report the exact number
    """

    num_answers: int
    num_tokens: int
    num_prompt_tokens: int | None = None
    num_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None

    @classmethod
    def of(cls, answers: Sequence[ServedAnswer], num_prompt_tokens: int | None = None) -> "Answered":
        """The sums of these answers."""
        listed = [item.steps for item in answers if item.steps is not None]
        lists_all = len(listed) == len(answers)
        return cls(
            num_answers=len(answers),
            num_tokens=sum(len(item.token_ids) for item in answers),
            num_prompt_tokens=num_prompt_tokens,
            num_steps=sum(len(item.accepted) for item in listed) if lists_all else None,
            num_accepted=sum(sum(item.accepted) for item in listed)
            if lists_all
            else _sum([item.num_accepted for item in answers]),
            num_drafted=_sum([item.num_drafted for item in answers]),
        )


def is_of_others(risen: ServerCounters, own: Answered, num_extra: float = 0) -> bool:
    """Whether counters rose by more than the answers, so that requests of other clients ran too.

    `num_extra` is how many requests of this probe may be counted beside the answers.
    """
    if odd_counter(risen, own, num_extra) is not None:
        return False
    if _has_more_requests(risen, own, num_extra):
        return True
    return not num_extra and (_has_more_tokens(risen, own) or _has_more_steps(risen, own))


def odd_counter(risen: ServerCounters, own: Answered, num_extra: float = 0) -> Counter | None:
    """The counter that differs from the answers while the others agree with them, or None."""
    if num_extra or risen.contradiction is not None or (risen.num_requests or own.num_answers) < own.num_answers:
        return None
    has_more_tokens, has_own_steps = _has_more_tokens(risen, own), _has_own_steps(risen, own)
    if _has_more_requests(risen, own, 0):
        is_odd = not has_more_tokens and has_own_steps and (risen.num_requests or 0) >= OWN_REQUESTS * own.num_answers
        return "num_requests" if is_odd and risen.num_tokens is not None else None
    if has_more_tokens:
        is_known = risen.num_requests is not None or _formula(risen.num_tokens or 0, risen, own) is not None
        return "num_tokens" if has_own_steps and is_known else None
    if risen.num_tokens is None:
        return None
    if _has_more_steps(risen, own):
        return "steps"
    if risen.num_tokens < own.num_tokens - own.num_answers and differ(risen.num_tokens, own.num_tokens):
        return "num_tokens" if has_own_steps else None
    return next((name for name in _figures(own) if _is_unlike(risen, own, name)), None)


def describe_odd(risen: ServerCounters, own: Answered) -> str | None:
    """`the server counted 2614 tokens of answers, the answers have 1024: ...`; None if no counter is odd."""
    name = odd_counter(risen, own)
    if name is None:
        return None
    if name == "steps":
        counts = f"{risen.num_drafts} steps and {risen.num_accepted_drafts} accepted draft tokens"
        return f"the server counted {counts}, and {own.num_tokens} tokens in {plural(own.num_answers, 'answer')}"
    count: int = getattr(risen, name) or 0
    answered = _figures(own).get(name, own.num_tokens)
    if name in ("num_requests", "num_tokens"):
        answered = own.num_answers if name == "num_requests" else own.num_tokens
    formula = _formula(count, risen, own) if name == "num_tokens" else None
    about = f": about the number of {formula}" if formula else ""
    return f"the server counted {count} {NAMES[name]}, the answers have {answered}{about}"


def _figures(own: Answered) -> dict[Counter, int]:
    """Counter -> the answers' own sum, for counts that the answers report too."""
    sums: dict[Counter, int | None] = {
        "num_drafts": own.num_steps, "num_draft_tokens": own.num_drafted, "num_accepted_tokens": own.num_accepted,
    }  # fmt: skip
    return {name: value for name, value in sums.items() if value is not None}


def _counts(risen: ServerCounters) -> dict[Counter, int | None]:
    accepted = risen.num_accepted_drafts
    return {
        "num_drafts": risen.num_drafts, "num_draft_tokens": risen.num_draft_tokens, "num_accepted_tokens": accepted,
    }  # fmt: skip


def _is_unlike(risen: ServerCounters, own: Answered, name: Counter) -> bool:
    """Whether a count differs from the answers' own sum by more than one step of each answer."""
    count, answered = _counts(risen)[name], _figures(own)[name]
    if count is None:
        return False
    width = 1 if name == "num_drafts" else 1 + max(len(risen.per_pos_accepted), 16)
    return abs(count - answered) > width * own.num_answers and differ(count, answered)


def _has_more_requests(risen: ServerCounters, own: Answered, num_extra: float) -> bool:
    return risen.num_requests is not None and risen.num_requests > own.num_answers + num_extra


def _has_more_tokens(risen: ServerCounters, own: Answered) -> bool:
    """Whether more tokens were counted than the answers have. A server may count one more per answer, as their end."""
    return (risen.num_tokens or 0) > own.num_tokens + own.num_answers


def _has_more_steps(risen: ServerCounters, own: Answered) -> bool:
    """Whether steps committed more tokens than the answers have. An answer's last step may accept some past its end."""
    if not (risen.has_sound_positions and risen.per_pos_accepted):
        return False
    past_end = len(risen.per_pos_accepted) * own.num_answers
    return _committed(risen) > own.num_tokens + own.num_answers + past_end


def _has_own_steps(risen: ServerCounters, own: Answered) -> bool:
    """Whether the counted steps are the steps of these answers: by the answers' own sums, or by the tokens."""
    counts = _counts(risen)
    if any(value and counts[name] == value for name, value in _figures(own).items()):
        return True
    is_whole = _committed(risen) >= own.num_tokens - own.num_answers and risen.num_accepted_drafts is not None
    return bool(risen.num_drafts) and is_whole and not _has_more_steps(risen, own)


def _committed(risen: ServerCounters) -> int:
    """Tokens of the steps: accepted draft tokens, and one of the target per step."""
    return (risen.num_drafts or 0) + (risen.num_accepted_drafts or sum(risen.per_pos_accepted))


def _formula(count: int, risen: ServerCounters, own: Answered) -> str | None:
    """The sum of other counts that a wrong count of tokens equals."""
    drafted, accepted, steps = risen.num_draft_tokens, risen.num_accepted_drafts, risen.num_drafts
    sums: dict[str, int | None] = {"tokens counted twice": 2 * own.num_tokens}
    if own.num_prompt_tokens:
        sums["tokens of prompts and answers"] = own.num_tokens + own.num_prompt_tokens
    if steps:
        sums |= {"verify steps": steps, "tokens of answers and verify steps": own.num_tokens + steps}
    if accepted:
        sums |= {
            "tokens of answers and accepted draft tokens": own.num_tokens + accepted,
            "accepted draft tokens": accepted,
        }
    if drafted and accepted is not None:
        sums |= {
            "tokens of answers and rejected draft tokens (drafted less accepted)": own.num_tokens + drafted - accepted,
            "tokens of answers and draft tokens": own.num_tokens + drafted,
            "draft tokens": drafted,
        }
    gaps = {name: abs(count - value) for name, value in sums.items() if value is not None}
    name = min(gaps, key=lambda item: gaps[item])
    return name if gaps[name] <= max(CLOSE * count, 2 * own.num_answers) else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
