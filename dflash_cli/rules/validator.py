"""Check a draft, alone or against a target: every finding at once, from JSON and headers alone by default."""

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
    """What to check: a draft, and the target and engines to check it against. References are what the user typed."""

    draft: "Location"
    draft_reference: str | None = None
    target: "Location | None" = None
    target_reference: str | None = None
    engines: Sequence[NamedEngine] = ()
    level: Level = "headers"
    ignored: Collection[str] = ()
    num_speculative_tokens: int | None = None


def validate_draft(request: ValidationPlan) -> Report:
    """Run every rule of the level.

    Raises:
        CheckpointNotFound: the draft or the target is not there.
        CheckpointError, UnsupportedError: the target, not the draft, cannot be read.
    """
    return validate_subject(open_requested(request), request)


def open_requested(request: ValidationPlan) -> Subject:
    """Open the draft that a request names, with its target and engines.

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
    """`validate_draft`, on a subject that is open."""
    findings, num_rules = find_up_to(subject, request.level)
    return report_of(subject, request, findings, num_rules)


def report_of(subject: Subject, request: ValidationPlan, findings: Sequence[Finding], num_rules: int) -> Report:
    """The report on findings: explained and ignored ones left out, the worst first, with a verdict for each engine."""
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
    """Findings up to a level that reads headers or weights, and how many rules ran.

    Without a config nothing more can be said, and a checkpoint of another kind is held to no other rule.
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
    """The rules of one level that run after those on files and identity."""
    return [rule for rule in rules_of(level) if rule.stage in ("rest", "unexplained")]


def apply_rules(rules: Sequence[Rule], subject: Subject) -> list[Finding]:
    return [finding for rule in rules for finding in rule.findings(subject)]


def _drop_explained(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out that the config cannot be read where another error already says what is wrong with it."""
    is_explained = any(
        item.severity == "error" and item.location.startswith(CONFIG_FILE) and item.stage != "unexplained"
        for item in findings
    )
    return [item for item in findings if item.stage != "unexplained" or not is_explained]
