"""`dflash report`: results of eval-acceptance as a page, a picture or figure for a paper, Markdown or a table."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Argument, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.shown import Shown
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.publishing.report_format import ReportDocument, ReportedResult, ReportFormat


@dataclass(frozen=True, kw_only=True)
class ReportRequest(ForceOptions):
    """Write a report on measured acceptance, with several results side by side.

    An HTML report is one file without scripts, and needs no network. PNG and PDF need matplotlib (extra: plot).
    """

    results: Annotated[
        tuple[Path, ...], Argument(metavar="RESULT", help="Files that eval-acceptance --json has written.")
    ]
    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="Write to FILE: .html, .svg, .pdf, .png, .md or .csv. Default: stdout.",
        ),
    ] = None  # fmt: skip
    format: Annotated[
        Literal["html", "svg", "pdf", "png", "md", "csv"] | None,
        Option(group=ESSENTIALS, help="The form of the report. Default: by the suffix of FILE; md on stdout."),
    ] = None
    figure: Annotated[
        Literal["positions", "conditional", "histogram", "categories", "context", "differences"] | None,
        Option(
            metavar="FIGURE",
            group=ESSENTIALS,
            help="Draw one figure, as wide as a column of a paper (3.33 inches). Default: all figures.",
        ),
    ] = None
    name: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME,...", group=ESSENTIALS,
            help="Names of the results in the report, in their order. Default: the names of the files.",
        ),
    ] = ()  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.name and len(self.name) != len(self.results):
            number = len(self.results)
            raise UsageError(field="--name", found=list(self.name), expected=f"{number} names, one for each result")
        if len(set(self.name)) < len(self.name):
            raise UsageError(field="--name", found=list(self.name), expected="each name once")


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

    def _repr_svg_(self) -> str | None:
        return self.content.decode() if self.format == "svg" else None

    def _repr_png_(self) -> bytes | None:
        return self.content if self.format == "png" else None

    def _repr_markdown_(self) -> str | None:
        return self.content.decode() if self.format == "md" else None


@verb(ReportRequest)
def report(request: ReportRequest) -> Report:
    """Make a report, and write it if `output` is given.

    Raises:
        CheckpointError, UsageError: a file is not a result, or the output exists already.
    """
    from dflash_cli.comparing.result_comparison import compare_files
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.atomic_file import check_output, write_whole
    from dflash_cli.publishing.report_format import ReportedResult, choose_format, name_results, write_report

    chosen = choose_format(request.output, request.format)
    if request.output is not None:
        check_output(request.output, force=request.force)
    stored = name_results(read_evaluations(request.results), request.name)
    comparisons = compare_files(request.results, [item.name for item in stored])
    content = write_report(stored, chosen, request.figure, comparisons)
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
    if request.output is None and request.format in ("png", "pdf") and sys.stdout.isatty():
        raise UsageError(
            "a terminal cannot show a picture", id="picture-on-terminal", field="--output", hint="name a file with -o"
        )
    made = report(request)
    if request.output is None:
        console.result_bytes(made.content)
    elif console.is_json():
        console.result_json(made.document)
    else:
        console.result(str(request.output))
