"""The run level of validation: rules on headers and weights, then runs of the pair under several readings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.diagnosis.diagnosis_options import DiagnosisOptions
from dflash_cli.diagnosis.reading_results import ReadingSearch
from dflash_cli.diagnosis.readings import search_readings
from dflash_cli.diagnosis.run_level import RunSubject
from dflash_cli.diagnosis.run_report import RunReport
from dflash_cli.diagnosis.run_settings import RunSettings, run_settings
from dflash_cli.rules.rule import Finding, rules_of
from dflash_cli.rules.subject import Subject, ValidationPlan, open_subject
from dflash_cli.rules.validator import apply_rules, find_up_to, report_of
from dflash_runtime.device.setup.early_refusals import refuse_early
from dflash_runtime.documents import copy_fields
from dflash_runtime.errors import UsageError


def validate_running(plan: ValidationPlan, settings: RunSettings) -> RunReport:
    """Apply the rules on headers and weights, run the pair, and apply the rules on its acceptance.

    Raises:
        UsageError: the target is missing.
        CheckpointNotFound, CheckpointError: the draft or the target is absent, or the target cannot be read.
        UnsupportedError: dflash does not run the target.
    """
    subject = open_subject(plan)
    if subject.target_source is None:
        raise UsageError(
            "--level run needs a target", id="run-without-target", field="--target", hint="add --target TARGET"
        )
    from dflash_runtime.models.target_loading import find_target_runtime

    find_target_runtime(subject.target_source, settings.config.wanted_runtime)
    findings, checked = find_up_to(subject, "weights")
    search, notes = None, _reasons_not_to_run(subject, findings)
    if not notes:
        search = _search(subject, settings)
        notes = (*(f"left out: {reason}" for reason in search.left_out), *search.warnings)
        rules = rules_of("run")
        findings = findings + apply_rules(rules, copy_fields(RunSubject, subject, search=search))
        checked = [*checked, *rules]
    report = report_of(subject, findings, checked)
    return copy_fields(RunReport, report, level="run", notes=notes, search=search)


def run_validation(request: DiagnosisOptions, plan: ValidationPlan) -> RunReport:
    """The report of the run level, with progress.

    Raises:
        UsageError: there are too few prompts.
        CheckpointNotFound, CheckpointError, UnsupportedError: the target or a file of prompts cannot be read.
    """
    from dflash_cli.diagnosis.reading_progress import ReadingProgress
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.threads import use_threads

    assert isinstance(plan.target, Path)
    parts = [open_checkpoint(plan.target), open_checkpoint(plan.draft)]
    target, settings = open_target(parts[0]), run_settings(plan.target, request)
    refuse_early(target, None, settings.config)  # rules report the faults of a draft
    announce_loading({"draft": plan.draft_reference, "target": plan.target_reference}, device=request.device)
    use_threads(request.threads, request.device, parts)
    with ReadingProgress() as progress:
        return validate_running(plan, replace(settings, observe=progress))


def _reasons_not_to_run(subject: Subject, findings: Sequence[Finding]) -> tuple[str, ...]:
    """A note if errors stop the pair from running. An error of one engine counts if it also stops this runtime."""
    errors = [item for item in findings if item.severity == "error" and not item.engines]
    errors += [item for item in findings if item.engines and item.stops_runtime]
    is_stopped = any(item.stops_runtime or item.outcome == "stops" for item in errors)
    if subject.checkpoint is not None and subject.is_served and not is_stopped:
        return ()
    return (f"the pair was not run because of errors ({', '.join(sorted({item.id for item in errors}))})",)


def _search(subject: Subject, settings: RunSettings) -> ReadingSearch:
    """The acceptance of the pair under each reading of the draft."""
    assert subject.checkpoint is not None
    assert subject.target_source is not None
    draft = open_draft(subject.checkpoint)
    assumed = replace(draft, parsed=replace(draft.parsed, has_unknown_layout=False))
    return search_readings(assumed, subject.target_source, settings.prompts, settings=settings)
