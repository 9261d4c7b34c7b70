"""The result of `dflash probe`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.comparing.comparison_report import ComparisonEntry, compared_results
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.probing.asking.question import QuestionReport
from dflash_cli.probing.findings.attribution import Attribution
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.served.token_equality import TokenEquality
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_cli.terminal.shown import Shown
from dflash_runtime.documents import HIDDEN, NOT_REQUIRED, computed_key
from dflash_runtime.notices import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherServer:
    """The other server that a probe asked, and its run."""

    server: ServerFacts
    run: ServerRun


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Probed(Shown):
    """Result of `dflash probe`."""

    KIND: ClassVar[str] = "probe"

    url: str
    server: ServerFacts
    runs: Annotated[tuple[ServerRun, ...], "one for each concurrency"]
    beside: Annotated[OtherServer | None, "the other server"] = None
    equalities: tuple[TokenEquality, ...] = ()
    questions: Annotated[tuple[QuestionReport, ...], NOT_REQUIRED, "what was asked beside the prompts"] = ()
    findings: Annotated[tuple[ServedFinding, ...], NOT_REQUIRED, "faults and facts, errors first"] = ()
    known_faults: Annotated[tuple[str, ...], "rules that find a fault of the draft on this engine, with --draft"] = ()
    attribution: Attribution
    prompts: PromptSource
    notes: tuple[Notice, ...] = ()
    definition: Annotated[str, HIDDEN]
    loads: Annotated[tuple[Comparison, ...], HIDDEN] = ()
    yardsticks: Annotated[tuple[Comparison, ...], HIDDEN] = ()

    def summary(self) -> list[str]:
        lengths = [
            f"{run.name}: acceptance length {run.total.counts.acceptance_len or float('nan'):.3f}" for run in self.runs
        ]
        return [f"{self.url}: {self.server.engine}", *lengths, *self.notes]

    @property
    @computed_key
    def is_engaged(self) -> bool | None:
        """Whether a token was drafted; null if that is not known."""
        found = [run.is_engaged for run in self.runs]
        return True if True in found else None if None in found else False

    @property
    @computed_key
    def results(self) -> tuple[MeasuredResult, ...]:
        """The first run and everything that is compared with it."""
        return compared_results((*self.loads, *self.yardsticks))

    @property
    @computed_key
    def comparisons(self) -> tuple[ComparisonEntry, ...]:
        """Every further run and every yardstick, compared with the first run."""
        return tuple(map(ComparisonEntry.of, (*self.loads, *self.yardsticks)))

    @property
    def all_runs(self) -> tuple[ServerRun, ...]:
        """The server's runs, and the run of the other server."""
        return self.runs if self.beside is None else (*self.runs, self.beside.run)
