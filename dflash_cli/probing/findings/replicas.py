"""Tell one server from several behind one address, and from a server that started anew, by readings of its metrics.

One process has one start, and its counters never fall. Several processes give readings that fall and come back.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from dflash_cli.probing.counters.server_counters import ServerCounters, ServerMetrics
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.servers.inference_server import InferenceServer, ServerFacts
from dflash_runtime.phrases import plural

NUM_LOOKS = 6
"""Readings before the first request."""
MIN_RETURNS = 2
"""Counters that fell and came back this often belong to several processes. After a restart they come back once."""

MIN_SHARE = 0.1
"""Answers without steps, as a share, that a single short answer does not explain."""

Identity = Literal["one", "restarted", "several"]


def look_at(server: InferenceServer) -> ServerFacts:
    """The server's description of itself, with one reading of its metrics."""
    num_readings, facts = len(server.readings), server.describe()
    if len(server.readings) == num_readings:
        server.metrics()
    return facts


def identify(readings: Sequence[ServerMetrics]) -> Identity:
    """Whether readings, in order of time, come from one process, a restarted one or several."""
    starts = [item.started_s for item in readings if item.started_s is not None]
    changes = sum(now != before for before, now in pairwise(starts))
    if changes >= len(set(starts)) > 1:
        return "several"
    counters = [item.counters for item in readings if item.counters is not None]
    falls = [place for place, (before, now) in enumerate(pairwise(counters)) if now.since(before) is None]
    returns = sum(_comes_back(counters, place) for place in falls)
    if min(len(falls), returns) >= MIN_RETURNS:
        return "several"
    return "restarted" if changes or falls else "one"


def _comes_back(counters: Sequence[ServerCounters], place: int) -> bool:
    """Whether a reading soon after a fall is at least as high as the reading before the fall."""
    return any(later.since(counters[place]) is not None for later in counters[place + 2 : place + 2 + NUM_LOOKS])


def rises_alone(readings: Sequence[ServerMetrics]) -> bool:
    """Whether counters rose between the first readings, before this probe sent a request."""
    counters = [item.counters for item in readings if item.counters is not None]
    if len(counters) < 2:
        return False
    risen = counters[-1].since(counters[0])
    return risen is not None and bool(risen.num_tokens or risen.num_drafts or risen.num_requests)


def find_identity(
    looks: Sequence[ServerFacts], readings: Sequence[ServerMetrics], num_before: int
) -> list[ServedFinding]:
    """Findings about the process behind the address. The first `num_before` readings came before any request."""
    unlike = next(((first, item) for first, item in pairwise(looks) if first != item), None)
    identity = identify(readings)
    if unlike is not None and len(looks) > len(set(looks)):
        seen = f"descriptions of the server alternate: {_difference(*unlike)}"
        return [_several(seen), _unlike(seen)]
    if identity == "several":
        return [_several(f"{len(readings)} readings of the counters fall and come back, or alternate between starts")]
    if identity == "restarted":
        return [
            ServedFinding(
                id="counters-reset",
                severity="warning",
                seen="the server's counters fell during the probe",
                follows="the server or an engine of it started anew; counters from before and after do not add up",
                next="look in the server's log for a restart, and repeat the probe",
            )
        ]
    return [foreign_traffic("counters rose before the first request")] if rises_alone(readings[:num_before]) else []


def foreign_traffic(seen: str) -> ServedFinding:
    """Other clients ask the server too."""
    return ServedFinding(
        id="foreign-traffic",
        severity="warning",
        seen=seen,
        follows="other clients use the server: figures from counters include their requests",
        next="repeat the probe without other clients, or start the server so that answers report their steps",
    )


def _several(seen: str) -> ServedFinding:
    return ServedFinding(
        id="several-replicas",
        severity="warning",
        seen=seen,
        follows="several servers answer at this address; figures from counters are of no use",
        next="probe each server at its own address",
    )


def unlike_answers(run: ServerRun) -> list[ServedFinding]:
    """A finding if some servers behind the address report steps of their answers and others do not."""
    without = sum(not answer.output.acceptance_lengths for answer in run.answers)
    if not run.lists_steps or without < MIN_SHARE * len(run.answers):
        return []
    return [_unlike(f"{without} of {plural(len(run.answers), 'answer')} report no verify step")]


def _unlike(seen: str) -> ServedFinding:
    return ServedFinding(
        id="unlike-replicas",
        severity="warning",
        seen=seen,
        follows="the servers behind this address were started with different settings, so users get different speed or "
        "different answers by chance",
        next="start all servers with the same options and releases; probe each at its own address",
    )


def _difference(first: ServerFacts, second: ServerFacts) -> str:
    names = [name for name in ServerFacts.__slots__ if getattr(first, name) != getattr(second, name)]
    return ", ".join(f"{name.replace('_', ' ')} {getattr(first, name)} and {getattr(second, name)}" for name in names)
