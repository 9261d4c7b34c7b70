"""`dflash probe`: check whether a running server uses its draft, its acceptance length, and the cause of a low one."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.probing.probe_options import ProbeOptions, ProbePlan, open_probe
from dflash_cli.probing.servers.http_client import base_url
from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted, how_to_continue
from dflash_cli.terminal.parameters import Argument
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.tables import print_table
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from dflash_cli.generation.answers import Event
    from dflash_cli.probing.probe_result import Probed

FAULT = 3


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(ProbeOptions):
    """Ask a running server: does it use its draft, what is its acceptance length, and why is it low?

    The server answers the prompts at several numbers of concurrent requests. Answers at temperature 0 are compared.

    With a second result, from --result or --beside, the cause of a lower length is named. Without --prompts or
    --dataset, the bundled prompts are used: 64 chats (mix-64), or with --target tiny 64 pieces of Python.
    """

    url: Annotated[str, Argument(metavar="URL", help="The server, such as http://localhost:8000.")]


@verb(ProbeRequest)
def probe(request: ProbeRequest) -> "Probed":
    """Ask a server, and return its runs and the likeliest cause of low acceptance.

    `Probed.runs` has one run per number of concurrent requests. `Probed.attribution` names the cause.

    Raises:
        ServerUnreachable, UnsupportedError: the server does not answer, or reports no acceptance.
        UsageError: the result to compare with shares no prompt with the probe.
    """
    for url in (request.url, request.beside):
        if url is not None:
            base_url(url)
    with open_probe(request.url, request) as plan:
        return _probe(plan)


def command(request: ProbeRequest) -> None:
    """Ask and print."""
    found = probe(request)
    _show(found)
    with request.verdict_of("probe"):
        _finish(
            found, request.min_acceptance, use_lower_bound=request.gate == "lower", allow_failed=request.allow_failed
        )


def _probe(request: ProbePlan) -> "Probed":
    from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
    from dflash_cli.probing.server_probe import probe as run_probe

    num_answers = sum(row.num_turns for row in request.asking.rows)
    progress = AcceptanceProgress(num_answers)
    with ExitStack() as shown:

        def observe(name: str) -> "Callable[[Event], None]":
            nonlocal progress
            shown.close()
            console.status(f"{name} ...")
            progress = shown.enter_context(AcceptanceProgress(num_answers))
            return progress

        try:
            return run_probe(request, observe)
        except KeyboardInterrupt as error:
            journal = request.asking.journal
            raise Interrupted(progress.text, kept_in=journal, hint=how_to_continue(journal)) from error


def _show(found: "Probed") -> None:
    from dflash_cli.probing import probe_report

    of_runs = [Notice(f"{run.name}: {note}", id=note.id) for run in found.runs for note in run.notes]
    for note in found.notes:
        console.note(note)
    for note in of_runs:  # they make a figure unsafe, so --quiet keeps them
        console.warn(note)
    if console.is_json():
        console.result_json(found)
        return
    console.result(*probe_report.headline(found), *probe_report.legend(found))
    for title, (columns, rows) in probe_report.all_tables(found).items():
        console.result("")
        print_table(columns, rows, title=title)
    lines = [*probe_report.yardstick_lines(found), *probe_report.equality_lines(found)]
    shapes = [line for shape in found.runs[0].shapes for line in shape.lines]
    blocks = [
        lines, shapes, probe_report.question_lines(found), probe_report.fault_lines(found),
        probe_report.finding_lines(found), probe_report.attribution_lines(found.attribution),
    ]  # fmt: skip
    for block in blocks:
        if block:
            console.result("", *block)


def _finish(found: "Probed", minimum: float | None, *, use_lower_bound: bool, allow_failed: bool) -> None:
    """Print failed prompts, and exit with the code of the result.

    Raises:
        typer.Exit: prompts failed, or a cause was found.
        GateFailed: the acceptance length is too low.
    """
    from dflash_cli.acceptance.measure import check_summary
    from dflash_cli.generation.announcements import tell_failed_prompts

    failures = [failure for run in found.all_runs for failure in run.failed]
    if failures:
        tell_failed_prompts(failures, is_allowed=allow_failed)
        if not allow_failed:
            raise typer.Exit(max(failure.exit_code for failure in failures))
    if minimum is not None:
        check_summary(found.runs[0].total, minimum, use_lower_bound=use_lower_bound)
    if found.attribution.is_fault or any(item.severity == "error" for item in found.findings):
        raise typer.Exit(FAULT)
