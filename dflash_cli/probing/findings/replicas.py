"""Find several servers behind one address, a server that started anew, and requests of other clients."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from dflash_cli.probing.counters.process_identity import identify, rises_alone
from dflash_cli.probing.counters.server_counters import ServerMetrics
from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.phrases import plural

MIN_SHARE = 0.1
"""Answers without steps, as a share, that a single short answer does not explain."""
WHO = "several servers answer at this address, or several workers of one server, and each counts its own requests"
REMEDY = (
    ". If one server has several workers behind one /metrics (--api-server-count of vLLM), set "
    "PROMETHEUS_MULTIPROC_DIR to an empty directory, so that they count together"
)
FOREIGN = ServedFinding(
    id="foreign-traffic",
    severity="warning",
    seen="counters rose before the first request",
    follows="other clients use the server: figures from counters include their requests",
    next="repeat the probe without other clients, or start the server so that answers report their steps",
)
RESTARTED = ServedFinding(
    id="counters-reset",
    severity="warning",
    seen="the server's counters fell during the probe",
    follows="the server or an engine of it started anew; counters from before and after do not add up",
    next="look in the server's log for a restart, and repeat the probe",
)


def find_identity(
    looks: Sequence[ServerFacts], readings: Sequence[ServerMetrics], num_before: int
) -> list[ServedFinding]:
    """Findings about the process behind the address. The first `num_before` readings came before any request."""
    unlike = next(((first, item) for first, item in pairwise(looks) if first != item), None)
    identity = identify(readings)
    if unlike is not None and len(looks) > len(set(looks)):
        seen = f"descriptions of the server alternate: {_difference(*unlike)}"
        return [_several(seen, "several servers answer at this address", ""), _unlike(seen)]
    if identity == "several":
        seen = f"{len(readings)} readings of the counters fall and come back, or alternate between starts"
        return [_several(seen, WHO, REMEDY)]
    if identity == "restarted":
        return [RESTARTED]
    return [FOREIGN] if rises_alone(readings[:num_before]) else []


@rule("address")
def find_replicas(evidence: Evidence) -> Iterator[ServedFinding]:
    """The findings about the process. Of several servers, some may report steps of their answers and others not."""
    yield from evidence.identity
    run = evidence.runs[0]
    without = sum(not answer.output.acceptance_lengths for answer in run.answers)
    is_several = any(item.id == "several-replicas" for item in evidence.identity)
    if is_several and run.lists_steps and without >= MIN_SHARE * len(run.answers):
        yield _unlike(f"{without} of {plural(len(run.answers), 'answer')} report no verify step")


def _several(seen: str, who: str, remedy: str) -> ServedFinding:
    return ServedFinding(
        id="several-replicas",
        severity="warning",
        seen=seen,
        follows=f"{who}; figures from counters are of no use",
        next=f"probe each server at its own address{remedy}",
    )


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
