"""`dflash probe`: whether a running server's draft is engaged, at what length, and whose it is if that is low."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_cli.probing.probe_options import ProbeOptions, ProbePrompts, open_probe
from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import (
    ChatOption,
    DatasetFormatOption,
    DatasetOption,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    PromptsOption,
    TemplateOption,
)
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.generation.answers import Event
    from dflash_cli.probing.server_probe import Probed, ProbeRequest

FAULT = 3
SHOWN_FAILURES = 5

UrlArg = Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://localhost:8000.")]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts",
        min=1,
        metavar="N",
        help="Ask a sample of N prompts, drawn from each category in proportion by --seed. Default: all.",
        rich_help_panel=ESSENTIALS,
    ),
]
RowsOption = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FILE",
        help="Write answers as they end, as JSON Lines; rows.jsonl becomes rows.1.jsonl, rows.8.jsonl, ...",
        rich_help_panel=ESSENTIALS,
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Ask only for answers that the --rows files lack.", rich_help_panel=ESSENTIALS),
]
MinAcceptanceOption = Annotated[
    float | None,
    typer.Option(
        "--min-acceptance",
        metavar="X",
        help="Exit with 3 if the acceptance length of the first run is below X.",
        rich_help_panel=MEASURING,
    ),
]
GateOption = Annotated[
    Literal["point", "lower"],
    typer.Option(
        "--gate",
        help="Compare --min-acceptance with the acceptance length (point) or the lower end of its interval (lower).",
        rich_help_panel=MEASURING,
    ),
]
AllowFailedOption = Annotated[
    bool,
    typer.Option(
        "--allow-failed",
        help="Exit 0 although prompts were not answered; they are left out and named all the same.",
        rich_help_panel=MEASURING,
    ),
]


def probe(
    options: ProbeOptions,
    url: UrlArg,
    prompts: PromptsOption = None,
    dataset: DatasetOption = None,
    dataset_format: DatasetFormatOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    chat: ChatOption = None,
    chat_template_kwargs: TemplateOption = None,
    rows_file: RowsOption = None,
    resume: ResumeOption = False,
    min_acceptance: MinAcceptanceOption = None,
    gate: GateOption = "point",
    allow_failed: AllowFailedOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask a running server: is its draft engaged, how many tokens does a step give, and whose is a low number?

    It is asked with several numbers of requests at a time, and its answers at temperature 0 are held against each
    other. With --result or --beside it is held against a yardstick, and the cause of a lower number is named. Without
    --prompts or --dataset, the bundled prompts are used: 64 chats (mix-64), or with --target tiny 64 pieces of Python.
    """
    if resume and rows_file is None:
        raise UsageError("--resume needs --rows FILE to resume from")
    from dflash_cli.checkpoints.references import Role, fetch_directory
    from dflash_cli.generation.prompt_sets import read_prompts
    from dflash_cli.probing.served_faults import known_faults

    asked = ProbePrompts(
        given=read_prompts(prompts, dataset, dataset_format, count=num_prompts),
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        chat=chat,
        template_options=chat_template_kwargs,
        target_path=None if options.target is None else fetch_directory(options.target, Role.TARGET),
        journal=rows_file,
        resume=resume,
        force=force,
    )
    console.status(f"asking {url} ...")
    with open_probe(url, options, asked) as request:
        faults = known_faults(options, request.server)
        found = _probe(replace(request, known_faults=faults, minimum=min_acceptance))
    _show(found, as_json=as_json)
    _finish(found, min_acceptance, use_lower_bound=gate == "lower", allow_failed=allow_failed)


def _probe(request: "ProbeRequest") -> "Probed":
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
            kept = "the answers are kept; give the same command with --resume to go on"
            lost = "nothing is kept; with --rows FILE answers are, and --resume goes on from them"
            raise Interrupted(progress.text, hint=lost if request.asking.journal is None else kept) from error


def _show(found: "Probed", *, as_json: bool) -> None:
    from dflash_cli.probing import probe_report

    for text in (*found.notes, *(f"{run.name}: {note}" for run in found.runs for note in run.notes)):
        console.note(text)
    if as_json:
        console.result_json(probe_report.to_json(found))
        return
    console.result("\n".join([*probe_report.headline(found), *probe_report.legend(found)]))
    for title, (columns, rows) in probe_report.all_tables(found).items():
        console.result("")
        console.table(columns, rows, title=title)
    lines = [*probe_report.yardstick_lines(found), *probe_report.equality_lines(found)]
    shapes = [line for shape in found.runs[0].shapes for line in shape.lines]
    for block in (lines, shapes, probe_report.fault_lines(found), probe_report.attribution_lines(found.attribution)):
        if block:
            console.result("\n" + "\n".join(block))


def _finish(found: "Probed", minimum: float | None, *, use_lower_bound: bool, allow_failed: bool) -> None:
    """Name prompts that were not answered, and end with the code that the result has.

    Raises:
        typer.Exit: prompts failed, or a cause was found.
        GateFailed: the acceptance length is too low.
    """
    from dflash_cli.acceptance.measure import check_gate
    from dflash_cli.generation.answers import plural
    from dflash_cli.probing.probe_report import as_evaluation

    failures = [failure for run in found.all_runs for failure in run.failures]
    if failures:
        say = console.warn if allow_failed else console.error
        say(f"{plural(len(failures), 'prompt')} not answered, and not in the result:")
        for failure in failures[:SHOWN_FAILURES]:
            console.error_text(f"    {failure.error}")
        if not allow_failed:
            raise typer.Exit(max(failure.exit_code for failure in failures))
    if minimum is not None:
        check_gate(as_evaluation(found.runs[0], found), minimum, use_lower_bound=use_lower_bound)
    if found.attribution.is_fault:
        raise typer.Exit(FAULT)
