"""The result of a validation."""

from dataclasses import dataclass
from pathlib import Path

from dflash_cli.rules.report_document import ReportEntry, ValidateDocument, VerdictEntry
from dflash_cli.rules.rule import Finding, Level, Severity
from dflash_cli.rules.subject import NamedEngine
from dflash_cli.rules.verdict import Verdict
from dflash_cli.terminal.shown import Shown, Table


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Shown):
    """Findings, worst first. `num_rules` counts the rules that ran, and `notes` say which checks could not run."""

    path: Path
    dialect: str | None
    target: str | None
    engines: tuple[NamedEngine, ...]
    level: Level
    findings: tuple[Finding, ...]
    num_rules: int
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        return [f"{self.count('error')} errors, {self.count('warning')} warnings, {self.num_rules} rules checked"]

    def shown_tables(self) -> dict[str, Table]:
        rows = [(item.id, item.severity, item.location, item.message) for item in self.findings]
        return {"": (("rule", "severity", "place", "finding"), rows)} if rows else {}

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, *, strict: bool = False) -> bool:
        """Whether there is an error, or with `strict` a warning."""
        return bool(self.count("error") or (strict and self.count("warning")))

    @property
    def entry(self) -> ReportEntry:
        """The report as a part of a document."""
        return ReportEntry(
            draft=str(self.path),
            dialect=self.dialect,
            target=self.target,
            engines=tuple(map(str, self.engines)),
            level=self.level,
            num_rules=self.num_rules,
            num_errors=self.count("error"),
            num_warnings=self.count("warning"),
            findings=self.findings,
            verdicts=tuple(map(VerdictEntry.of, self.verdicts)),
            notes=self.notes,
        )

    @property
    def document(self) -> ValidateDocument:
        return ValidateDocument(report=self.entry, passed=not self.fails())
