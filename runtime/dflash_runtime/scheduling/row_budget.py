"""How many rows a decode step verifies in all, and which request gets how many. Host only.

A verified row is worth the probability that its token is accepted: the survival of its position, the product of the
conditional probabilities up to it. Survivals of a request never grow along a block, so the best rows of a batch are a
prefix of each block. The number of rows is the one with the most expected tokens per millisecond:

    mean over recent steps of (requests + sum of the n best survivals) / milliseconds of a step with n drafted rows

The text never depends on it: a narrower block commits fewer tokens of the same text.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import mul
from typing import Protocol

from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.width import FIRST_RATE, StepTimes

FIRST_STEPS = 32
"""First steps with drafts that verify whole blocks, so that the predictions of all positions are learned."""

MEMORY_STEPS = 16
"""The number of steps in the mean of expected tokens."""

Survivals = Sequence[Sequence[float]]
"""Survival by position of each request's drafted tokens. Empty for a request that drafts nothing."""


def survivals_of(likely: Sequence[float]) -> list[float]:
    """Return the survival of each position, from conditional probabilities."""
    return list(accumulate(likely, mul))


def expected_tokens(survivals: Survivals, choices: Iterable[int]) -> dict[int, float]:
    """Return the expected tokens of a step for each number of rows, anchors included, that holds all anchors."""
    best = sorted(chain.from_iterable(survivals), reverse=True)
    gains = list(accumulate(best, initial=float(len(survivals))))
    return {rows: gains[min(rows - len(survivals), len(best))] for rows in choices if rows >= len(survivals)}


def fastest(tokens: Mapping[int, float], times: Mapping[int, float]) -> int:
    """Return the choice with the most tokens per millisecond, from tokens and milliseconds. The least of equal ones."""
    return max(sorted(tokens), key=lambda choice: tokens[choice] / times[choice])


class RecentTokens:
    """Expected tokens of each choice, averaged over about the last MEMORY_STEPS steps.

    One step's survivals are a draw. The best choice for one draw is too narrow for the next draw if that is better.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._num_steps = 0

    def add(self, tokens: Mapping[int, float]) -> dict[int, float]:
        """Add a step's tokens by choice -> the means of these choices."""
        self._num_steps = min(self._num_steps + 1, MEMORY_STEPS)
        for choice, value in tokens.items():
            mean = self._means.get(choice, value)
            self._means[choice] = mean + (value - mean) / self._num_steps
        return {choice: self._means[choice] for choice in tokens}


def give_rows(survivals: Survivals, num_rows: int) -> list[int]:
    """Return the rows of each request, anchors included, that hold the best survivals: at most `num_rows` in all.

    Among equal survivals, earlier positions come first, then earlier requests.
    """
    places = [(-value, place, request) for request, own in enumerate(survivals) for place, value in enumerate(own)]
    widths = [1] * len(survivals)
    for _, _, request in sorted(places)[: max(0, num_rows - len(survivals))]:
        widths[request] += 1
    return widths


class RowBudget(Protocol):
    """Chooses how many rows a step verifies for each request on average."""

    def candidates(self, batch: int, verify_width: int) -> list[int]:
        """The numbers to choose from in a step of `batch` requests with whole blocks of `verify_width` rows.

        0 stands for whole blocks.
        """
        ...

    def choose(self, requests: Sequence[Request], verify_width: int) -> int:
        """The number for a step of these requests."""
        ...


class BestBudget:
    """Chooses by the predictions of each request's last drafts, which may be from a few steps ago.

    A request without predictions has the mean survival of the others. Every step drafts, since only drafts show what
    drafting is worth.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._recent = RecentTokens()
        self._num_steps = 0

    def candidates(self, batch: int, verify_width: int) -> list[int]:
        """See `RowBudget`."""
        return [0, *(width for width in sorted(self._times.row(batch)) if 1 < width < verify_width)]

    def choose(self, requests: Sequence[Request], verify_width: int) -> int:
        """See `RowBudget`."""
        if not requests or verify_width == 1:
            return 0
        self._num_steps += 1
        if self._num_steps <= FIRST_STEPS:
            return 0
        batch = len(requests)
        num_context = sum(request.kv_len for request in requests)
        context_ms = num_context * (self._times.context_ms + self._times.draft_context_ms)
        row = self._times.row(batch)
        choices = {width or verify_width: width for width in self.candidates(batch, verify_width)}
        times = {width: row[max(own for own in row if own <= width)] + context_ms for width in choices}
        tokens = expected_tokens(_expected(requests, verify_width - 1), [batch * width for width in choices])
        recent = self._recent.add({rows // batch: value / batch for rows, value in tokens.items()})
        return choices[fastest(recent, times)]


def _expected(requests: Sequence[Request], num_drafts: int) -> list[list[float]]:
    """The survivals of each request's last drafts, or the mean of the others'."""
    known = [survivals_of([value or 0.0 for value in request.likely[:num_drafts]]) for request in requests]
    whole = [own for own in known if len(own) == num_drafts]
    usual = [sum(column) / len(whole) for column in zip(*whole, strict=True)] or survivals_of([FIRST_RATE] * num_drafts)
    most = [min(request.params.verify_width or num_drafts + 1, num_drafts + 1) - 1 for request in requests]
    return [(own if len(own) == num_drafts else usual)[:count] for own, count in zip(known, most, strict=True)]
