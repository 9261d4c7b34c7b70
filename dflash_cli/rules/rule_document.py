"""The JSON documents of `dflash explain`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.rules.rule import GENERIC_WORDS, Rule, RuleLevel, Severity, fill
from dflash_runtime.documents import INLINE, copy_fields


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
        return copy_fields(cls, rule, engines=tuple(rule.engines), fix=fill(rule.fix, GENERIC_WORDS))


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
