"""`dflash validate`: is a draft sound, does it fit its target, and which engines can serve it?"""

import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.pair_references import PairReferences, complete_pair
from dflash_cli.checkpoints.references import Location, find_checkpoint, open_checkpoint
from dflash_cli.engines.serving_engine import ServingEngine, known_engines, parse_engines
from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import LEVELS, Finding, Level, RuleLevel, ignored_ids
from dflash_cli.rules.validator import ValidationRequest, validate_draft
from dflash_cli.terminal import console
from dflash_cli.terminal.options import (
    DRAFT_HELP,
    DeviceMapOption,
    ForceOption,
    JsonOption,
    LockOption,
    PromptsOption,
    TargetOption,
    TargetRuntimeOption,
    ThreadsOption,
)
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UnsupportedError, UsageError

if TYPE_CHECKING:
    from dflash_cli.conversion.repair import Repaired
    from dflash_cli.diagnosis.readings import ReadingSearch
    from dflash_cli.handoff.two_servers.transfer_report import TransferReport

FAILED = 3
INDENT = "    "
WIDEST = 100
SHOWN_READINGS = 8
"""Of the alternative readings, the best first; --json has all."""
OptionalDraft = Annotated[str | None, typer.Argument(metavar="DRAFT", help=f"{DRAFT_HELP} Not with --kv-transfer.")]
TransferOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--kv-transfer",
        metavar="PREFILL DECODE",
        help="Instead of DRAFT, two files that say how the server that runs prompts and the one that decodes are "
        "started: a JSON object of the engine's arguments, or the serve command. Says whether the draft's context "
        "arrives. Needs one --engine: vllm or sglang.",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        "-e",
        metavar="NAME[@RELEASE],...",
        help=f"Engines that must be able to serve the draft: {known_engines()}.",
    ),
]
LevelOption = Annotated[
    Level,
    typer.Option(
        "--level",
        help="headers reads configs and tensor headers; weights also reads every weight; run also runs the pair, with "
        "the draft's config as it is and with one setting changed at a time.",
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Exit with 3 on warnings too.")]
IgnoreOption = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="ID", help="Skip the rule of this id; may be repeated.")
]
FixOption = Annotated[
    Path | None,
    typer.Option("--fix-out", metavar="DIR", help="Write a corrected copy to DIR, and list what it could not correct."),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=1,
        metavar="K",
        help="Tokens that the engine will be told to draft in each step.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option(metavar="DEVICE", help="For --level run: device to run on: auto, cpu, cuda or cuda:N.")
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts",
        min=4,
        metavar="N",
        help="For --level run: prompts to make up, or to draw from --prompts; a cause is tested on new ones. Default: "
        "32, or the whole file.",
    ),
]
MaxNewOption = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=8, help="For --level run: tokens to generate for each prompt.")
]


def validate(
    draft: OptionalDraft = None,
    target: TargetOption = None,
    engine: EngineOption = None,
    kv_transfer: TransferOption = None,
    level: LevelOption = "headers",
    strict: StrictOption = False,
    ignore: IgnoreOption = None,
    fix_out: FixOption = None,
    force: ForceOption = False,
    num_speculative_tokens: TokensOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewOption = 96,
    device: DeviceOption = "auto",
    target_runtime: TargetRuntimeOption = "auto",
    device_map: DeviceMapOption = None,
    threads: ThreadsOption = None,
    lock: LockOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a draft, alone or with its target; exits with 3 if it finds an error, 5 if it is no DFlash draft."""
    engines = parse_engines(engine)
    if kv_transfer is not None:
        given = {"DRAFT": draft, "--target": target, "--fix-out": fix_out, "--lock": lock, "--prompts": prompts}
        _refuse_beside_transfer({**given, "--num-speculative-tokens": num_speculative_tokens}, level)
        _validate_transfer(kv_transfer, engines, _ignored(ignore, ("kv-transfer",)), strict=strict, as_json=as_json)
        return
    draft = _required(draft)
    if prompts is not None and level != "run":
        raise UsageError("--prompts needs --level run")
    pair, location, target_location = _find_pair(draft, target, level, needs_weights=fix_out is not None)
    _check_lock(lock, location, target_location)
    request = ValidationRequest(
        draft=location,
        draft_reference=draft,
        target=target_location,
        target_reference=pair.target if target_location is not None else None,
        engines=engines,
        level="headers" if level == "headers" else "weights",
        ignored=_ignored(ignore, LEVELS),
        num_speculative_tokens=num_speculative_tokens,
    )
    if level == "run":
        report = _run(request, prompts, (num_prompts, max_new_tokens), (device, target_runtime, device_map), threads)
    else:
        report = validate_draft(request)
    _tell_traffic(location, target_location)
    fails = report.fails(strict=strict)
    document = {**report.to_json(), "passed": not fails}
    if not as_json:
        _print(report, is_target_missing=pair.target is None)
    if fix_out is not None:
        from dflash_cli.conversion.repair import repair_draft

        repaired = repair_draft(request, report, fix_out, force=force)
        document["repaired"] = repaired.to_json() if repaired else None
        fails = (repaired.after if repaired else report).fails(strict=strict)
        if not as_json:
            _print_repaired(fix_out, repaired)
    if as_json:
        console.result_json(document)
    if fails:
        is_other_kind = any(item.stage == "identity" and item.severity == "error" for item in report.findings)
        raise typer.Exit(UnsupportedError.exit_code if is_other_kind else FAILED)


def _ignored(typed: list[str] | None, levels: Sequence[RuleLevel]) -> frozenset[str]:
    """The rules to skip, of `--ignore S09,C20 --ignore P07`."""
    return ignored_ids([part for item in typed or [] for part in item.split(",")], levels)


def _required(draft: str | None) -> str:
    if draft is None:
        raise UsageError("DRAFT is missing, expected a draft, or --kv-transfer with two files")
    return draft


def _find_pair(
    draft: str, target: str | None, level: Level, *, needs_weights: bool
) -> "tuple[PairReferences[Location], Location, Location | None]":
    """The pair, where its draft is, and where its target is, if there is one that can be read."""
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


def _refuse_beside_transfer(given: Mapping[str, object], level: Level) -> None:
    """Refuse what says something of a draft, which the two files say."""
    options = {**given, "--level": None if level == "headers" else level}
    first = next((name for name, value in options.items() if value is not None), None)
    if first is not None:
        raise UsageError(f"{first} does not go with --kv-transfer, whose files name draft and target")


def _validate_transfer(
    files: tuple[Path, Path], engines: Sequence[ServingEngine], ignored: Collection[str], *, strict: bool, as_json: bool
) -> None:
    """Judge two servers, and end with 3 where the draft's context does not arrive."""
    from dflash_cli.handoff.two_servers.transfer_report import validate_transfer

    if len(engines) != 1:
        raise UsageError("--kv-transfer needs one engine", hint="add --engine vllm or --engine sglang")
    report = validate_transfer(*files, engines[0], ignored=ignored)
    fails = report.fails(strict=strict)
    if as_json:
        console.result_json({**report.to_json(), "passed": not fails})
    else:
        _print_transfer(report)
    if fails:
        raise typer.Exit(FAILED)


def _print_transfer(report: "TransferReport") -> None:
    for finding in report.findings:
        print_finding(finding)
    console.result(report.verdict.text)
    prefill, decode = (server.launch.path for server in report.transfer.servers)
    errors, warnings = report.count("error"), report.count("warning")
    console.result(
        f"{prefill} to {decode}: {report.num_rules} rules checked: "
        f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"
    )
    for note in report.notes:
        console.note(note)


def _run(
    request: ValidationRequest,
    prompts: str | None,
    sizes: tuple[int | None, int],
    engine: tuple[str, str, str | None],
    threads: int | None,
) -> Report:
    """The report of the run level, with progress; `sizes` are prompts to make and tokens to generate for each,
    `engine` the device, the target's runtime and its device map.
    """
    from dflash_cli.diagnosis.pair_validation import validate_running
    from dflash_cli.diagnosis.reading_progress import ReadingProgress
    from dflash_cli.diagnosis.run_settings import run_settings
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.threads import use_threads

    if not isinstance(request.target, Path):
        raise UsageError("--level run needs a target", hint="add --target TARGET")
    announce_loading(request.draft_reference, request.target_reference, device=engine[0])
    use_threads(threads, engine[0], [open_checkpoint(request.target), open_checkpoint(request.draft)])
    with ReadingProgress() as progress:
        run = run_settings(
            request.target,
            prompts=prompts,
            num_prompts=sizes[0],
            max_new_tokens=sizes[1],
            device=engine[0],
            observe=progress,
            target_runtime=engine[1],
            device_map=engine[2],
        )
        return validate_running(request, run)


def _check_lock(lock: Path | None, draft: Location, target: "Location | None") -> None:
    """Require the locked pair, or the locked draft where no target is looked at."""
    if lock is None:
        return
    from dflash_cli.checkpoints.lock import read_lock

    found = read_lock(lock)
    with console.working("hashing"):
        found.check({"draft": draft} | ({"target": target} if target is not None else {}))


def _find_named_target(pair: PairReferences[Location]) -> "tuple[Location | None, str | None]":
    """The target that the draft names, None where its headers cannot be read, and a note about it for the user."""
    try:
        location = pair.find_target(find_checkpoint)
        open_target(open_checkpoint(location))
    except (CheckpointNotFound, CheckpointError, UnsupportedError, UsageError) as error:
        return None, f"nothing was checked against the target that the draft names: {error.message}"
    return location, pair.note


def _tell_traffic(*locations: "Location | None") -> None:
    for location in locations:
        if location is not None and not isinstance(location, Path):
            console.status(f"{location.path}: {location.traffic.text}")


def _print(report: Report, *, is_target_missing: bool) -> None:
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
        f"{report.path}: {report.dialect or 'unknown dialect'}, {report.num_rules} rules checked{against}: "
        f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"
    )
    for note in report.notes:
        console.warn(note)
    if is_target_missing:
        console.note("no --target given, so the draft was not checked against its target")


def print_finding(finding: Finding) -> None:
    """A line with id, severity, location and fault of a finding, then its effect and its fix, a line each.

    Lines are wrapped on a terminal; in a pipe they are not, for grep.
    """
    named = f" [{', '.join(finding.engines)}]" if finding.engines else ""
    _say(f"{finding.id} {finding.severity:7} {finding.location}: {finding.message}{named}", "")
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


def _print_search(search: "ReadingSearch") -> None:
    rows = [("its config as it is", f"{search.acceptance_len:.2f}", "", "")]
    for item in search.results[:SHOWN_READINGS]:
        interval = item.interval
        span = "" if item.num_prompts else "estimated"
        if interval is not None:
            span = f"{interval.low:+.2f} to {interval.high:+.2f} ({item.num_prompts} new prompts)"
        rows.append((item.reading.name, f"{item.acceptance_len:.2f}", f"{item.difference:+.2f}", span))
    console.table(("draft run with", "tokens", "change", "interval of the change"), rows)
    rest = search.num_readings - len(rows) + 1
    if rest > 0:
        console.result(f"{INDENT}and {rest} other settings, none of them better")


def _print_repaired(destination: Path, repaired: "Repaired | None") -> None:
    if repaired is None:
        console.result(f"{destination}: not written, since there is nothing to fix")
        return
    done = ", ".join(repaired.fixed) or "nothing"
    console.result(f"{destination}: written as {repaired.dialect}; fixed: {done}")
    for finding in repaired.after.findings:
        console.result(f"{INDENT}not fixed: {finding.id} {finding.severity} {finding.location}: {finding.message}")
        console.result(f"{INDENT}{INDENT}fix: {finding.fix}")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
