"""The JSON documents of `dflash validate` and `dflash explain`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dflash_cli.rules.rule import GENERIC_WORDS, Finding, Rule, RuleLevel, Severity, fill
from dflash_cli.rules.verdict import Verdict
from dflash_runtime.documents import INLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictEntry:
    """How one engine serves the draft."""

    engine: str
    outcome: str
    reasons: Annotated[tuple[str, ...], "ids of rules"]
    causal: Annotated[tuple[bool, ...] | None, "causality of each layer as served; null if it is not known"]
    text: str

    @classmethod
    def of(cls, verdict: Verdict) -> "VerdictEntry":
        """The entry of a verdict."""
        return cls(
            engine=str(verdict.engine),
            outcome=verdict.outcome,
            reasons=verdict.reasons,
            causal=verdict.causal,
            text=verdict.text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """Every finding about a draft, worst first."""

    draft: str
    dialect: str | None
    target: str | None
    engines: tuple[str, ...]
    level: Literal["headers", "weights", "run"]
    num_rules: Annotated[int, "rules that were checked"]
    num_errors: int
    num_warnings: int
    findings: tuple[Finding, ...]
    verdicts: tuple[VerdictEntry, ...]
    search: None = None
    notes: tuple[str, ...]


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

    report: Annotated[ReportEntry, INLINE]
    passed: bool
    repaired: Annotated[RepairEntry | None, "the copy of --fix-out; null if nothing was written"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """What a rule checks, and why."""

    id: str
    title: str
    severity: Severity
    engines: tuple[str, ...]
    level: RuleLevel
    theme: str
    effect: str
    fix: str
    source: str
    text: str

    @classmethod
    def of(cls, rule: Rule) -> "RuleEntry":
        """The entry of a rule."""
        return cls(
            id=rule.id,
            title=rule.title,
            severity=rule.severity,
            engines=rule.engines,
            level=rule.level,
            theme=rule.theme,
            effect=rule.effect,
            fix=fill(rule.fix, GENERIC_WORDS),
            source=rule.source,
            text=rule.text,
        )


@dataclass(frozen=True, slots=True)
class ExplainDocument:
    """Result of `dflash explain ID`."""

    KIND: ClassVar[str] = "explain"

    rule: Annotated[RuleEntry, INLINE]


@dataclass(frozen=True, slots=True)
class RuleListDocument:
    """Result of `dflash explain` without a rule."""

    KIND: ClassVar[str] = "explain"

    rules: tuple[RuleEntry, ...]
