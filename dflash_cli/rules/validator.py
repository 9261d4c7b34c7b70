"""Run the rules on a draft, alone or with its target. By default they read only JSON and headers."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import LEVELS, SEVERITIES, Finding, Level, Rule, Stage, rules_of
from dflash_cli.rules.subject import CONFIG_FILE, Subject, ValidationPlan, open_subject
from dflash_cli.rules.verdict import judge

logger = logging.getLogger(__name__)


def validate_draft(plan: ValidationPlan) -> Report:
    """The report of every rule up to the level.

    Raises:
        CheckpointNotFound: the draft or the target is absent.
        CheckpointError, UnsupportedError: the target cannot be read.
    """
    return validate_subject(open_subject(plan))


def validate_subject(subject: Subject) -> Report:
    """`validate_draft` of an open subject."""
    return report_of(subject, *find_up_to(subject, subject.plan.level))


def report_of(subject: Subject, findings: Sequence[Finding], rules: Sequence[Rule]) -> Report:
    """The report on the findings of rules, without explained and ignored findings. Each engine has a verdict."""
    plan = subject.plan
    named = ", ".join(map(str, plan.engines)) or "no engine is named"
    logger.info("checked %d rules at the level %s; %s", len(rules), plan.level, named)
    kept = [item for item in _drop_explained(findings) if item.id not in plan.ignored]
    kept.sort(key=lambda item: (SEVERITIES.index(item.severity), item.id, item.location))
    return Report(
        draft=str(subject.path),
        dialect=subject.dialect,
        target=plan.target_reference,
        engines=tuple(map(str, plan.engines)),
        level=plan.level,
        findings=tuple(replace(item, location=subject.in_file(item.location)) for item in kept),
        num_rules=len(rules),
        checked=tuple(rule for rule in rules if rule.id not in plan.ignored),
        verdicts=judge(subject, kept),
    )


def find_up_to(subject: Subject, last: Level) -> tuple[list[Finding], list[Rule]]:
    """The findings up to the level headers or weights, and the rules that ran.

    Without a config only the rules on files run, for a draft of another kind only those on identity and on its kind.
    """
    on_files, on_identity = _rules_of("headers", "files"), _rules_of("headers", "identity")
    findings = apply_rules(on_files, subject)
    if subject.config_error is not None:
        return findings, on_files
    found = apply_rules(on_identity, subject)
    first = on_files + on_identity
    if found:
        on_kind = _rules_of("headers", "kind") if subject.kind_reading is not None else []
        return found + apply_rules(on_kind, subject), first + on_kind
    levels = [level for level in LEVELS[: LEVELS.index(last) + 1] if level == "headers" or subject.tensors is not None]
    chosen = [rule for level in levels for rule in _rules_of(level, "rest", "unexplained")]
    return findings + apply_rules(chosen, subject), first + chosen


def _rules_of(level: Level, *stages: Stage) -> list[Rule]:
    return [rule for rule in rules_of(level) if rule.stage in stages]


def apply_rules(rules: Sequence[Rule], subject: Subject) -> list[Finding]:
    return [finding for rule in rules for finding in rule.findings(subject)]


def _drop_explained(findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings of stage `unexplained` if another rule reports an error in the config.

    If the finding is about an engine, the error must have the same outcome for that engine.
    """
    errors = [
        item
        for item in findings
        if item.severity == "error"
        and item.location.startswith(CONFIG_FILE)
        and item.stage != "unexplained"
        and not item.is_about_start
    ]
    return [item for item in findings if item.stage != "unexplained" or not any(_explains(by, item) for by in errors)]


def _explains(error: Finding, item: Finding) -> bool:
    return not item.engines or (error.outcome == item.outcome and all(map(error.concerns, item.engines)))
