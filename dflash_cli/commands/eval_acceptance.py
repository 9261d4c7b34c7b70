"""`dflash eval-acceptance`: how many tokens a step a pair gives, and how sure that is."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_cli import console
from dflash_cli.options import (
    CausalityOption,
    ChatOption,
    DraftOption,
    EngineOptions,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    PromptsOption,
    SamplingOptions,
    TargetOption,
    TemplateOption,
    flatten,
)
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.evaluation.acceptance_report import Evaluation
    from dflash_cli.evaluation.measure import Plan
    from dflash_cli.generation.loaded_pair import Session

GateOption = Annotated[
    Literal["point", "lower"],
    typer.Option("--gate", help="What --min-acceptance is held against: the length, or its lower bound."),
]


@flatten
def eval_acceptance(
    sampling: SamplingOptions,
    engine: EngineOptions,
    draft: DraftOption = None,
    target: TargetOption = None,
    causality: CausalityOption = None,
    prompts: PromptsOption = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", min=1, help="Use the first so many rows.")] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    chat: ChatOption = False,
    chat_template_kwargs: TemplateOption = None,
    confidence: Annotated[float, typer.Option("--confidence", help="Level of the interval.")] = 0.95,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="Resamples of the prompts; 0 is none.")] = 10_000,
    min_acceptance: Annotated[
        float | None, typer.Option("--min-acceptance", metavar="X", help="Exit 3 when acceptance is below.")
    ] = None,
    gate: GateOption = "point",
    rows_file: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="Keep each prompt's tokens and steps, as JSON Lines.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take prompts from --rows that were answered under the same settings.")
    ] = False,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write a Markdown report.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance on prompts: length with its interval, by position, by category, in every definition.

    Without --prompts the bundled held-out prompts are used: dflash eval-acceptance
    """
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence:g}, expected a number between 0 and 1")
    if engine.num_speculative_tokens == 0:
        raise UsageError("-k 0 decodes plainly, so there is no acceptance to measure")
    if resume and rows_file is None:
        raise UsageError("--resume needs --rows FILE to resume from")
    params, config = sampling.params(max_new_tokens), engine.config()
    from dflash_cli.checkpoints.references import tiny_directory
    from dflash_cli.generation.atomic_file import check_output
    from dflash_cli.generation.prompts import gather_rows

    if report is not None:
        check_output(report, force=force)
    if rows_file is not None:
        hint = "pass --resume to go on from it, or --force to replace it"
        check_output(rows_file, force=force or resume, hint=hint)
    rows = gather_rows([], prompts, default=tiny_directory() / "prompts.jsonl")[:num_prompts]
    from dflash_cli.evaluation.measure import Plan, check_gate
    from dflash_cli.generation.loaded_pair import open_session

    plan = Plan(
        rows=rows,
        params=params,
        chat=chat,
        confidence=confidence,
        num_resamples=bootstrap,
        journal=rows_file,
        resume=resume,
        force=force,
    )
    session = open_session(draft, target, config, causality=causality, template_options=chat_template_kwargs)
    evaluation = _measure(session, plan)
    if report is not None:
        _write_report(evaluation, report)
    if as_json:
        console.result_json(evaluation.to_json())
    else:
        _print(evaluation)
    if min_acceptance is not None:
        check_gate(evaluation, min_acceptance, use_lower_bound=gate == "lower")


def _measure(session: "Session", plan: "Plan") -> "Evaluation":
    from dflash_cli.evaluation.measure import measure
    from dflash_cli.generation.answers import Tally
    from dflash_cli.generation.outputs import ProgressSink

    tally = Tally(session.llm.num_draft_tokens)
    with ExitStack() as stack:
        progress = ProgressSink(tally, sum(row.num_turns for row in plan.rows), "measuring", stack)
        evaluation = measure(session, plan, tally, progress)
    console.status(tally.figures(evaluation.seconds))
    return evaluation


def _print(evaluation: "Evaluation") -> None:
    from dflash_cli.evaluation.acceptance_report import headline, tables

    console.result(headline(evaluation))
    for title, (columns, rows) in tables(evaluation).items():
        console.result("")
        console.table(columns, rows, title=title)


def _write_report(evaluation: "Evaluation", path: Path) -> None:
    from dflash_cli.evaluation.acceptance_report import to_markdown
    from dflash_cli.generation.atomic_file import atomic_text

    with atomic_text(path) as stream:
        stream.write(to_markdown(evaluation))
