"""The result of a validation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        return {
            "draft": str(self.path),
            "dialect": self.dialect,
            "target": self.target,
            "engines": [str(engine) for engine in self.engines],
            "level": self.level,
            "num_rules": self.num_rules,
            "num_errors": self.count("error"),
            "num_warnings": self.count("warning"),
            "findings": [finding.to_json() for finding in self.findings],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "search": None,
            "notes": list(self.notes),
        }
