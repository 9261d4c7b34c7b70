"""`dflash compare`: compare results of eval-acceptance and of other tools with the first result."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.options import GateFileOptions, VerdictOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Argument, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.shown import Shown, Table
from dflash_cli.terminal.tables import print_table
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflash_cli.comparing.comparison_report import CompareDocument
    from dflash_cli.comparing.result_comparison import Comparison
    from dflash_cli.figures.figure import Figure


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest(GateFileOptions, VerdictOptions):
    """Compare acceptance lengths prompt by prompt: the difference, its interval and a verdict.

    Results are files that eval-acceptance wrote with --json or --output, or files of other tools. The kind of a file is
    recognised by its content.
    """

    results: Annotated[
        tuple[Path, ...],
        Argument(metavar="RESULT", help="Files of results, two or more. Each is compared with the first."),
    ]
    unpaired: Annotated[
        bool,
        Option(
            group=ESSENTIALS,
            help="Compare results of different prompts as independent samples, with wider intervals.",
        ),
    ] = False  # fmt: skip
    tolerance: Annotated[
        float | None,
        Option(
            above=0, group=ESSENTIALS,
            help="Call results equivalent if they differ by less than X tokens per step.",
        ),
    ] = None  # fmt: skip
    gate: Annotated[
        Literal["no-regression"] | None,
        Option(
            group=ESSENTIALS, is_setting=False,
            help="Exit with 3 if a result is lower than the first, in total or in a category. With --tolerance, exit "
            "with 3 if a larger drop is possible.",
        ),
    ] = None  # fmt: skip

    allow_unlike: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME,...", group=ESSENTIALS, is_setting=False,
            help="Settings in which results of a --gate may differ, as the warning names them, such as temperature. "
            "Default: none, so the gate refuses such results.",
        ),
    ] = ()  # fmt: skip

    def check(self) -> None:
        super().check()
        if len(self.results) < 2:
            raise UsageError(
                field="RESULT", found=[str(path) for path in self.results], expected="two or more results",
                hint="dflash compare OLD NEW",
            )  # fmt: skip
        self.require_gate("--gate", is_given=self.gate is not None)
        if self.allow_unlike and self.gate is None:
            raise UsageError(
                "--allow-unlike says what --gate permits, which is missing", id="option-needs-another",
                field="--allow-unlike", found=self.allow_unlike, hint="add --gate no-regression",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparisons(Shown):
    """Each result compared with the first."""

    items: "tuple[Comparison, ...]"
    tolerance: float | None

    @property
    def document(self) -> "CompareDocument":
        from dflash_cli.comparing.comparison_report import compare_document

        return compare_document(self.items, self.tolerance)

    def summary(self) -> list[str]:
        from dflash_cli.comparing.comparison_report import headline

        return [headline(item, place) for place, item in enumerate(self.items, start=1)]

    def shown_tables(self) -> "Mapping[str, Table]":
        from dflash_cli.comparing.comparison_report import letter, position_table, table

        found: dict[str, Table] = {}
        for place, item in enumerate(self.items, start=1):
            title = f"{letter(place)} against A"
            found |= {title: table(item, place), f"{title}, by position": position_table(item, place)}
        return found

    def shown_figures(self) -> "Sequence[Figure]":
        from dflash_cli.comparing.comparison_figures import difference_figures

        return difference_figures(self.items)


@verb(ComparisonRequest)
def compare(request: ComparisonRequest) -> Comparisons:
    """Compare measured results.

    Raises:
        CheckpointError, UsageError: a file is not a result, or the results cannot be compared.
    """
    from dflash_cli.comparing import result_comparison
    from dflash_cli.comparing.measured_result import read_result

    items = result_comparison.compare_results(
        [read_result(path) for path in request.results],
        confidence=request.confidence,
        tolerance=request.tolerance,
        paired=not request.unpaired,
    )
    return Comparisons(items=items, tolerance=request.tolerance)


def command(request: ComparisonRequest) -> None:
    """Compare and print."""
    from dflash_cli.comparing.comparison_report import warning
    from dflash_cli.comparing.result_comparison import check_comparable, check_no_regression
    from dflash_cli.documents.junit import gate_written

    found = compare(request)
    with gate_written(request.gate_out, "dflash compare", f"gate {request.gate}"):
        if request.gate is not None:
            check_comparable(found.items, request.allow_unlike)
        for text in filter(None, map(warning, found.items)):
            console.warn(text)
        console.show(found, lambda: _print(found.items, found.tolerance))
        if request.gate is not None:
            check_no_regression(found.items, found.tolerance)


def _print(comparisons: "tuple[Comparison, ...]", tolerance: float | None) -> None:
    from dflash_cli.comparing.comparison_report import (
        headline,
        how,
        legend,
        position_lines,
        position_table,
        shape_lines,
        table,
    )

    results = [comparisons[0].base, *(item.other for item in comparisons)]
    for line in legend(results):
        console.result(line)
    for place, item in enumerate(comparisons, start=1):
        console.result("")
        console.result(headline(item, place))
        for line in how(item, tolerance, len(results)):
            console.result(line)
        if item.categories:
            print_table(*table(item, place))
        lines = position_lines(item)
        if lines:
            console.result("", *lines)
        if item.positions:
            print_table(*position_table(item, place))
    shapes = shape_lines(results)
    if shapes:
        console.result("", *shapes)
