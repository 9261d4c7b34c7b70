"""A reading of a server's metrics: its counters since its start, their rise between two readings, and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from dflash_runtime.documents import NOT_REQUIRED

MIN_CONTRADICTION, CONTRADICTION = 8, 0.05
"""Counts that must be equal contradict each other if they differ by this number and by this share."""
BONUS_SLACK = 0.02
"""Share of the steps by which a count with the target's own tokens may be off."""
SCALARS = (
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_requests", "num_tokens", "num_cached_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Values of the counters, summed over engines, models and finish reasons; None if the server lacks a counter.

    `per_pos_accepted` has the number of steps that accepted each position. It is empty if the server does not count it.
    `resolution` is the smallest rise that the printed samples show. llama.cpp prints six digits, so that large counters
    move in tens or hundreds. Rises of such counters are not used.
    """

    num_drafts: int | None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    per_pos_accepted: tuple[int, ...] = ()
    num_requests: int | None = None
    num_tokens: int | None = None
    num_cached_tokens: Annotated[int | None, NOT_REQUIRED, "prompt tokens that the prefix cache held"] = None
    resolution: Annotated[int, NOT_REQUIRED, "smallest rise that the printed counters show"] = 1

    @property
    def is_exact(self) -> bool:
        """Whether the printed counters show each rise by 1."""
        return self.resolution == 1

    def since(self, before: "ServerCounters") -> "ServerCounters | None":
        """The rise of the counters after `before`; None if a counter fell, because the server restarted."""
        values = {name: _rise(getattr(before, name), getattr(self, name)) for name in SCALARS}
        # llama.cpp shows positions from the first drafted answer on.
        known = before.per_pos_accepted + (0,) * (len(self.per_pos_accepted) - len(before.per_pos_accepted))
        positions = tuple(now - was for was, now in zip(known, self.per_pos_accepted, strict=False))
        has_fallen = any(value is not None and value < 0 for value in (*values.values(), *positions))
        if has_fallen or len(self.per_pos_accepted) < len(before.per_pos_accepted):
            return None
        resolution = max(before.resolution, self.resolution)
        return ServerCounters(**values, per_pos_accepted=positions, resolution=resolution)

    @property
    def counts_bonus(self) -> bool:
        """Whether `num_accepted_tokens` has one token more per step than the positions: the target's own token.

        With the steps they are then more than the tokens of the answers.
        """
        drafts, accepted = self.num_drafts or 0, self.num_accepted_tokens or 0
        surplus, committed = accepted - sum(self.per_pos_accepted), drafts + accepted
        is_one_each = bool(drafts and self.per_pos_accepted) and abs(surplus - drafts) <= BONUS_SLACK * surplus
        known = self.num_tokens
        return is_one_each and (known is None or (committed > known and differ(committed, known)))

    @property
    def num_accepted_drafts(self) -> int | None:
        """Accepted draft tokens, without the target's own tokens."""
        return sum(self.per_pos_accepted) if self.counts_bonus else self.num_accepted_tokens

    @property
    def contradiction(self) -> str | None:
        """A contradiction between two counts, in words; None if all agree, or if the counters are not exact."""
        by_position, accepted = sum(self.per_pos_accepted), self.num_accepted_tokens
        if accepted is None or not self.is_exact:
            return None
        if self.per_pos_accepted and differ(by_position, accepted):
            if self.counts_bonus:
                return f"{accepted} accepted tokens in all, {by_position} by position and {self.num_drafts} steps"
            return f"{by_position} accepted tokens by position, {accepted} in all"
        drafted = self.num_draft_tokens
        if drafted is not None and accepted > drafted and differ(accepted, drafted):
            return f"{accepted} accepted tokens of {drafted} drafted ones"
        return None

    @property
    def has_sound_positions(self) -> bool:
        """Whether the positions may be used: a count with the target's own tokens leaves them right."""
        return self.is_exact and (self.contradiction is None or self.counts_bonus)

    @property
    def histogram(self) -> tuple[int, ...] | None:
        """Numbers of steps that accepted 0, 1, ... K draft tokens; None if unknown or if counters contradict."""
        if self.num_drafts is None or not self.per_pos_accepted or not self.has_sound_positions:
            return None
        reached = (self.num_drafts, *self.per_pos_accepted, 0)
        steps = tuple(now - after for now, after in pairwise(reached))
        return steps if min(steps) >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """One reading of a server's metrics.

    counters   None if the server does not count drafts
    started_s  start of the process that answered, in seconds since 1970
    infos      labels of metrics that describe settings, by the metric's name
    load       gauges and sums of the server's queue, under the keys of `InferenceServer.load_names`
    """

    counters: ServerCounters | None = None
    started_s: float | None = None
    infos: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)


def differ(count: int, other: int) -> bool:
    """Whether two counts that must be equal contradict each other."""
    return abs(count - other) > max(MIN_CONTRADICTION, CONTRADICTION * max(count, other))


def _rise(before: int | None, after: int | None) -> int | None:
    return after - (before or 0) if after is not None else None
