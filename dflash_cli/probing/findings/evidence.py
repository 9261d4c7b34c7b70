"""The measurements of a probe, and the table of rules that read them.

Each file of this folder has the rules of one class of findings. A rule is a function with `@rule(subject)` that yields
findings. Findings that need requests of their own come from questions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.served.token_equality import TokenEquality
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.probing.findings"
Subject = Literal["address", "drafting", "answers", "load", "counters", "waiting", "settings", "admission"]
SUBJECTS = get_args(Subject)
"""The order of findings of one severity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The measurements from which findings and the cause follow.

    runs               the server's runs, one for each concurrency
    loads              each later run, compared with the first
    yardsticks         the local result and the run of another server, compared with the first run
    known_faults       findings of rules about the checkpoint on this engine and release
    minimum            the lowest acceptance length the user accepts, if given
    drafts_every_step  whether a sound server of this engine drafts in every step
    concurrencies      the numbers of requests that were asked for
    identity           findings about the process behind the address
    """

    facts: ServerFacts
    runs: Sequence[ServerRun]
    loads: Sequence[Comparison] = ()
    yardsticks: Sequence[Comparison] = ()
    equalities: Sequence[TokenEquality] = ()
    yardstick_equalities: Sequence[TokenEquality] = ()
    known_faults: Sequence[str] = ()
    minimum: float | None = None
    drafts_every_step: bool = True
    concurrencies: Sequence[int] = ()
    identity: Sequence[ServedFinding] = ()


Find = Callable[[Evidence], Iterator[ServedFinding]]
RULES: Registry[tuple[Subject, Find]] = Registry("rule of a probe")


def rule(subject: Subject) -> Callable[[Find], Find]:
    """A decorator that registers a function as a rule about a subject."""

    def decorate(find: Find) -> Find:
        RULES.register(f"{find.__module__}.{find.__name__}")((subject, find))
        return find

    return decorate


def find_all(evidence: Evidence) -> Iterator[ServedFinding]:
    """The findings of all rules: by subject, in each subject by file, in each file by line."""
    RULES.discover(PACKAGE)
    for _, find in sorted(RULES.values(), key=lambda item: (SUBJECTS.index(item[0]), item[1].__module__)):
        yield from find(evidence)
