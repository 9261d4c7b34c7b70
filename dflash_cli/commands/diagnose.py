"""`dflash diagnose`: why few of a draft's tokens are accepted, in one sentence."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dflash_cli.diagnosis.diagnosis_options import DiagnosisOptions
from dflash_cli.terminal import console
from dflash_cli.terminal.options import DraftOptions, TargetOptions
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.shown import Shown
from dflash_runtime.errors import CheckpointError, UnknownFormat, UnsupportedError

if TYPE_CHECKING:
    from dflash_cli.diagnosis.likeliest_cause import DiagnoseDocument, Diagnosis
    from dflash_cli.diagnosis.run_report import RunReport

FOUND = 3


@dataclass(frozen=True, kw_only=True)
class DiagnosisRequest(DiagnosisOptions, TargetOptions, DraftOptions):
    """Find out why few of a draft's tokens are accepted.

    Checks headers, weights and the fit with the target, then runs the pair with the draft's config as it is and with
    one setting changed at a time. Prints one sentence with the cause and the next step; exits with 3 if it finds a
    cause, or low acceptance without one.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosed(Shown):
    """The likeliest cause, and the report behind it."""

    cause: "Diagnosis"
    report: "RunReport"

    @property
    def document(self) -> "DiagnoseDocument":
        from dflash_cli.diagnosis.likeliest_cause import DiagnoseDocument

        return DiagnoseDocument(self.cause, self.report)

    def summary(self) -> list[str]:
        return [self.cause.sentence]


@verb(DiagnosisRequest)
def diagnose(request: DiagnosisRequest) -> Diagnosed:
    """Check and run a pair, and name the likeliest cause of low acceptance.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: the draft or the target is absent or cannot be run.
        UsageError: there are too few prompts.
    """
    from dflash_cli.checkpoints.pair_references import complete_pair
    from dflash_cli.checkpoints.references import fetch_directory
    from dflash_cli.diagnosis.likeliest_cause import diagnose_report
    from dflash_cli.diagnosis.pair_validation import run_validation
    from dflash_cli.rules.subject import ValidationPlan

    pair = complete_pair(request.draft, request.target, find=fetch_directory)
    location, target_location = pair.draft_location, pair.find_target(fetch_directory)
    assert location is not None
    assert pair.target is not None
    _refuse_other_kinds(location)
    report = run_validation(
        request,
        ValidationPlan(
            draft=location,
            draft_reference=request.draft,
            target=target_location,
            target_reference=pair.target,
            level="weights",
        ),
    )
    cause = diagnose_report(report, draft=request.draft, target=pair.target)
    return Diagnosed(cause=cause, report=report)


def command(request: DiagnosisRequest) -> None:
    """Diagnose and print."""
    found = diagnose(request)
    for note in found.report.notes if found.report.search is not None else ():  # otherwise the sentence has the notes
        console.warn(note)
    console.show(found, lambda: console.result(console.as_typed(found.cause.sentence)))
    if found.cause.rule is not None:
        raise typer.Exit(FOUND)


def _refuse_other_kinds(location: Path) -> None:
    """Refuse a draft of another kind. The findings of the rules say what is wrong with a DFlash draft."""
    from dflash_cli.checkpoints.opening import open_draft

    try:
        open_draft(location)
    except UnknownFormat:
        raise
    except (CheckpointError, UnsupportedError):
        pass
