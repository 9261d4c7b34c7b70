"""The result of a validation, and its JSON document."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from dflash_cli.rules.rule import Finding, Level, Rule, Severity
from dflash_cli.rules.verdict import Verdict
from dflash_cli.terminal.shown import Shown, Table
from dflash_runtime.documents import HIDDEN, INLINE, computed_key
from dflash_runtime.phrases import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Findings(Shown):
    """Findings, worst first. `notes` say which checks could not run."""

    num_rules: Annotated[int, "rules that were checked"]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    checked: Annotated[tuple[Rule, ...], HIDDEN] = ()

    def summary(self) -> list[str]:
        errors, warnings = plural(self.num_errors, "error"), plural(self.num_warnings, "warning")
        return [f"{errors}, {warnings}, {self.num_rules} rules checked"]

    def shown_tables(self) -> dict[str, Table]:
        rows = [(item.id, item.severity, item.location, item.message) for item in self.findings]
        return {"": (("rule", "severity", "place", "finding"), rows)} if rows else {}

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    @computed_key
    def num_errors(self) -> int:
        return self.count("error")

    @property
    @computed_key
    def num_warnings(self) -> int:
        return self.count("warning")

    def fails(self, *, strict: bool = False) -> bool:
        """Whether there is an error, or with `strict` a warning."""
        return bool(self.num_errors or (strict and self.num_warnings))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Findings):
    """Every finding about a draft, worst first."""

    draft: str
    dialect: str | None
    target: str | None
    engines: tuple[str, ...]
    level: Level
    verdicts: tuple[Verdict, ...] = ()
    search: None = None

    @property
    def path(self) -> Path:
        """The directory of the draft."""
        return Path(self.draft)

    @property
    def document(self) -> "ValidateDocument":
        return ValidateDocument(report=self, passed=not self.fails())


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairEntry:
    """A corrected copy of the draft."""

    destination: str
    dialect: str
    fixed: Annotated[tuple[str, ...], "ids of rules that the copy no longer breaks"]
    left: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateDocument:
    """Result of `dflash validate`."""

    KIND: ClassVar[str] = "validate"

    report: Annotated[Report, INLINE]
    passed: bool
    repaired: Annotated[RepairEntry | None, "the copy of --fix-out; null if nothing was written"] = None
