"""The report of the run level, and the JSON document of `dflash validate --level run`."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.diagnosis.reading_results import ReadingSearch
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
