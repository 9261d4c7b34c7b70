"""Check a draft, alone or against a target: every finding at once, from JSON and headers alone by default."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.validation.report import Report
from dflash_cli.validation.rule import LEVELS, SEVERITIES, Finding, Level, Rule, all_rules
from dflash_cli.validation.run_settings import RunSettings
from dflash_cli.validation.subject import CONFIG_FILE, NamedEngine, Subject, open_subject
from dflash_cli.validation.verdict import judge
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.checkpoints.references import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRequest:
    """What to check: a draft, and the target and engines to check it against. References are what the user typed."""

    draft: "Location"
    draft_reference: str | None = None
    target: "Location | None" = None
    target_reference: str | None = None
    engines: Sequence[NamedEngine] = ()
    level: Level = "headers"
    ignored: Collection[str] = ()
    num_speculative_tokens: int | None = None
    run: RunSettings | None = None


def validate_draft(request: ValidationRequest) -> Report:
    """Run every rule of the level.

    Raises:
        CheckpointNotFound: the draft or the target is not there.
        CheckpointError, UnsupportedError: the target, not the draft, cannot be read.
        UsageError: the run level without a target.
    """
    return validate_subject(open_requested(request), request)


def open_requested(request: ValidationRequest) -> Subject:
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


def validate_subject(subject: Subject, request: ValidationRequest) -> Report:
    """`validate_draft`, on a subject that is open."""
    if request.level == "run":
        _refuse_to_run(subject, request)
    findings, num_rules = _run_levels(subject, "weights" if request.level == "run" else request.level)
    notes: tuple[str, ...] = ()
    if request.run is not None and request.level == "run":
        notes = _reasons_not_to_run(subject, findings)
        if not notes:
            subject, notes = _with_readings(subject, request.run)
            chosen = _rules_of("run")
            findings += _run(chosen, subject)
            num_rules += len(chosen)
    findings = [item for item in _drop_explained(findings) if item.id not in request.ignored]
    findings.sort(key=lambda item: (SEVERITIES.index(item.severity), item.id, item.location))
    return Report(
        path=subject.path,
        dialect=subject.dialect,
        target=subject.target_reference,
        engines=tuple(subject.engines),
        level=request.level,
        findings=tuple(findings),
        num_rules=num_rules,
        verdicts=judge(subject, findings),
        search=subject.search,
        notes=notes,
    )


def _refuse_to_run(subject: Subject, request: ValidationRequest) -> None:
    """Refuse the run level where no target is given, or one that this tool does not run.

    Raises:
        UsageError, UnsupportedError, InvalidConfig: see above and `find_target_runtime`.
    """
    if subject.target_source is None or request.run is None:
        raise UsageError("--level run needs a target", hint="add --target TARGET")
    from dflash_runtime.models.target import find_target_runtime

    find_target_runtime(subject.target_source, request.run.config.wanted_runtime)


def _run_levels(subject: Subject, last: Level) -> tuple[list[Finding], int]:
    """Findings up to a level that reads headers or weights, and how many rules ran.

    Without a config nothing more can be said, and a checkpoint of another kind is held to no other rule.
    """
    on_files = [rule for rule in all_rules() if rule.stage == "files"]
    findings = _run(on_files, subject)
    if subject.config_error is not None:
        return findings, len(on_files)
    on_identity = [rule for rule in all_rules() if rule.stage == "identity"]
    found = _run(on_identity, subject)
    num_rules = len(on_files) + len(on_identity)
    if found:
        return found, num_rules
    levels = [level for level in LEVELS[: LEVELS.index(last) + 1] if level == "headers" or subject.tensors is not None]
    chosen = [rule for level in levels for rule in _rules_of(level)]
    return findings + _run(chosen, subject), num_rules + len(chosen)


def _rules_of(level: Level) -> list[Rule]:
    """The rules of one level that have no stage of their own."""
    return [rule for rule in all_rules() if rule.level == level and rule.stage in ("rest", "unexplained")]


def _run(rules: Sequence[Rule], subject: Subject) -> list[Finding]:
    return [finding for rule in rules for finding in rule.findings(subject)]


def _drop_explained(findings: list[Finding]) -> list[Finding]:
    """Leave out that the config cannot be read where another error already says what is wrong with it."""
    is_explained = any(
        item.severity == "error" and item.location.startswith(CONFIG_FILE) and item.stage != "unexplained"
        for item in findings
    )
    return [item for item in findings if item.stage != "unexplained" or not is_explained]


def _reasons_not_to_run(subject: Subject, findings: list[Finding]) -> tuple[str, ...]:
    """A note where what was found keeps the pair from running; engines' rules concern only the engines."""
    errors = [item for item in findings if item.severity == "error" and not item.engines]
    errors += [item for item in findings if item.engines and item.stops_runtime]  # read here as those engines do
    is_stopped = any(item.stops_runtime or item.outcome == "stops" for item in errors)
    if subject.checkpoint is not None and subject.is_served and not is_stopped:
        return ()
    return (
        f"the pair was not run, because of errors that stop it ({', '.join(sorted({item.id for item in errors}))})",
    )


def _with_readings(subject: Subject, settings: RunSettings) -> tuple[Subject, tuple[str, ...]]:
    """The subject with how each alternative reading of its config accepts, and notes: on each prompt left out, and on
    the pair.
    """
    from dflash_cli.validation.readings import search_readings

    assert subject.checkpoint is not None
    assert subject.target_source is not None
    found = search_readings(
        open_draft(subject.checkpoint),
        subject.target_source,
        settings.prompts(),
        config=settings.config,
        budget=settings.budget,
        observe=settings.observe,
    )
    return replace(subject, search=found), (*(f"left out: {reason}" for reason in found.left_out), *found.warnings)
