"""An answer of a server with its verify steps, and readers of the parts that engines share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dflash_runtime.documents import Limits
from dflash_runtime.json_values import is_int
from dflash_runtime.metrics import MAX_DRAFT_TOKENS

MAX_LEN = 1 << 31
"""Bound of token ids and of numbers of tokens."""
MAX_STEPS = 200_000
"""More steps than any answer has."""
Drafts = Annotated[int, Limits(least=0, below=MAX_DRAFT_TOKENS + 1)]
Steps = Annotated[int, Limits(least=0, below=MAX_STEPS * MAX_DRAFT_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSteps:
    """The verify steps of one answer, as the server counted them.

    accepted    accepted draft tokens of each step
    drafted     draft tokens of each step; empty if every step had K
    is_ordered  whether the steps are in order of time
    """

    accepted: tuple[Drafts, ...]
    drafted: tuple[Drafts, ...] = ()
    is_ordered: bool = False

    @classmethod
    def of_histogram(cls, histogram: Sequence[int]) -> "ServedSteps":
        """Steps without order, from the numbers of steps that accepted 0, 1, ... draft tokens."""
        return cls(accepted=tuple(accepted for _, accepted in steps_of({"": histogram})))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """One answer. A field is None if the answer does not report it.

    finish_reason     `length`, one of ABORTED, or another word for `stop`
    end_id            the token that ended the answer, by the server
    steps             the verify steps
    num_steps         sums over the steps, for servers that report sums only; the engine's file says more
    num_accepted
    num_drafted
    num_draft_tokens  K
    num_cached        prompt tokens that the prefix cache held
    num_prompt        prompt tokens that the server read
    id                the name that the server gives this answer alone
    decode_ms         time of decoding without the prompt, by the server
    method            method of drafting, by the answer's settings
    started_s         when the request was sent, by this client's `time.perf_counter`
    seconds           time from the request to the end of the answer, by this client
    """

    token_ids: tuple[Annotated[int, Limits(least=0, below=MAX_LEN)], ...]
    text: str
    finish_reason: str
    end_id: Annotated[int, Limits(least=0, below=MAX_LEN)] | None = None
    steps: ServedSteps | None = None
    num_steps: Steps | None = None
    num_accepted: Steps | None = None
    num_drafted: Steps | None = None
    num_draft_tokens: Drafts | None = None
    num_cached: Annotated[int, Limits(least=0, below=MAX_LEN)] | None = None
    num_prompt: Annotated[int, Limits(least=0, below=MAX_LEN)] | None = None
    id: str | None = None
    decode_ms: Annotated[float, Limits(least=0)] | None = None
    method: str | None = None
    started_s: float | None = None
    seconds: float | None = None


ABORTED = ("abort", "error")
"""Reasons of an answer's end that are neither the model's nor a limit."""


def steps_of(histograms: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """The name of its histogram and the number of accepted draft tokens for each step that histograms count.

    Raises:
        ValueError: the counts are not a plausible number of steps.
    """
    counts = [count for histogram in histograms.values() for count in histogram]
    if not all(is_int(count) and count >= 0 for count in counts) or sum(counts) > MAX_STEPS:
        raise ValueError(f"counts of steps, expected 0 or more and at most {MAX_STEPS} in all")
    items = histograms.items()
    return [(name, place) for name, histogram in items for place, count in enumerate(histogram) for _ in range(count)]


def as_id(value: object) -> int | None:
    """The value if it is a token id."""
    return value if is_int(value) and 0 <= value < MAX_LEN else None


def ids_of(document: Any, name: str = "tokens") -> list[int]:
    """The list of token ids in a document's field.

    Raises:
        KeyError: the field is absent.
        TypeError: the field is not a list of integers.
    """
    found = document[name]
    if not isinstance(found, list) or None in map(as_id, found):
        raise TypeError(f"{name} is not a list of token ids")
    return found
