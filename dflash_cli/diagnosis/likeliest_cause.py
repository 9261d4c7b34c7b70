"""One sentence on a run-level report: the likeliest cause of low acceptance, and the next step."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.diagnosis.explained_looks import proven, spot_of, unexplained
from dflash_cli.diagnosis.reading_results import ReadingResult
from dflash_cli.diagnosis.run_report import RunReport
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


def diagnose_report(report: RunReport, *, draft: str, target: str) -> Diagnosis:
    """The likeliest cause among the findings of a run-level report.

    A finding about the tensors of the explaining reading comes first, but a remark only if the reading changes values.
    Then come the reading, an error, and, if acceptance is low, a finding about a fault that lowers acceptance. `draft`
    and `target` are the words that the user typed.
    """
    pair = f"{shlex.quote(draft)} --target {shlex.quote(target)}"
    best = report.search.explanation if report.search is not None else None
    about_all = unexplained([item for item in report.findings if not item.engines and item.level != "run"])
    about_all = proven(about_all, report.search.harmful if report.search is not None else frozenset())
    # Without a reading that explains the draft, the only finding of the run level is about low acceptance.
    low = next((item for item in report.findings if item.level == "run"), None) if best is None else None
    if best is not None:
        seen = [item for item in about_all if item.level == "weights" and _is_about(item, best)]
        if best.alternative.only_moves:
            # Every value is right in another place, so a remark that some are lost is refuted.
            seen = [item for item in seen if item.severity != "info"]
        sizes = _decisive_sizes(seen, best)
        seen = [item for item in seen if item.outcome != "serves" or item in sizes]
        seen.sort(key=lambda item: item.outcome == "serves")
        return _from_finding(seen[0]) if seen else _from_reading(best, report.findings, f"dflash diagnose {pair}")
    errors = [item for item in about_all if item.severity == "error"]
    is_low = low is not None and low.severity != "info"
    lowering = [item for item in about_all if item.outcome != "serves" and is_low]
    warned = [item for item in lowering if item.severity == "warning"]
    if errors or lowering:
        return _from_finding((errors or warned or lowering)[0])
    if low is not None and is_low:
        return Diagnosis(False, f"no cause found: {low.message}; next: {low.fix}", low.fix, low.id)
    return _nothing(report, f"dflash eval-acceptance {pair} --prompts FILE.jsonl", low)


def _decisive_sizes(seen: Sequence[Finding], best: ReadingResult) -> list[Finding]:
    """The size beside other layers, if it chooses one tensor among parts with equal scales."""
    sizes = [item for item in seen if item.fact == "size"]
    if best.alternative.is_neutral:
        return sizes
    return sizes if best.alternative.is_scale and len(sizes) == 1 and not sizes[0].also else []


def _is_about(finding: Finding, best: ReadingResult) -> bool:
    """Whether a finding is about a tensor that the reading changes."""
    return any(_is_changed(location, best) for location in (finding.location, *finding.also))


def _is_changed(location: str, best: ReadingResult) -> bool:
    part, layer = spot_of(location)
    return any(part == name and at in (None, layer) for name, at in best.alternative.touches)


def _from_reading(best: ReadingResult, findings: Sequence[Finding], again: str) -> Diagnosis:
    found = next((item for item in findings if item.level == "run"), None)
    where = found.location if found is not None else "the config"
    correction = found.correction if found is not None and found.correction else f"correct {where}"
    step = f"{correction} and run {again} again"
    equal = f" (or, with the same result: {'; '.join(best.equal)})" if best.equal else ""
    sentence = (
        f"{best.alternative.cause}: with {best.reading}{equal} a step commits {best.acceptance_len:.2f} tokens instead "
        f"of {best.own_len:.2f} ({best.gain_text}); {step}"
    )
    return Diagnosis(True, sentence, step, found.id if found is not None else None)


def _from_finding(finding: Finding) -> Diagnosis:
    effect = f", so {finding.effect}" if finding.effect else ""
    step = finding.fix or f"dflash explain {finding.id}"
    return Diagnosis(True, f"{finding.location}: {finding.message}{effect}; next: {step}", step, finding.id)


def _nothing(report: RunReport, step: str, low: Finding | None) -> Diagnosis:
    search = report.search
    if search is None:
        reason = "; ".join(report.notes) or "the pair was not run"
        return Diagnosis(False, f"nothing found, but {reason}; next: {step}", step)
    found = (
        f"nothing found: every rule holds, and none of {search.num_readings} other readings explains the "
        f"{search.acceptance_len:.2f} tokens per step of the config as it is"
    )
    reached = f"; the expected {search.expected.value:.2f} are reached" if search.expected is not None else ""
    remark = f"; {low.message}" if low is not None else ""
    return Diagnosis(False, f"{found}{reached}{remark}; next: {step}", step)
