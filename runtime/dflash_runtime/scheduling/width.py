"""How many rows of each block a decode step verifies. Host only.

Verifying costs time, more the larger the batch is, and most of the last drafts are refused. `AdaptiveWidth` chooses for
every step the width that promises the most tokens a second:

    tokens of a step    for each request 1 + the survival of every position that is verified
    survival            of a position: the probability that it and all before it are accepted
    time of a step      a table of measured milliseconds

A width of 1 is plain decoding. Whatever is chosen, the text is the same: a narrower step commits fewer tokens of it.
Choices follow from observations alone, which may come steps after their choice.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from dflash_runtime.scheduling.request import Request

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Widths that are chosen from: few, since each is a graph of its own for every bucket of requests."""

FIRST_RATE = 0.75
"""What the first drafted token is expected to be accepted at, before anything was seen."""

PRIOR_WEIGHT = 4.0
"""Observations that an expected rate counts as; a position is expected to do as well as the one before it."""

MIN_MEMORY, MEMORY_STEPS = 128, 12
"""Observations of a position that are remembered: those of so many steps, and at least so many."""

MIN_GAIN = 0.01
"""By how much another width must be better to be taken, so that noise changes nothing."""

MIN_SAVING = 0.015
"""Share of a wider step's time that a narrower one must save to be a candidate: each is a graph of its own."""

TRIAL_SHARE = 0.01
"""Share of the time that may be lost to steps that try another width."""

HOPED_RATE = 0.85
"""The rate for which a width is tried while nothing is drafted: that of a good draft."""


class WidthPolicy(Protocol):
    """Who decides on the verify width of each step, and hears what was accepted."""

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        """The widths that steps of so many requests can have, where each asks for one of `widths` at most."""
        ...

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        """The width of a step whose requests ask for `widths` at most and have `num_context` tokens of KV together.

        At most the largest of theirs.
        """
        ...

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """One request's draft step: how many drafts were verified, and how many of them accepted."""
        ...


def width_of(requests: Sequence[Request], policy: WidthPolicy, full: int) -> int:
    """How many rows of each block a step of these requests verifies, of `full` at most; 1 where there are none."""
    widths = [min(request.params.verify_width or full, full) for request in requests]
    return policy.choose(widths, sum(request.kv_len for request in requests)) if requests else 1


class FixedWidth:
    """As many rows as any request asks for."""

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        return sorted(set(widths))

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        return max(widths)

    def observe(self, num_verified: int, num_accepted: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a decode step without context, by batch size and verify width, and what context adds.

    A batch takes the time of the next size in the table, as it takes that one's graph. A token of context is read in
    every step, by the target and in steps that draft by the draft too: `context_ms` and `draft_context_ms` for each.
    """

    table: Mapping[int, Mapping[int, float]]
    context_ms: float = 0.0
    draft_context_ms: float = 0.0

    @classmethod
    def between(
        cls,
        measured: Mapping[int, Mapping[int, float]],
        batches: Sequence[int],
        context_ms: float = 0.0,
        draft_context_ms: float = 0.0,
    ) -> "StepTimes":
        """Times of these batch sizes from those of some of them, on the line from one to the next."""
        sizes = sorted(measured)
        table = {}
        for batch in batches:
            after = min(bisect_left(sizes, batch), len(sizes) - 1)
            low, high = sizes[max(0, after - 1)], sizes[after]
            share = min(1.0, max(0.0, (batch - low) / (high - low))) if high > low else 0.0
            # Weighted so, what is not longer at both ends is not longer between them, roundings included.
            table[batch] = {w: (1 - share) * ms + share * measured[high][w] for w, ms in measured[low].items()}
        return cls(table, context_ms, draft_context_ms)

    def row(self, batch: int) -> Mapping[int, float]:
        """Milliseconds by width."""
        sizes = sorted(self.table)
        return self.table[sizes[min(bisect_left(sizes, batch), len(sizes) - 1)]]


class SurvivalEstimate:
    """How likely each position of a block is accepted, from what was accepted lately, of all requests together.

    Kept are conditional rates: how often a position is accepted where all before it are. A position that is not
    verified any more keeps its rate, and its survival still follows those before it.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._reached = [0.0] * num_draft_tokens
        self._accepted = [0.0] * num_draft_tokens

    def add(self, num_verified: int, num_accepted: int, memory: int) -> None:
        """Count one request's step, forgetting all but the latest `memory` of each position."""
        keep = 1 - 1 / memory
        for position in range(min(num_accepted + 1, num_verified)):
            self._reached[position] = keep * self._reached[position] + 1
            self._accepted[position] = keep * self._accepted[position] + (position < num_accepted)

    def expected_tokens(self) -> list[float]:
        """Tokens of a request's step that verifies 1, 2, ... rows."""
        rate, survival, survivals = FIRST_RATE, 1.0, [1.0]
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            rate = (accepted + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT)
            survival *= rate
            survivals.append(survival)
        return list(accumulate(survivals))


class AdaptiveWidth:
    """The width that promises the most tokens a second, and now and then a trial of another.

    A narrower width needs no trial, since the one in use says what it would accept. A wider one does, and so does any
    while nothing is drafted. Time lost to trials is saved up for before it is spent, `TRIAL_SHARE` of each step's.
    """

    def __init__(self, times: StepTimes, num_draft_tokens: int) -> None:
        self._times = times
        self._rows: dict[tuple[int, int], dict[int, float]] = {}
        self._survival = SurvivalEstimate(num_draft_tokens)
        self._hoped = list(accumulate(HOPED_RATE**position for position in range(num_draft_tokens + 1)))
        self._memory = MIN_MEMORY
        self._width: int | None = None
        self._saved_ms = 0.0

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        """See `WidthPolicy`."""
        return sorted({width for widest in set(widths) for width in self._candidates(batch, widest)})

    def _candidates(self, batch: int, widest: int) -> list[int]:
        """Narrowest first, without those that save next to nothing against a wider one."""
        row = self._times.row(batch)
        kept = [widest if widest in row else max(width for width in row if width <= widest)]
        for width in sorted((width for width in row if 1 < width < kept[0]), reverse=True):
            if row[width] < (1 - MIN_SAVING) * row[kept[-1]]:
                kept.append(width)
        return sorted({1, *kept})

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        """See `WidthPolicy`."""
        batch = len(widths)
        self._memory = max(MIN_MEMORY, MEMORY_STEPS * batch)
        times = self._step_times(batch, max(widths), num_context)
        tokens = _tokens_by_width(self._survival.expected_tokens(), widths, times)
        best = max(times, key=lambda width: tokens[width] / times[width])
        own = self._width
        if own not in times or tokens[best] / times[best] > (1 + MIN_GAIN) * tokens[own] / times[own]:
            own = best
        self._width = own
        return self._trial(own, times, tokens, widths) or own

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """See `WidthPolicy`."""
        self._survival.add(num_verified, num_accepted, self._memory)

    def _step_times(self, batch: int, widest: int, num_context: int) -> dict[int, float]:
        """Milliseconds of the widths that the batch can take, narrowest first."""
        key = batch, widest
        if key not in self._rows:
            row = self._times.row(batch)
            self._rows[key] = {width: row[width] for width in self._candidates(batch, widest)}
        plain = self._times.context_ms * num_context
        drafting = plain + self._times.draft_context_ms * num_context
        return {width: ms + (drafting if width > 1 else plain) for width, ms in self._rows[key].items()}

    def _trial(
        self, own: int, times: Mapping[int, float], tokens: Mapping[int, float], widths: Sequence[int]
    ) -> int | None:
        """The width to try in this step, if enough is saved for what that is expected to lose."""
        self._saved_ms += TRIAL_SHARE * times[own]
        wider = [width for width in times if width > own]
        if not wider:
            return None
        trial = wider[0]
        if own == 1:
            hoped = _tokens_by_width(self._hoped, widths, times)
            trial = max(wider, key=lambda width: hoped[width] / times[width])
        ms_per_token = times[own] / tokens[own]
        # Rows beyond the own width give what they gave when they were last verified, or nothing.
        expected, at_worst = times[trial] - tokens[trial] * ms_per_token, times[trial] - times[own]
        cost = max(expected, at_worst / 2, TRIAL_SHARE * times[own])
        self._saved_ms = min(self._saved_ms, 2 * cost)
        if self._saved_ms < cost:
            return None
        self._saved_ms -= cost
        return trial


def widths_for(num_draft_tokens: int) -> tuple[int, ...]:
    """The widths that are chosen from for blocks of K + 1 rows: those of `WIDTHS` that fit, and the whole block."""
    block = num_draft_tokens + 1
    return (*(width for width in WIDTHS if width < block), block)


def _tokens_by_width(expected: Sequence[float], widths: Sequence[int], times: Mapping[int, float]) -> dict[int, float]:
    """Tokens of a whole step for each width that has a time: every request counts as far as it asks for."""
    counts = Counter(widths)
    return {width: sum(count * expected[min(own, width) - 1] for own, count in counts.items()) for width in times}
