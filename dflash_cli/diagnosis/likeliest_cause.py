"""One sentence on a run-level report: the likeliest cause of low acceptance, and the next step."""

import shlex
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.diagnosis.readings import ReadingResult
from dflash_cli.diagnosis.run_report import RunReport
from dflash_cli.generation.announcements import is_low_length
from dflash_cli.rules.rule import Finding
from dflash_runtime.documents import INLINE


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A sentence that names the cause, if it was found, and the next step. `rule` is the id of the rule behind it."""

    has_cause: bool
    sentence: str
    next: str
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class DiagnoseDocument:
    """Result of `dflash diagnose`."""

    KIND: ClassVar[str] = "diagnose"

    cause: Annotated[Diagnosis, INLINE]
    report: RunReport


def diagnose_report(report: RunReport, *, draft: str, target: str, num_draft_tokens: int) -> Diagnosis:
    """The likeliest cause among the findings of a run-level report.

    A reading that explains the draft comes first, then an error. If acceptance is low, a warning about a fault that
    lowers acceptance comes last. `draft` and `target` are the words that the user typed.
    """
    pair = f"{shlex.quote(draft)} --target {shlex.quote(target)}"
    best = report.search.explanation if report.search is not None else None
    about_all = [item for item in report.findings if not item.engines]
    if best is not None:
        return _from_reading(best, about_all, f"dflash diagnose {pair}")
    low = report.search is not None and is_low_length(report.search.acceptance_len, num_draft_tokens)
    errors = [item for item in about_all if item.severity == "error"]
    lowering = [item for item in about_all if item.severity == "warning" and item.outcome != "serves" and low]
    if errors or lowering:
        return _from_finding((errors or lowering)[0])
    return _nothing(report, low, f"dflash eval-acceptance {pair} --prompts FILE.jsonl")


def _from_reading(best: ReadingResult, findings: list[Finding], again: str) -> Diagnosis:
    found = next((item for item in findings if item.level == "run"), None)
    where = found.location if found is not None else "the config"
    correction = found.correction if found is not None and found.correction else f"correct {where}"
    interval = best.interval
    assert interval is not None
    step = f"{correction} and run {again} again"
    sentence = (
        f"{best.alternative.cause}: with {best.reading} a step commits {best.acceptance_len:.2f} tokens instead of "
        f"{best.own_len:.2f} (interval of the change: {interval.low:+.2f} to {interval.high:+.2f}); {step}"
    )
    return Diagnosis(True, sentence, step, found.id if found is not None else None)


def _from_finding(finding: Finding) -> Diagnosis:
    effect = f", so {finding.effect}" if finding.effect else ""
    step = finding.fix or f"dflash explain {finding.id}"
    return Diagnosis(True, f"{finding.location}: {finding.message}{effect}; next: {step}", step, finding.id)


def _nothing(report: RunReport, low: bool, step: str) -> Diagnosis:
    search = report.search
    if search is None:
        reason = "; ".join(report.notes) or "the pair was not run"
        return Diagnosis(False, f"nothing found, but {reason}; next: {step}", step)
    found = (
        f"nothing found: every rule holds, and none of {search.num_readings} other readings accepts clearly more than "
        f"the {search.acceptance_len:.2f} tokens per step of the config as it is"
    )
    weak = "; the draft itself is weak on these prompts" if low else ""
    return Diagnosis(False, f"{found}{weak}; next: {step}", step)
