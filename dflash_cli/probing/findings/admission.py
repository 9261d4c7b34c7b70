"""Requests that the server refuses because others run or wait: statuses 429 and 503, and its own declared limits."""

from collections.abc import Iterator, Mapping

from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.phrases import plural


@rule("admission")
def find_refusals(evidence: Evidence) -> Iterator[ServedFinding]:
    """At most one finding: refusals that were seen, or a limit below the number of requests that were asked for."""
    facts, runs, concurrencies = evidence.facts, evidence.runs, evidence.concurrencies
    limit = _limit_text(facts)
    for run in runs:
        if run.concurrency > 1 and run.refusals:
            alone = next((item for item in runs if item.concurrency == 1), None)
            beside = f"; {alone.name} none" if alone is not None and not alone.refusals else ""
            yield ServedFinding(
                id="requests-refused",
                severity="warning",
                seen=f"{run.name}: the server refused {_statuses(run.refusals)}, and "
                f"{plural(len(run.failed), 'prompt')} of {len(run.failed) + len(run.answers)} got no answer after all "
                f"retries{beside}{limit}",
                follows=f"the server, or a gateway before it, admits fewer than {run.concurrency} requests at a time: "
                "a limit of its queue or of its rate. Figures of this run are of the other prompts",
                next="raise the limit of queued requests or of the rate, or let clients wait and repeat; look for both "
                "in the options of the server and of the gateway",
            )
            return
    if facts.max_queued is None or facts.max_concurrency is None:
        return
    most = facts.max_concurrency + facts.max_queued
    is_passed = max(concurrencies) > most
    yield ServedFinding(
        id="requests-refused" if is_passed else "queue-limited",
        severity="warning" if is_passed else "info",
        seen=f"the server's settings allow {plural(facts.max_concurrency, 'running request')} and {facts.max_queued} "
        f"in the queue; {max(concurrencies)} at a time were asked for",
        follows=f"more than {most} requests at a time are refused, with status 503 or 429"
        + (f". The probe itself kept to {facts.max_concurrency} at a time" if is_passed else ""),
        next="raise --max-queued-requests and --max-running-requests (SGLang), or let clients wait and repeat",
    )


def _statuses(refusals: Mapping[int, int]) -> str:
    """`3 requests with status 503`."""
    return " and ".join(f"{plural(number, 'request')} with status {status}" for status, number in refusals.items())


def _limit_text(facts: ServerFacts) -> str:
    if facts.max_queued is None:
        return ""
    running = "" if facts.max_concurrency is None else f"{plural(facts.max_concurrency, 'running request')} and "
    return f"; its settings allow {running}{facts.max_queued} in the queue"
