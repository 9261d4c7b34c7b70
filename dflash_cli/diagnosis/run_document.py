"""The JSON documents of `dflash validate --level run` and `dflash diagnose`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.diagnosis.readings import ReadingResult, ReadingSearch
from dflash_cli.rules.report_document import ReportEntry, ValidateDocument
from dflash_runtime.documents import INLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingEntry:
    """How the draft accepts under another reading of its config."""

    factor: str
    reading: str
    acceptance_len: float
    difference: float
    interval: Annotated[Interval | None, "of the difference, on new prompts"]
    num_prompts: int
    is_estimate: bool
    explains: bool

    @classmethod
    def of(cls, result: ReadingResult) -> "ReadingEntry":
        """The entry of a result."""
        return cls(
            factor=result.reading.factor,
            reading=result.reading.name,
            acceptance_len=result.acceptance_len,
            difference=result.difference,
            interval=result.interval,
            num_prompts=result.num_prompts,
            is_estimate=not result.num_prompts,
            explains=result.explains,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEntry:
    """The readings that were tried, and how the draft accepts as its config is."""

    num_prompts: int
    num_tokens: int
    acceptance_len: Annotated[float, "with the config as it is"]
    num_readings: int
    left_out: tuple[str, ...]
    target_runtime: str
    target_quantization: Annotated[str | None, "how the target's weights are packed"]
    readings: tuple[ReadingEntry, ...]

    @classmethod
    def of(cls, search: ReadingSearch) -> "SearchEntry":
        """The entry of a search."""
        return cls(
            num_prompts=search.num_prompts,
            num_tokens=search.num_tokens,
            acceptance_len=search.acceptance_len,
            num_readings=search.num_readings,
            left_out=search.left_out,
            target_runtime=search.target_runtime,
            target_quantization=search.target_quantization,
            readings=tuple(map(ReadingEntry.of, search.results)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReportEntry(ReportEntry):
    """Every finding about a draft, worst first, and the readings that were tried."""

    search: SearchEntry | None = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValidateDocument(ValidateDocument):
    """Result of `dflash validate --level run`."""

    report: Annotated[RunReportEntry, INLINE]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseDocument:
    """Result of `dflash diagnose`."""

    KIND: ClassVar[str] = "diagnose"

    has_cause: bool
    sentence: str
    next: str | None
    rule: str | None
    report: RunReportEntry
