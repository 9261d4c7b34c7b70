"""When each answer of a run came, and how many requests the server says were running and waiting meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.counters.server_counters import ServerMetrics
from dflash_cli.probing.served.served_answer import ServedAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """An answer with its times in seconds by this client's clock."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    started_s: float
    seconds: float

    @property
    def ended_s(self) -> float:
        return self.started_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """The load of a run.

    answers  in order of their ends; empty if a request was repeated or failed, so that times say nothing
    running  most requests that the server ran at a reading of its metrics; None if it does not tell
    waiting  most requests that waited in its queue
    queue_s  rise of the sum of all requests' times in its queue
    """

    answers: tuple[TimedAnswer, ...] = ()
    running: int | None = None
    waiting: int | None = None
    queue_s: float | None = None

    @classmethod
    def of(cls, found: Sequence[tuple[Answer, ServedAnswer]], readings: Sequence[ServerMetrics]) -> "RunLoad":
        """The load by these answers, and by the readings before, during and after them."""
        timed = [
            TimedAnswer(
                prompt_ids=answer.output.prompt_token_ids,
                num_tokens=len(served.token_ids),
                started_s=served.started_s,
                seconds=served.seconds,
            )
            for answer, served in found
            if served.started_s is not None and served.seconds is not None
        ]
        return cls(
            answers=tuple(sorted(timed, key=lambda item: item.ended_s)),
            running=_most(readings, "running"),
            waiting=_most(readings, "waiting"),
            queue_s=_rise(readings),
        )


NO_LOAD = RunLoad()


def _most(readings: Sequence[ServerMetrics], key: str) -> int | None:
    values = [reading.load[key] for reading in readings if key in reading.load]
    return int(max(values)) if values else None


def _rise(readings: Sequence[ServerMetrics]) -> float | None:
    values = [reading.load["queue_s"] for reading in readings if "queue_s" in reading.load]
    return values[-1] - values[0] if len(values) > 1 and values == sorted(values) else None
