"""Run the rules on a draft, alone or with its target. By default they read only JSON and headers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import LEVELS, SEVERITIES, Finding, Level, Rule, rules_of
from dflash_cli.rules.subject import CONFIG_FILE, NamedEngine, Subject, open_subject
from dflash_cli.rules.verdict import judge

if TYPE_CHECKING:
    from dflash_cli.checkpoints.references import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPlan:
    """A draft to check, with a target and engines. References are the words that the user typed."""

    draft: "Location"
    draft_reference: str | None = None
    target: "Location | None" = None
    target_reference: str | None = None
    engines: Sequence[NamedEngine] = ()
    level: Level = "headers"
    ignored: Collection[str] = ()
    num_speculative_tokens: int | None = None


def validate_draft(request: ValidationPlan) -> Report:
    """The report of every rule up to the level.

    Raises:
        CheckpointNotFound: the draft or the target is absent.
        CheckpointError, UnsupportedError: the target cannot be read.
    """
    return validate_subject(open_requested(request), request)


def open_requested(request: ValidationPlan) -> Subject:
    """The draft that a request names, with its target and engines.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `validate_draft`.
    """
    return open_subject(
        request.draft,
        draft_reference=request.draft_reference,
        target=open_target(open_checkpoint(request.target)) if request.target is not None else None,
        target_reference=request.target_reference,
        engines=request.engines,
        num_speculative_tokens=request.num_speculative_tokens,
    )


def validate_subject(subject: Subject, request: ValidationPlan) -> Report:
    """`validate_draft` of an open subject."""
    findings, num_rules = find_up_to(subject, request.level)
    return report_of(subject, request, findings, num_rules)


def report_of(subject: Subject, request: ValidationPlan, findings: Sequence[Finding], num_rules: int) -> Report:
    """The report on findings, without explained and ignored findings, and with a verdict for each engine."""
    kept = [item for item in _drop_explained(findings) if item.id not in request.ignored]
    kept.sort(key=lambda item: (SEVERITIES.index(item.severity), item.id, item.location))
    return Report(
        path=subject.path,
        dialect=subject.dialect,
        target=subject.target_reference,
        engines=tuple(subject.engines),
        level=request.level,
        findings=tuple(kept),
        num_rules=num_rules,
        verdicts=judge(subject, kept),
    )


def find_up_to(subject: Subject, last: Level) -> tuple[list[Finding], int]:
    """The findings up to the level headers or weights, and the number of rules that ran.

    Without a config only the rules on files run, and for a checkpoint of another kind only those on identity.
    """
    on_files = [rule for rule in rules_of("headers") if rule.stage == "files"]
    findings = apply_rules(on_files, subject)
    if subject.config_error is not None:
        return findings, len(on_files)
    on_identity = [rule for rule in rules_of("headers") if rule.stage == "identity"]
    found = apply_rules(on_identity, subject)
    num_rules = len(on_files) + len(on_identity)
    if found:
        return found, num_rules
    levels = [level for level in LEVELS[: LEVELS.index(last) + 1] if level == "headers" or subject.tensors is not None]
    chosen = [rule for level in levels for rule in _rules_of(level)]
    return findings + apply_rules(chosen, subject), num_rules + len(chosen)


def _rules_of(level: Level) -> list[Rule]:
    """The rules of one level that run after the rules on files and identity."""
    return [rule for rule in rules_of(level) if rule.stage in ("rest", "unexplained")]


def apply_rules(rules: Sequence[Rule], subject: Subject) -> list[Finding]:
    return [finding for rule in rules for finding in rule.findings(subject)]


def _drop_explained(findings: Sequence[Finding]) -> list[Finding]:
    """Without findings of stage `unexplained` if another error says what is wrong with the config."""
    is_explained = any(
        item.severity == "error" and item.location.startswith(CONFIG_FILE) and item.stage != "unexplained"
        for item in findings
    )
    return [item for item in findings if item.stage != "unexplained" or not is_explained]
