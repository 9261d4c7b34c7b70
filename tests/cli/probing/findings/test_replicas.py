"""One server, a restart and several servers, told apart by readings of their metrics."""

from dflash_cli.probing.counters.server_counters import ServerCounters, ServerMetrics
from dflash_cli.probing.findings.replicas import find_identity
from dflash_cli.probing.servers.server_facts import ServerFacts

WORKERS = "PROMETHEUS_MULTIPROC_DIR"


def read(num_tokens: int, started_s: float | None = None) -> ServerMetrics:
    return ServerMetrics(counters=ServerCounters(num_drafts=0, num_tokens=num_tokens), started_s=started_s)


def test_descriptions_that_alternate_are_of_several_servers() -> None:
    first, second = (ServerFacts(engine="vllm", release=name, model="m", is_drafting=True) for name in ("1.0", "2.0"))
    several, unlike = find_identity([first, second, first], [], 0)
    assert (several.id, unlike.id) == ("several-replicas", "unlike-replicas")
    assert "1.0 and 2.0" in unlike.seen
    assert WORKERS not in several.next
    assert find_identity([first, first], [], 0) == []


def test_counters_that_alternate_may_be_of_several_workers_of_one_server() -> None:
    (several,) = find_identity([], [read(50), read(9), read(60), read(12), read(70)], 0)
    assert several.id == "several-replicas"
    assert WORKERS in several.next


def test_counters_that_rise_before_the_first_request_are_of_other_clients() -> None:
    (found,) = find_identity([], [read(5), read(9)], 2)
    assert found.id == "foreign-traffic"
    assert find_identity([], [read(5), read(9)], 1) == []
