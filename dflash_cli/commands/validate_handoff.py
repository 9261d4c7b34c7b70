"""`dflash validate-handoff`: check whether the draft's context KV arrives at the server that decodes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.commands.validate import FAILED, print_finding
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.findings_files import FindingsFile
from dflash_cli.rules.rule import RuleLevel, ignored_ids
from dflash_cli.terminal import console
from dflash_cli.terminal.options import FindingsFileOptions, RuleOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Argument, Option
from dflash_cli.terminal.requests import verb
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.handoff.two_servers.transfer_report import TransferReport

HANDOFF_LEVELS: tuple[RuleLevel, ...] = ("kv-transfer",)
START = "the engine's arguments as a JSON object, or the serve command"


@dataclass(frozen=True, kw_only=True)
class HandoffValidationRequest(FindingsFileOptions, RuleOptions):
    """Check two servers, one for prefill and one for decode: does the draft's context KV arrive?

    Each file describes one server: the engine's arguments as a JSON object, or the serve command. Exits with 3 if the
    context KV does not arrive.
    """

    prefill: Annotated[Path, Argument(metavar="PREFILL", help=f"File that describes the prefill server: {START}.")]
    decode: Annotated[Path, Argument(metavar="DECODE", help=f"File that describes the decode server: {START}.")]
    engine: Annotated[
        str,
        Option(short="-e", metavar="NAME[@RELEASE]", group=ESSENTIALS, help="Engine of both servers: vllm or sglang."),
    ]


@verb(HandoffValidationRequest)
def validate_handoff(request: HandoffValidationRequest) -> "TransferReport":
    """Check two servers, and return every finding.

    Raises:
        CheckpointNotFound, CheckpointError, UsageError: a file is absent or malformed, or the engine has no such rules.
    """
    from dflash_cli.handoff.two_servers.transfer_report import validate_transfer

    engines = parse_engines(request.engine)
    if len(engines) != 1:
        raise UsageError(field="--engine", found=request.engine, expected="one engine: vllm or sglang")
    ignored = ignored_ids(request.ignore, HANDOFF_LEVELS)
    return validate_transfer(request.prefill, request.decode, engines[0], ignored=ignored, strict=request.strict)


def command(request: HandoffValidationRequest) -> None:
    """Check and print."""
    file = FindingsFile.of(request, f"dflash validate-handoff {request.prefill} {request.decode}")
    report = validate_handoff(request)
    paths = {path.name: path for path in (request.prefill, request.decode)}
    file.write(report, lambda name: paths.get(name, Path(name)), strict=request.strict)
    if console.is_json() or file.leaves_text:
        console.show(report, lambda: _print(report))
    if not report.passed:
        raise typer.Exit(FAILED)


def _print(report: "TransferReport") -> None:
    for finding in report.findings:
        print_finding(finding)
    console.result(report.verdict.text)
    prefill, decode = (server.launch.path for server in report.transfer.servers)
    console.result(
        f"{prefill} to {decode}: {report.num_rules} rules checked: "
        f"{plural(report.num_errors, 'error')}, {plural(report.num_warnings, 'warning')}"
    )
    for note in report.notes:
        console.note(note)
