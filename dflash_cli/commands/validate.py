"""`dflash validate`: check a draft, its fit with the target, and which engines can serve it."""

import shutil
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.pair_references import PairReferences, complete_pair
from dflash_cli.checkpoints.references import Location, find_checkpoint, is_bundled, open_checkpoint
from dflash_cli.commands.inspect import tell_traffic
from dflash_cli.commands.lock import check_lock
from dflash_cli.diagnosis.diagnosis_options import DiagnosisOptions
from dflash_cli.engines.engine_names import check_tensor_parallel, known_engines, parse_engines
from dflash_cli.rules.findings_files import FindingsFile
from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import Finding, Level, ignored_ids
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_cli.terminal import console
from dflash_cli.terminal.options import (
    DraftOptions,
    FindingsFileOptions,
    LockOptions,
    RuleOptions,
    ServedOptions,
    TargetOptions,
    refuse_beside,
)
from dflash_cli.terminal.parameters import ESSENTIALS, Option
from dflash_cli.terminal.requests import parameters_of, verb
from dflash_cli.terminal.tables import print_table
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, FileUnreadable, UnsupportedError, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.conversion.repair import Repaired
    from dflash_cli.diagnosis.reading_results import ReadingSearch

FAILED = 3
INDENT = "    "
WIDEST = 100
SHOWN_READINGS = 8
"""The alternative readings that are printed, the best first; --json has all."""
OF_RUNS = tuple(item.name for item in parameters_of(DiagnosisOptions))
"""The fields that only the run level uses."""


@dataclass(frozen=True, kw_only=True)
class ValidationRequest(
    DiagnosisOptions, FindingsFileOptions, LockOptions, ServedOptions, RuleOptions, TargetOptions, DraftOptions
):
    """Check a draft, alone or with its target.

    Exits with 3 if the draft has an error, and with 5 if the checkpoint is not a DFlash draft.
    """

    engine: Annotated[
        tuple[str, ...],
        Option(
            short="-e", metavar="NAME[@RELEASE],...", group=ESSENTIALS,
            help=f"Engines that must be able to serve the draft: {known_engines()}.",
        ),
    ] = ()  # fmt: skip
    level: Annotated[
        Level,
        Option(
            group=ESSENTIALS,
            help="headers: read configs and tensor headers. weights: also read every weight. run: also run the pair, "
            "with the draft's config as it is and with one setting changed at a time.",
        ),
    ] = "headers"
    fix_out: Annotated[
        Path | None,
        Option(
            is_per_run=True, metavar="DIR", group=ESSENTIALS, is_setting=False,
            help="Write a corrected copy to DIR, and list what could not be corrected.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.level != "run":
            refuse_beside(self, OF_RUNS, f"--level {self.level}: only --level run generates")
        check_tensor_parallel(parse_engines(",".join(self.engine)), self.tensor_parallel)


@verb(ValidationRequest)
def validate(request: ValidationRequest) -> Report:
    """Check a draft, and return every finding.

    `Report.fails()` says whether the draft fails, `Report.fails(strict=True)` whether warnings count too.

    Raises:
        CheckpointNotFound: the draft or the target is absent.
        CheckpointError, UnsupportedError: the target cannot be read or run.
        UsageError: the run level without a target, an unknown engine or an unknown rule.
    """
    return _validate(request)[1]


def command(request: ValidationRequest) -> None:
    """Check, correct and print."""
    file = FindingsFile.of(request, f"dflash validate {request.draft}")
    if request.fix_out is not None:
        from dflash_cli.conversion.destination import check_destination

        check_destination(request.fix_out, force=request.force)
    plan, report, pair = _validate(request)
    fails = report.fails(strict=request.strict)
    document = replace(report.document, passed=not fails)
    file.write(report, report.path.joinpath, strict=request.strict)
    if file.leaves_text:
        name = request.draft if is_bundled(request.draft) else report.draft
        _print(report, name, is_target_missing=pair.target is None)
    if request.fix_out is not None:
        from dflash_cli.conversion.repair import repair_draft

        repaired = repair_draft(plan, report, request.fix_out, force=request.force)
        document = replace(document, repaired=repaired.entry if repaired else None)
        fails = (repaired.after if repaired else report).fails(strict=request.strict)
        if file.leaves_text:
            _print_repaired(request.fix_out, repaired, report)
    if console.is_json():
        console.result_json(document)
    if fails:
        is_other_kind = any(item.stage == "identity" and item.severity == "error" for item in report.findings)
        raise typer.Exit(UnsupportedError.exit_code if is_other_kind else FAILED)


def _validate(request: ValidationRequest) -> "tuple[ValidationPlan, Report, PairReferences[Location]]":
    """The plan, the report and the references of the checked pair."""
    pair, location, target_location = _find_pair(
        request.draft, request.target, request.level, needs_weights=request.fix_out is not None
    )
    check_lock(request.lock, {"draft": location, "target": target_location})
    plan = ValidationPlan(
        draft=location,
        draft_reference=request.draft,
        target=target_location,
        target_reference=pair.target if target_location is not None else None,
        engines=parse_engines(",".join(request.engine)),
        level="headers" if request.level == "headers" else "weights",
        ignored=ignored_ids(request.ignore),
        num_speculative_tokens=request.num_speculative_tokens,
        tensor_parallel=request.tensor_parallel,
    )
    report = validate_draft(plan) if request.level != "run" else _run(request, plan)
    tell_traffic(location, target_location)
    return plan, report, pair


def _run(request: ValidationRequest, plan: ValidationPlan) -> Report:
    """The report of the run level, with progress."""
    if not isinstance(plan.target, Path):
        raise UsageError(
            "--level run needs a target", id="run-without-target", field="--target", hint="add --target TARGET"
        )
    from dflash_cli.diagnosis.pair_validation import run_validation

    return run_validation(request, plan)


def _find_pair(
    draft: str, target: str | None, level: Level, *, needs_weights: bool
) -> "tuple[PairReferences[Location], Location, Location | None]":
    """The references of the pair, the location of its draft, and the location of its target if it can be read."""
    find = partial(find_checkpoint, needs_weights=level != "headers" or needs_weights)
    pair: PairReferences[Location] = complete_pair(draft, target, find=find)
    assert pair.draft_location is not None
    if pair.is_named_by_draft and level != "run":
        target_location, note = _find_named_target(pair)
    else:
        target_location, note = (pair.find_target(find) if pair.target is not None else None), pair.note
    if note is not None:
        console.note(note)
    return pair, pair.draft_location, target_location


def _find_named_target(pair: PairReferences[Location]) -> "tuple[Location | None, str | None]":
    """The target that the draft names, or None if its headers cannot be read, and a note for the user."""
    try:
        location = pair.find_target(find_checkpoint)
        open_target(open_checkpoint(location))
    except (CheckpointNotFound, CheckpointError, FileUnreadable, UnsupportedError, UsageError) as error:
        text = f"nothing was checked against the target that the draft names: {error.message}"
        return None, Notice(text, id="named-target-unreadable")
    return location, pair.note


def _print(report: Report, name: str, *, is_target_missing: bool) -> None:
    for finding in report.findings:
        print_finding(finding)
    search: ReadingSearch | None = getattr(report, "search", None)
    if search is not None:
        _print_search(search)
    for verdict in report.verdicts:
        console.result(verdict.text)
    against = f" against {report.target}" if report.target is not None else " without a target"
    errors, warnings = report.count("error"), report.count("warning")
    console.result(
        f"{name}: {report.dialect or 'unknown dialect'}, {report.num_rules} rules checked{against}: "
        f"{plural(errors, 'error')}, {plural(warnings, 'warning')}"
    )
    for note in report.notes:
        console.warn(note)
    if is_target_missing:
        text = "no --target given: the draft was not checked against its target"
        console.note(Notice(text, id="no-target"))


def print_finding(finding: Finding) -> None:
    """Print a finding: a line with id, severity, location and fault, a line with its effect, a line with its fix.

    Lines are wrapped on a terminal, but not in a pipe, so that grep finds whole lines. A fix is never wrapped, because
    it has a command to copy.
    """
    named = f" [{', '.join(finding.engines)}]" if finding.engines else ""
    severity = f"{finding.severity:7}"
    first, *rest = _wrapped(f"{finding.id} {severity} {finding.location}: {finding.message}{named}", "")
    before, after = f"{finding.id} ", first.removeprefix(f"{finding.id} {severity}")
    console.severity_line(before, severity, after)
    console.result(*rest)
    if finding.effect:
        console.result(*_wrapped(f"effect: {finding.effect}", INDENT))
    if finding.fix:
        console.result(f"{INDENT}fix: {console.as_typed(finding.fix)}")


def _wrapped(text: str, indent: str) -> list[str]:
    """The lines of a text on a terminal; one line in a pipe."""
    if not console.is_terminal():
        return [indent + text]
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=INDENT + indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _print_search(search: "ReadingSearch") -> None:
    rows = [("its config as it is", f"{search.acceptance_len:.2f}", "", "")]
    for item in search.readings[:SHOWN_READINGS]:
        tested = item.gain_text if item.p_value is not None else ("" if item.num_prompts else "estimated")
        rows.append((item.reading, f"{item.acceptance_len:.2f}", f"{item.difference:+.2f}", tested))
    print_table(("draft run with", "tokens", "change", "tested on new prompts"), rows)
    rest = search.num_readings - len(rows) + 1
    if rest > 0:
        console.result(f"{INDENT}and {rest} other settings, which are not better")


def _print_repaired(destination: Path, repaired: "Repaired | None", before: Report) -> None:
    """Print what was fixed, and every finding that stays."""
    if repaired is None:
        console.result(f"{destination}: not written, because nothing was fixed")
    else:
        done = ", ".join(repaired.fixed) or "nothing"
        console.result(f"{destination}: written as {repaired.dialect}; fixed: {done}")
    for finding in before.findings if repaired is None else repaired.left:
        console.result(f"{INDENT}not fixed: {finding.id} {finding.severity} {finding.location}: {finding.message}")
        console.result(f"{INDENT}{INDENT}fix: {console.as_typed(finding.fix)}")
