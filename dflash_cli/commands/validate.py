"""`dflash validate`: is this draft sound, does it fit the target, what will engines make of it."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dflash_cli import console
from dflash_cli.checkpoints.references import TINY, Location, Role, find_checkpoint, is_bundled
from dflash_cli.engines.serving_engine import parse_engines
from dflash_cli.options import DraftArg, ForceOption, JsonOption, PromptsOption, TargetOption
from dflash_cli.validation.rule import Finding, Level
from dflash_cli.validation.validator import Question, Report, RunPlan, known_ids, validate_draft
from dflash_runtime.errors import UsageError

FAILED = 3
INDENT = "    "
WIDEST = 100

EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        "-e",
        metavar="NAME[@RELEASE],...",
        help="Engines that must serve it: vllm, sglang, transformers, llama.cpp.",
    ),
]
LevelOption = Annotated[
    Level,
    typer.Option("--level", help="headers reads no weights; weights reads them all; run tries other readings."),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")]
IgnoreOption = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="ID", help="Leave out a rule; may be repeated.")
]
FixOption = Annotated[
    Path | None, typer.Option("--fix-out", metavar="DIR", help="Write a corrected copy, and say what is left.")
]
TokensOption = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", min=1, metavar="K", help="The K the engine will be started with."),
]
DeviceOption = Annotated[str, typer.Option(metavar="DEVICE", help="For --level run: auto, cpu, cuda or cuda:N.")]
NumPromptsOption = Annotated[int, typer.Option(min=4, help="For --level run without --prompts: how many to make.")]
MaxNewOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=8, help="For --level run: tokens a prompt.")]


def validate(
    draft: DraftArg,
    target: TargetOption = None,
    engine: EngineOption = None,
    level: LevelOption = "headers",
    strict: StrictOption = False,
    ignore: IgnoreOption = None,
    fix_out: FixOption = None,
    force: ForceOption = False,
    num_speculative_tokens: TokensOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = 32,
    max_new_tokens: MaxNewOption = 96,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check a draft, alone or against its target; exit 3 when something is wrong."""
    engines = parse_engines(engine)
    if prompts is not None and level != "run":
        raise UsageError("--prompts is for --level run")
    if target is None and is_bundled(draft):
        target = TINY
    needs_weights = level != "headers" or fix_out is not None
    places: list[Location] = [find_checkpoint(draft, Role.DRAFT, needs_weights=needs_weights)]
    if target is not None:
        places.append(find_checkpoint(target, Role.TARGET, needs_weights=needs_weights))
    question = Question(
        draft=places[0],
        reference=str(places[0]) if is_bundled(draft) else draft,
        target=places[1] if target is not None else None,
        target_reference=target,
        engines=engines,
        level=level,
        ignored=_ignored(ignore or []),
        num_speculative_tokens=num_speculative_tokens,
        run=_plan(target_place=places[-1], prompts=prompts, sizes=(num_prompts, max_new_tokens), device=device)
        if level == "run"
        else None,
    )
    report = validate_draft(question)
    _tell_traffic(places)
    fails = report.fails(strict=strict)
    document = {**report.document(), "passed": not fails}
    if not as_json:
        _print(report)
    if fix_out is not None:
        from dflash_cli.validation.repair import repair_draft

        repaired = repair_draft(question, report, fix_out, force=force)
        document["repaired"] = repaired.document()
        fails = repaired.after.fails(strict=strict)
        if not as_json:
            _print_repaired(repaired.destination, repaired.dialect, repaired.fixed, repaired.after)
    if as_json:
        console.result_json(document)
    if fails:
        raise typer.Exit(FAILED)


def _plan(*, target_place: Location, prompts: str | None, sizes: tuple[int, int], device: str) -> RunPlan:
    """The run level's settings; prompts are read, and the tokenizer loaded, only when the search starts."""
    from dflash_cli.validation.readings import Effort
    from dflash_runtime.config import EngineConfig

    def read_prompts() -> Sequence[Sequence[int]] | None:
        if prompts is None:
            return None
        from dflash_cli.generation.prompts import Conversation, gather_rows
        from dflash_cli.generation.tokenizer import find_tokenizer

        assert isinstance(target_place, Path)
        rows = gather_rows([], prompts)
        tokenizer = find_tokenizer(target_place, None) if any(row.kind != "prompt_token_ids" for row in rows) else None
        return [Conversation(row).next_prompt(tokenizer, chat=False) for row in rows]

    def observe(name: str, index: int, total: int) -> None:
        console.status(f"reading {index + 1} of {total}: {name}")

    effort = Effort(num_prompts=sizes[0], max_new_tokens=sizes[1])
    return RunPlan(EngineConfig(device=device, max_num_requests=32), effort, observe, read_prompts)


def _ignored(given: list[str]) -> set[str]:
    ids = {part.strip().upper() for item in given for part in item.split(",") if part.strip()}
    unknown = sorted(ids - known_ids())
    if unknown:
        raise UsageError(f"--ignore: no rule {', '.join(unknown)}", hint="dflash explain lists every rule")
    return ids


def _tell_traffic(places: Sequence[Location]) -> None:
    for place in places:
        if not isinstance(place, Path):
            console.status(f"{place.path}: {place.traffic.text}")


def _print(report: Report) -> None:
    for finding in report.findings:
        print_finding(finding)
    if report.search is not None:
        _print_search(report)
    for verdict in report.verdicts:
        console.result(verdict.text)
    against = f" against {report.target}" if report.target is not None else ""
    errors, warnings = report.count("error"), report.count("warning")
    console.result(
        f"{report.path}: {report.dialect or 'not read'}, {report.num_rules} rules{against}: "
        f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"
    )
    for note in report.notes:
        console.warn(note)
    if report.target is None:
        console.note("no --target given: nothing was checked against it")


def print_finding(finding: Finding) -> None:
    """A line that names id, severity, place and fault, then effect and fix below it.

    Wrapped on a terminal; in a pipe each of them is one line, for grep.
    """
    named = f" [{', '.join(finding.engines)}]" if finding.engines else ""
    _say(f"{finding.id} {finding.severity:7} {finding.place}: {finding.message}{named}", "")
    if finding.effect:
        _say(f"effect: {finding.effect}", INDENT)
    if finding.fix:
        _say(f"fix: {finding.fix}", INDENT)


def _say(text: str, indent: str) -> None:
    if not sys.stdout.isatty():
        console.result(indent + text)
        return
    width = min(shutil.get_terminal_size().columns, WIDEST)
    console.result(
        textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=INDENT + indent, break_on_hyphens=False,
            break_long_words=True,
        )
    )  # fmt: skip


def _print_search(report: Report) -> None:
    search = report.search
    assert search is not None
    rows = [("as configured", f"{search.acceptance_len:.2f}", "", "")]
    for item in search.outcomes:
        interval = item.interval
        span = f"{interval.low:+.2f} to {interval.high:+.2f}" if interval is not None else "too few prompts"
        rows.append((item.trial.name, f"{item.acceptance_len:.2f}", f"{item.difference:+.2f}", span))
    console.table(("reading", "tokens a step", "difference", "95% interval"), rows)


def _print_repaired(destination: Path, dialect: str, fixed: Sequence[str], after: Report) -> None:
    done = ", ".join(fixed) if fixed else "nothing"
    console.result(f"{destination}: written as {dialect}; fixed: {done}")
    for finding in after.findings:
        console.result(f"{INDENT}not fixed: {finding.id} {finding.severity} {finding.place}: {finding.message}")
        console.result(f"{INDENT}{INDENT}fix: {finding.fix}")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
