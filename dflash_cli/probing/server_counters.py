"""What a server has counted since it was started, and what it counted in between two readings.

Sources: `vllm/v1/spec_decode/metrics.py` of vLLM 0.33, `tools/server/server-task.cpp` of llama.cpp from build 10408 on
and `srt/observability/metrics_collector.py` of SGLang 0.5.23. A name stands for itself and for itself with `_total`,
which clients of Prometheus add and some exporters do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from dflash_runtime.errors import UnsupportedError

SCALARS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_requests", "num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterNames:
    """What one engine calls its counters; None for those that it does not have."""

    num_drafts: str
    num_draft_tokens: str | None = None
    num_accepted_tokens: str | None = None
    per_pos_accepted: str | None = None
    num_requests: str | None = None
    num_tokens: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Values of the counters, over all engines, models and reasons that they are kept for; None where one is missing.

    `per_pos_accepted` has the steps that accepted each position, and is empty where the server does not count them.
    """

    num_drafts: int | None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    per_pos_accepted: tuple[int, ...] = ()
    num_requests: int | None = None
    num_tokens: int | None = None

    def since(self, before: "ServerCounters") -> "ServerCounters | None":
        """What was counted after `before`; None where a counter has fallen, since then the server was started anew."""
        values = {name: _rise(getattr(before, name), getattr(self, name)) for name in SCALARS}
        # A position that nothing was accepted at yet has no counter in llama.cpp.
        known = before.per_pos_accepted + (0,) * (len(self.per_pos_accepted) - len(before.per_pos_accepted))
        positions = tuple(now - was for was, now in zip(known, self.per_pos_accepted, strict=False))
        has_fallen = any(value is not None and value < 0 for value in (*values.values(), *positions))
        if has_fallen or len(self.per_pos_accepted) < len(before.per_pos_accepted):
            return None
        return ServerCounters(**values, per_pos_accepted=positions)

    @property
    def histogram(self) -> tuple[int, ...] | None:
        """Steps that accepted 0, 1, ... K drafts; None where the counters do not tell, or contradict each other."""
        if self.num_drafts is None or not self.per_pos_accepted:
            return None
        reached = (self.num_drafts, *self.per_pos_accepted, 0)
        steps = tuple(now - after for now, after in pairwise(reached))
        return steps if min(steps) >= 0 else None


def read_counters(text: str, names: CounterNames, where: str) -> ServerCounters | None:
    """The counters in a text in Prometheus' format; None where it has no count of drafts.

    Raises:
        UnsupportedError: it is no such text.
    """
    samples = _samples(text, where)
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples:
        plain = name.removesuffix("_total")
        totals[plain] = totals.get(plain, 0) + value
        if plain == names.per_pos_accepted and labels.get("position", "").isdecimal():
            place = int(labels["position"])
            positions[place] = positions.get(place, 0) + value
    if names.num_drafts not in totals:
        return None
    values = {field: _whole(totals.get(getattr(names, field) or "")) for field in SCALARS}
    places = range(max(positions, default=-1) + 1)
    return ServerCounters(**values, per_pos_accepted=tuple(int(positions.get(place, 0)) for place in places))


def _samples(text: str, where: str) -> list[tuple[str, Mapping[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        said = (str(error).splitlines() or ["no reason"])[0]
        raise UnsupportedError(f"{where}: found no text in Prometheus' format: {said}") from error
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rise(before: int | None, after: int | None) -> int | None:
    return after - (before or 0) if after is not None else None
