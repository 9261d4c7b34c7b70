"""The report of the run level, and the JSON documents of `dflash validate --level run` and `dflash diagnose`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.diagnosis.readings import ReadingSearch
from dflash_cli.rules.report import Report, ValidateDocument
from dflash_runtime.documents import INLINE


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport(Report):
    """Every finding about a draft, worst first, and the readings that were tried.

    If errors stop the pair from running, `search` is None and `notes` name the rules.
    """

    search: ReadingSearch | None = None  # type: ignore[assignment]

    @property
    def document(self) -> "RunValidateDocument":
        return RunValidateDocument(report=self, passed=not self.fails())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValidateDocument(ValidateDocument):
    """Result of `dflash validate --level run`."""

    report: Annotated[RunReport, INLINE]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseDocument:
    """Result of `dflash diagnose`."""

    KIND: ClassVar[str] = "diagnose"

    has_cause: bool
    sentence: str
    next: str | None
    rule: str | None
    report: RunReport
