"""How many rows of each block a decode step verifies. Host only.

Verifying takes time, more in larger batches, and the last drafts of a block are mostly rejected. `AdaptiveWidth`
chooses for every step the width with the highest expected tokens per second:

    tokens of a step    for each request, 1 + the sum of the survivals of its verified positions
    survival            the probability that a position and all positions before it are accepted
    time of a step      a table of measured milliseconds

Width 1 is plain decoding. The text is the same at every width: a narrower step commits fewer tokens of it. A choice
depends only on the acceptance observed so far, and results of a step may arrive several steps later.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from dflash_runtime.scheduling.request import Request

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The widths to choose from. They are few, because each needs a CUDA graph for every bucket of requests."""

FIRST_RATE = 0.75
"""Expected acceptance rate of the first draft token, before any observation."""

PRIOR_WEIGHT = 4.0
"""Weight of a position's prior, in observations. The prior is the estimated rate of the position before."""

MIN_MEMORY, MEMORY_STEPS = 128, 12
"""The estimate of a position uses about the last MEMORY_STEPS steps, but at least MIN_MEMORY observations."""

MIN_GAIN = 0.01
"""The width changes only if another width is better by this share, so that noise does not change it."""

MIN_SAVING = 0.015
"""A narrower width is a candidate only if it saves this share of a wider step's time, because it needs CUDA graphs."""

TRIAL_SHARE = 0.01
"""Share of the time that may be lost to steps that try another width."""

HOPED_RATE = 0.85
"""Acceptance rate of a good draft: the estimate that chooses the width to try while nothing is drafted."""


class WidthPolicy(Protocol):
    """Chooses the verify width of each step, and observes how many drafts were accepted."""

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        """The widths that a step of `batch` requests may get, if `widths` are the widest widths of the requests."""
        ...

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        """The width of a step, at most the largest of `widths`. `widths` has the widest width of each request.

        `num_context` is the number of KV tokens of all these requests.
        """
        ...

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """Note how many drafts one verify step of one request verified, and how many were accepted."""
        ...


def width_of(
    requests: Sequence[Request], policy: WidthPolicy, full: int, looked_up: Sequence[Sequence[int]] = ()
) -> int:
    """The verify width of a step of these requests, at most `full`; 1 without requests.

    A lookup may draft fewer tokens than asked, `looked_up`. A step without any is a verify step too, of two rows.
    """
    widths = [min(request.params.verify_width or full, full) for request in requests]
    if looked_up:
        widths = [min(width, max(2, 1 + len(drafted))) for width, drafted in zip(widths, looked_up, strict=True)]
    return policy.choose(widths, sum(request.kv_len for request in requests)) if requests else 1


class FixedWidth:
    """Always chooses the largest width that a request of the step allows."""

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        return sorted(set(widths))

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        return max(widths)

    def observe(self, num_verified: int, num_accepted: int) -> None:
        pass


class LookupWidth(FixedWidth):
    """Chooses the narrowest of a few widths that holds the longest draft of a lookup, since each is a graph."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._widths = widths_for(num_draft_tokens)

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        """See `WidthPolicy`."""
        return sorted({self._holding(width) for widest in widths for width in range(min(widest, 2), widest + 1)})

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        """See `WidthPolicy`."""
        return self._holding(max(widths))

    def _holding(self, width: int) -> int:
        return next(item for item in self._widths if item >= width)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a decode step by batch size and verify width, and the time that its context adds.

    A batch takes the time of the next larger size in the table, because it runs in the CUDA graph of that size. Each
    context token adds `context_ms` to every step, and `draft_context_ms` to a step that drafts.
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
        """Times of `batches`, interpolated linearly between the batch sizes of `measured`."""
        sizes = sorted(measured)
        table = {}
        for batch in batches:
            after = min(bisect_left(sizes, batch), len(sizes) - 1)
            low, high = sizes[max(0, after - 1)], sizes[after]
            share = min(1.0, max(0.0, (batch - low) / (high - low))) if high > low else 0.0
            # Rounding in this formula is monotone: if one width is at most as slow as another at both sizes, it is at
            # most as slow in between.
            table[batch] = {w: (1 - share) * ms + share * measured[high][w] for w, ms in measured[low].items()}
        return cls(table, context_ms, draft_context_ms)

    def row(self, batch: int) -> Mapping[int, float]:
        """Milliseconds by width of a step of `batch` requests."""
        sizes = sorted(self.table)
        return self.table[sizes[min(bisect_left(sizes, batch), len(sizes) - 1)]]


class SurvivalEstimate:
    """How likely each position of a block is accepted, estimated from recent steps of all requests.

    Stores conditional rates: how often a position is accepted when all positions before it are. A position that is no
    longer verified keeps its rate, and its survival still depends on the positions before it.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._reached = [0.0] * num_draft_tokens
        self._accepted = [0.0] * num_draft_tokens

    def add(self, num_verified: int, num_accepted: int, memory: int) -> None:
        """Count one request's step. Older observations fade: about the last `memory` per position have weight."""
        keep = 1 - 1 / memory
        for position in range(min(num_accepted + 1, num_verified)):
            self._reached[position] = keep * self._reached[position] + 1
            self._accepted[position] = keep * self._accepted[position] + (position < num_accepted)

    def expected_tokens(self) -> list[float]:
        """Expected tokens per step of one request, for a verify width of 1, 2, ..."""
        rate, survival, survivals = FIRST_RATE, 1.0, [1.0]
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            rate = (accepted + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT)
            survival *= rate
            survivals.append(survival)
        return list(accumulate(survivals))


class AdaptiveWidth:
    """Chooses the width with the highest expected tokens per second, and sometimes tries another width.

    A narrower width needs no trial, because steps of the current width show what it would accept. A wider width needs
    trials, and so does every width while nothing is drafted. Each step adds `TRIAL_SHARE` of its time to a budget, and
    a trial runs only when the budget covers the time it is expected to lose.
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
        """Widths of at most `widest`, narrowest first, without widths that save almost no time against a wider one."""
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
        """Milliseconds of the widths that the batch can use, narrowest first."""
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
        """The width to try in this step, or None if the budget does not cover the expected loss."""
        self._saved_ms += TRIAL_SHARE * times[own]
        wider = [width for width in times if width > own]
        if not wider:
            return None
        trial = wider[0]
        if own == 1:
            hoped = _tokens_by_width(self._hoped, widths, times)
            trial = max(wider, key=lambda width: hoped[width] / times[width])
        ms_per_token = times[own] / tokens[own]
        # Rows beyond the current width give as many tokens as the last time they were verified, or none at worst.
        expected, at_worst = times[trial] - tokens[trial] * ms_per_token, times[trial] - times[own]
        cost = max(expected, at_worst / 2, TRIAL_SHARE * times[own])
        self._saved_ms = min(self._saved_ms, 2 * cost)
        if self._saved_ms < cost:
            return None
        self._saved_ms -= cost
        return trial


def widths_for(num_draft_tokens: int) -> tuple[int, ...]:
    """The widths to choose from for blocks of K + 1 rows: the `WIDTHS` below K + 1, and K + 1."""
    block = num_draft_tokens + 1
    return (*(width for width in WIDTHS if width < block), block)


def _tokens_by_width(expected: Sequence[float], widths: Sequence[int], times: Mapping[int, float]) -> dict[int, float]:
    """Expected tokens of a whole step for each width in `times`. `widths` has the widest width of each request."""
    counts = Counter(widths)
    return {width: sum(count * expected[min(own, width) - 1] for own, count in counts.items()) for width in times}
