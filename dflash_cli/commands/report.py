"""`dflash report`: results of eval-acceptance as a page, a picture, Markdown or a table."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOption, JsonOption
from dflash_runtime.errors import UsageError

ResultsArg = Annotated[
    list[Path], typer.Argument(metavar="RESULT...", help="Files that eval-acceptance --json has written.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to FILE: .html, .png, .md or .csv. Default: stdout."),
]
FormatOption = Annotated[
    Literal["html", "png", "md", "csv"] | None,
    typer.Option(
        "--format", help="The form of the report. Default: by the end of FILE, md on stdout.", show_default=False
    ),
]


def report(
    results: ResultsArg,
    output: OutputOption = None,
    format: FormatOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a report on measured acceptance; several results stand side by side.

    A page is one file: no network, no script. A PNG takes matplotlib (extra: plot).
    """
    if output is None and as_json:
        raise UsageError("--json and the report both write to stdout", hint="name a file with -o")
    if output is None and format == "png" and sys.stdout.isatty():
        raise UsageError("a PNG is not written to a terminal", hint="name a file with -o")
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.atomic_file import check_output, write_whole
    from dflash_cli.publishing.report_format import choose_format, write_report

    chosen = choose_format(output, format)
    if output is not None:
        check_output(output, force=force)
    stored = read_evaluations(results)
    content = write_report(stored, chosen)
    if output is None:
        console.result_bytes(content)
        return
    write_whole(output, content)
    if as_json:
        lengths = [
            {"name": item.name, "acceptance_len": item.evaluation.total.counts.acceptance_len} for item in stored
        ]
        console.result_json({"output": str(output), "format": chosen, "results": lengths})
    else:
        console.result(str(output))
