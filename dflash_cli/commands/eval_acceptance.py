"""`dflash eval-acceptance`: how many tokens a pair commits per step, with a confidence interval."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_cli import console
from dflash_cli.options import (
    CausalityOption,
    ChatOption,
    EngineOptions,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    OptionalDraftArg,
    PromptsOption,
    SamplingOptions,
    TargetOption,
    TemplateOption,
    ThreadsOption,
)
from dflash_cli.parameters import ESSENTIALS, MEASURING, OUTPUT
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.evaluation.acceptance_report import Evaluation
    from dflash_cli.evaluation.measure import EvaluationRequest
    from dflash_cli.generation.loaded_pair import PairSession

NumPromptsOption = Annotated[
    int | None,
    typer.Option("--num-prompts", min=1, metavar="N", help="Use only the first N prompts.", rich_help_panel=ESSENTIALS),
]
MinAcceptanceOption = Annotated[
    float | None,
    typer.Option(
        "--min-acceptance",
        metavar="X",
        help="Exit with 3 if the acceptance length is below X.",
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
ConfidenceOption = Annotated[
    float,
    typer.Option("--confidence", metavar="X", help="Confidence level of the interval.", rich_help_panel=MEASURING),
]
BootstrapOption = Annotated[
    int,
    typer.Option(
        "--bootstrap",
        min=0,
        metavar="N",
        help="Bootstrap resamples behind the interval; 0 leaves the interval out.",
        rich_help_panel=MEASURING,
    ),
]
RowsOption = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FILE",
        help="Write each answer with its tokens and steps to FILE as it ends, as JSON Lines.",
        rich_help_panel=ESSENTIALS,
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an interrupted run: answer only prompts that the --rows file lacks.",
        rich_help_panel=ESSENTIALS,
    ),
]
AllOption = Annotated[
    bool,
    typer.Option("--all", help="Also show the figure by the definition of each other project.", rich_help_panel=OUTPUT),
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a Markdown report.", rich_help_panel=MEASURING),
]


def eval_acceptance(
    engine: EngineOptions,
    sampling: SamplingOptions,
    draft: OptionalDraftArg = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    chat: ChatOption = False,
    rows_file: RowsOption = None,
    resume: ResumeOption = False,
    min_acceptance: MinAcceptanceOption = None,
    gate: GateOption = "point",
    confidence: ConfidenceOption = 0.95,
    bootstrap: BootstrapOption = 10_000,
    report: ReportOption = None,
    chat_template_kwargs: TemplateOption = None,
    causality: CausalityOption = None,
    threads: ThreadsOption = None,
    show_all: AllOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the acceptance length of a draft: how many tokens a step commits on average, with an interval.

    Without --prompts, the bundled prompts are used: 64 pieces of Python.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence:g}, expected a number between 0 and 1")
    if engine.num_speculative_tokens == 0:
        raise UsageError("-k 0 runs without a draft, so there is no acceptance to measure")
    if resume and rows_file is None:
        raise UsageError("--resume needs --rows FILE to resume from")
    params, config = sampling.params(max_new_tokens), engine.config()
    from dflash_cli.checkpoints.references import tiny_directory
    from dflash_cli.generation.announcements import announce_loading, suggest_diagnosis
    from dflash_cli.generation.atomic_file import check_output
    from dflash_cli.generation.prompts import gather_rows

    if report is not None:
        check_output(report, force=force)
    if rows_file is not None:
        hint = "pass --resume to continue it, or --force to replace it"
        check_output(rows_file, force=force or resume, hint=hint)
    rows = gather_rows([], prompts, default=tiny_directory() / "prompts.jsonl")[:num_prompts]
    announce_loading(draft, target, device=config.device)
    from dflash_cli.evaluation.measure import EvaluationRequest, check_gate
    from dflash_cli.generation.loaded_pair import open_session

    request = EvaluationRequest(
        rows=rows,
        params=params,
        chat=chat,
        confidence=confidence,
        num_resamples=bootstrap,
        journal=rows_file,
        resume=resume,
        force=force,
    )
    session = open_session(
        draft, target, config, causality=causality, template_options=chat_template_kwargs, threads=threads
    )
    evaluation = _measure(session, request)
    if report is not None:
        _write_report(evaluation, report)
    if as_json:
        console.result_json(evaluation.to_json())
    else:
        _print(evaluation, show_all=show_all)
    suggest_diagnosis(evaluation.total.counts, session.references)
    if min_acceptance is not None:
        check_gate(evaluation, min_acceptance, use_lower_bound=gate == "lower")


def _measure(session: "PairSession", request: "EvaluationRequest") -> "Evaluation":
    from dflash_cli.evaluation.acceptance_progress import AcceptanceProgress
    from dflash_cli.evaluation.measure import measure
    from dflash_cli.generation.answers import Tally

    tally = Tally(session.llm.num_draft_tokens)
    with AcceptanceProgress(sum(row.num_turns for row in request.rows)) as progress:
        evaluation = measure(session, request, tally=tally, progress=progress)
    console.status(tally.figures(evaluation.seconds))
    return evaluation


def _print(evaluation: "Evaluation", *, show_all: bool) -> None:
    from dflash_cli.evaluation.acceptance_report import headline, legend, tables

    console.result(headline(evaluation))
    console.result(legend(evaluation))
    for title, (columns, rows) in tables(evaluation, with_definitions=show_all).items():
        console.result("")
        console.table(columns, rows, title=title)


def _write_report(evaluation: "Evaluation", path: Path) -> None:
    from dflash_cli.evaluation.acceptance_report import to_markdown
    from dflash_cli.generation.atomic_file import atomic_text

    with atomic_text(path) as stream:
        stream.write(to_markdown(evaluation))
