"""`dflash compare`: results of eval-acceptance and of other tools held against the first one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import JsonOption
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.comparing.result_comparison import Comparison

ResultsArg = Annotated[
    list[Path],
    typer.Argument(metavar="RESULT...", help="Files of results, two or more; all are held against the first."),
]
UnpairedOption = Annotated[
    bool,
    typer.Option(
        "--unpaired",
        help="Compare results of unlike prompts, as independent samples; intervals are wider.",
        rich_help_panel=ESSENTIALS,
    ),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="X",
        help="Tokens per step that do not matter; results that differ by less are called equivalent.",
        rich_help_panel=ESSENTIALS,
    ),
]
GateOption = Annotated[
    Literal["no-regression"] | None,
    typer.Option(
        "--gate",
        help="Exit with 3 if a result is lower than the first, in total or in a category; with --tolerance, "
        "unless a fall by more is ruled out.",
        rich_help_panel=ESSENTIALS,
    ),
]
ConfidenceOption = Annotated[
    float,
    typer.Option(
        "--confidence", metavar="X", help="Confidence level of intervals and verdicts.", rich_help_panel=MEASURING
    ),
]


def compare(
    results: ResultsArg,
    unpaired: UnpairedOption = False,
    tolerance: ToleranceOption = None,
    gate: GateOption = None,
    confidence: ConfidenceOption = 0.95,
    as_json: JsonOption = False,
) -> None:
    """Compare acceptance lengths, paired by prompt: the difference, its interval, and whether it is one.

    Results are what eval-acceptance writes with --json or --rows, or files of other tools, known by their content.
    """
    if len(results) < 2:
        raise UsageError("one result, expected two or more to compare", hint="dflash compare OLD NEW")
    if not 0.5 < confidence < 1:
        raise UsageError(f"--confidence {confidence:g}, expected a number between 0.5 and 1")
    if tolerance is not None and tolerance <= 0:
        raise UsageError(f"--tolerance {tolerance:g}, expected a number above 0")
    from dflash_cli.comparing.comparison_report import to_json, warning
    from dflash_cli.comparing.measured_result import read_result
    from dflash_cli.comparing.result_comparison import check_no_regression, compare_results

    comparisons = compare_results(
        [read_result(path) for path in results], confidence=confidence, tolerance=tolerance, paired=not unpaired
    )
    for text in filter(None, map(warning, comparisons)):
        console.warn(text)
    if as_json:
        console.result_json(to_json(comparisons, tolerance))
    else:
        _print(comparisons, tolerance)
    if gate is not None:
        check_no_regression(comparisons, tolerance)


def _print(comparisons: "tuple[Comparison, ...]", tolerance: float | None) -> None:
    from dflash_cli.comparing.comparison_report import headline, how, legend, shape_lines, table

    results = [comparisons[0].base, *(item.other for item in comparisons)]
    for line in legend(results):
        console.result(line)
    for place, item in enumerate(comparisons, start=1):
        console.result("")
        console.result(headline(item, place))
        for line in how(item, tolerance, len(results)):
            console.result(line)
        if item.categories:
            console.table(*table(item, place))
    shapes = shape_lines(results)
    if shapes:
        console.result("\n" + "\n".join(shapes))
