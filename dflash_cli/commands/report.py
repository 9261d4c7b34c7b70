"""`dflash report`: results of eval-acceptance as a page, a picture, Markdown or a table."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOptions
from dflash_cli.terminal.requests import ESSENTIALS, Argument, Option, verb
from dflash_cli.terminal.shown import Shown
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.publishing.report_format import ReportDocument, ReportedResult, ReportFormat


@dataclass(frozen=True, kw_only=True)
class ReportRequest(ForceOptions):
    """Write a report on measured acceptance, with several results side by side.

    An HTML report is one file without scripts, and needs no network. A PNG needs matplotlib (extra: plot).
    """

    results: Annotated[
        tuple[Path, ...], Argument(metavar="RESULT", help="Files that eval-acceptance --json has written.")
    ]
    output: Annotated[
        Path | None,
        Option(is_per_run=True, 
            short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="Write to FILE: .html, .png, .md or .csv. Default: stdout.",
        ),
    ] = None  # fmt: skip
    format: Annotated[
        Literal["html", "png", "md", "csv"] | None,
        Option(group=ESSENTIALS, help="The form of the report. Default: by the suffix of FILE; md on stdout."),
    ] = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shown):
    """A report: its form, its bytes, the acceptance length of each result, and the file it was written to."""

    format: "ReportFormat"
    content: bytes
    results: "tuple[ReportedResult, ...]"
    path: Path | None

    @property
    def document(self) -> "ReportDocument":
        """The document of `dflash report --json`."""
        from dflash_cli.publishing.report_format import ReportDocument

        return ReportDocument(output=str(self.path or "-"), format=self.format, results=self.results)

    def summary(self) -> list[str]:
        results = plural(len(self.results), "result")
        return [f"{self.path or 'not written'}: {self.format}, {len(self.content)} bytes, {results}"]


@verb(ReportRequest)
def report(request: ReportRequest) -> Report:
    """Make a report, and write it if `output` is given.

    Raises:
        CheckpointError, UsageError: a file is not a result, or the output exists already.
    """
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.atomic_file import check_output, write_whole
    from dflash_cli.publishing.report_format import ReportedResult, choose_format, write_report

    chosen = choose_format(request.output, request.format)
    if request.output is not None:
        check_output(request.output, force=request.force)
    stored = read_evaluations(request.results)
    content = write_report(stored, chosen)
    if request.output is not None:
        write_whole(request.output, content)
    lengths = tuple(ReportedResult(item.name, item.evaluation.total.counts.acceptance_len or 0.0) for item in stored)
    return Report(format=chosen, content=content, results=lengths, path=request.output)


def command(request: ReportRequest) -> None:
    """Write the report and print its name, or print the report."""
    if request.output is None and console.is_json():
        raise UsageError(
            "--json and the report both write to stdout", id="two-results-on-stdout", field="--output",
            hint="name a file with -o",
        )  # fmt: skip
    if request.output is None and request.format == "png" and sys.stdout.isatty():
        raise UsageError(
            "a terminal cannot show a PNG", id="picture-on-terminal", field="--output", hint="name a file with -o"
        )
    made = report(request)
    if request.output is None:
        console.result_bytes(made.content)
    elif console.is_json():
        console.result_json(made.document)
    else:
        console.result(str(request.output))
