"""`dflash validate`: is this draft sound, does it fit the target, what will engines make of it."""

from typing import Annotated, Literal

import typer

from dflash_cli import console
from dflash_cli.checks.base import Finding
from dflash_cli.checks.engines import parse_engines
from dflash_cli.options import DraftArg, JsonOption, TargetOption
from dflash_cli.references import TINY, Role, is_bundled, resolve
from dflash_cli.validate import Report, known_ids, validate_draft
from dflash_runtime.errors import UsageError

FAILED = 3

EngineOption = Annotated[
    str | None,
    typer.Option("--engine", "-e", metavar="NAME[@RELEASE],...", help="Engines that must serve it: vllm, sglang."),
]
LevelOption = Annotated[
    Literal["headers", "weights"], typer.Option("--level", help="headers reads no weights; weights reads them all.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")]
IgnoreOption = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="ID", help="Leave out a rule; may be repeated.")
]


def validate(
    draft: DraftArg,
    target: TargetOption = None,
    engine: EngineOption = None,
    level: LevelOption = "headers",
    strict: StrictOption = False,
    ignore: IgnoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a draft, alone or against its target; exit 3 when something is wrong."""
    engines = parse_engines(engine)
    ignored = _ignored(ignore or [])
    if target is None and is_bundled(draft):
        target = TINY
    report = validate_draft(
        resolve(draft, Role.DRAFT),
        target=None if target is None else resolve(target, Role.TARGET),
        target_reference=target,
        engines=engines,
        level=level,
        ignored=ignored,
    )
    if as_json:
        console.result_json({**report.document(), "passed": not report.fails(strict=strict)})
    else:
        _print(report)
    if report.fails(strict=strict):
        raise typer.Exit(FAILED)


def _ignored(given: list[str]) -> set[str]:
    ids = {part.strip().upper() for item in given for part in item.split(",") if part.strip()}
    unknown = sorted(ids - known_ids())
    if unknown:
        raise UsageError(f"--ignore: no rule {', '.join(unknown)} (known: {', '.join(sorted(known_ids()))})")
    return ids


def _print(report: Report) -> None:
    for finding in report.findings:
        console.result(_describe(finding))
    against = f" against {report.target}" if report.target is not None else ""
    errors, warnings = report.count("error"), report.count("warning")
    console.result(
        f"{report.path}: {report.dialect or 'not read'}, {report.num_rules} rules{against}: "
        f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"
    )
    if report.target is None:
        console.note("no --target given: nothing was checked against it")


def _describe(finding: Finding) -> str:
    lines = [f"{finding.id} {finding.severity:7} {finding.place}: {finding.message}"]
    if finding.effect:
        lines.append(f"    effect: {finding.effect}")
    if finding.fix:
        lines.append(f"    fix: {finding.fix}")
    return "\n".join(lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
