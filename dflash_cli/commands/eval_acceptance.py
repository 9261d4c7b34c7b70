"""`dflash eval-acceptance`: how many tokens a pair commits per step, with a confidence interval."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_cli.acceptance.prompt_options import PromptOptions
from dflash_cli.acceptance.replay_options import ReplayOptions, open_replay, refuse_other_text, run_replay
from dflash_cli.handoff.disaggregation_options import DisaggregationOptions
from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import (
    CausalityOption,
    ChatOption,
    EngineOptions,
    ForceOption,
    JsonOption,
    LockOption,
    MaxNewTokensOption,
    OptionalDraftArg,
    PromptsOption,
    SamplingOptions,
    TargetOption,
    TemplateOption,
    ThreadsOption,
    WorkersOption,
)
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING, OUTPUT
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_report import Evaluation
    from dflash_cli.acceptance.measure import EvaluationRequest
    from dflash_cli.generation.answers import Answering, Tally
    from dflash_cli.generation.loaded_pair import OpenedPair

SHOWN_FAILURES = 5

NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts",
        min=1,
        metavar="N",
        help="Measure a sample of N prompts, chosen as --sample says, by --seed. Default: all.",
        rich_help_panel=ESSENTIALS,
    ),
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
AllowFailedOption = Annotated[
    bool,
    typer.Option(
        "--allow-failed",
        "--allow-failures",
        help="Exit 0 although prompts could not be measured; they are left out and named all the same.",
        rich_help_panel=MEASURING,
    ),
]
AllOption = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Also show the tokens most often rejected, and the figure by each project's definition.",
        rich_help_panel=OUTPUT,
    ),
]
TraceOption = Annotated[
    int,
    typer.Option(
        "--trace",
        min=0,
        metavar="N",
        help="Also show each step of the first N prompts: what was accepted, the target's own token, what it replaced.",
        rich_help_panel=OUTPUT,
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a Markdown report.", rich_help_panel=MEASURING),
]


def eval_acceptance(
    engine: EngineOptions,
    sampling: SamplingOptions,
    replay: ReplayOptions,
    asked: PromptOptions,
    apart: DisaggregationOptions,
    draft: OptionalDraftArg = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    chat: ChatOption = None,
    rows_file: RowsOption = None,
    resume: ResumeOption = False,
    min_acceptance: MinAcceptanceOption = None,
    gate: GateOption = "point",
    confidence: ConfidenceOption = 0.95,
    bootstrap: BootstrapOption = 10_000,
    report: ReportOption = None,
    allow_failed: AllowFailedOption = False,
    lock: LockOption = None,
    chat_template_kwargs: TemplateOption = None,
    causality: CausalityOption = None,
    threads: ThreadsOption = None,
    workers: WorkersOption = None,
    show_all: AllOption = False,
    trace: TraceOption = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the acceptance length of a draft: how many tokens a step commits on average, with an interval.

    Without --prompts or --dataset, the bundled prompts are used: 64 chats (mix-64), or for the bundled target 64 pieces
    of Python.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence:g}, expected a number between 0 and 1")
    if trace and as_json:
        raise UsageError("--json and --trace both write to stdout", hint="--rows keeps every step")
    _check_drafts(engine, sampling)
    apart.check(workers, replay.mode)
    params, config = sampling.params(max_new_tokens), engine.config()
    from dflash_cli.generation.announcements import announce_loading, note_cut_answers, suggest_diagnosis

    _check_outputs(rows_file, report, resume=resume, force=force)
    if replay.is_asked:
        refuse_other_text(
            {"--prompts": prompts, "--num-prompts": num_prompts, "--target": target, "--chat": chat, "--resume": resume,
             "--dataset": asked.dataset, "--thinking": asked.thinking, "--context-lengths": asked.context_lengths,
             "--chat-template-kwargs": chat_template_kwargs, "--temperature": sampling.temperature,
             "--draft-sampling probabilistic": config.draft_sampling != "greedy",
             "--verify-width": sampling.verify_width, "--trace": trace, "--workers": workers}
        )  # fmt: skip
        opened = open_replay(draft, replay, config, causality=causality, threads=threads)
        evaluation = run_replay(
            dataclasses.replace(opened, confidence=confidence, num_resamples=bootstrap, journal=rows_file, force=force)
        )
        _show(evaluation, report, show_all=show_all, as_json=as_json)
        _check_minimum(evaluation, min_acceptance, gate)
        return
    from dflash_cli.generation.prompt_sets import read_prompts

    conditions = asked.conditions(chat_template_kwargs)
    given = read_prompts(prompts, asked.dataset, asked.dataset_format, count=num_prompts)
    announce_loading(draft, target, device=config.device)
    from dflash_cli.acceptance.measure import EvaluationRequest
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.loaded_pair import open_pair
    from dflash_cli.generation.outputs import show_steps

    pair = open_pair(draft, target, causality=causality, template_options=chat_template_kwargs)
    choice = choose_prompts(
        pair, given, chat=chat, count=num_prompts, sample=asked.sample, seed=sampling.seed, conditions=conditions
    )
    request = EvaluationRequest(
        rows=choice.rows,
        params=params,
        source=choice.source,
        chat=choice.chat,
        conditions=conditions,
        scores=asked.exact_match != "none",
        confidence=confidence,
        num_resamples=bootstrap,
        journal=rows_file,
        resume=resume,
        force=force,
    )
    locked = _check_lock(lock, pair)
    with apart.open(pair, config, workers=workers, threads=threads) as answering:
        evaluation, tally = _measure(answering, request)
        max_model_len = answering.max_model_len
    evaluation = dataclasses.replace(evaluation, measured={**evaluation.measured, "lock_sha256": locked})
    _show(evaluation, report, show_all=show_all, as_json=as_json)
    show_steps(tally.answers, pair.tokenizer, trace)
    note_cut_answers(tally.outputs, params, max_model_len)
    suggest_diagnosis(evaluation.base.counts, pair.references)
    if evaluation.failures:
        _finish_failed(evaluation, is_allowed=allow_failed)
    _check_minimum(evaluation, min_acceptance, gate)


def _check_drafts(engine: EngineOptions, sampling: SamplingOptions) -> None:
    """Refuse a run in which nothing is drafted, or nothing of it verified."""
    if engine.num_speculative_tokens == 0:
        raise UsageError("-k 0 runs without a draft, so there is no acceptance to measure")
    if sampling.verify_width == 1:
        raise UsageError("--verify-width 1 verifies no drafted token, so there is no acceptance to measure")


def _show(evaluation: "Evaluation", report: Path | None, *, show_all: bool, as_json: bool) -> None:
    if report is not None:
        _write_report(evaluation, report)
    if as_json:
        console.result_json(evaluation.to_json())
    else:
        _print(evaluation, show_all=show_all)


def _check_minimum(evaluation: "Evaluation", minimum: float | None, gate: str) -> None:
    """Require the acceptance that was asked for, and that prefilling elsewhere, if that was asked for, took none."""
    from dflash_cli.acceptance.measure import check_gate

    if minimum is not None:
        check_gate(evaluation, minimum, use_lower_bound=gate == "lower")
    if evaluation.disaggregation is not None:
        evaluation.disaggregation.check()


def _check_outputs(rows_file: Path | None, report: Path | None, *, resume: bool, force: bool) -> None:
    """Refuse outputs before anything is measured."""
    from dflash_cli.documents.atomic_file import check_output

    if resume and rows_file is None:
        raise UsageError("--resume needs --rows FILE to resume from")
    if report is not None:
        check_output(report, force=force)
    if rows_file is not None:
        hint = "pass --resume to go on from it, or --force to replace it"
        check_output(rows_file, force=force or resume, hint=hint)


def _check_lock(lock: Path | None, pair: "OpenedPair") -> str | None:
    """Require that a pair is the locked one; the hash of the lock file."""
    if lock is None:
        return None
    from dflash_cli.checkpoints.lock import read_lock

    found = read_lock(lock)
    places = {"target": pair.target.checkpoint.path}
    if pair.draft is not None:
        places["draft"] = pair.draft.checkpoint.path
    with console.working("hashing"):
        found.check(places)
    return found.sha256


def _finish_failed(evaluation: "Evaluation", *, is_allowed: bool) -> None:
    """Name the prompts that could not be measured, and stop unless that is accepted and something was measured.

    Raises:
        typer.Exit: with the code of the gravest failure.
    """
    failures = evaluation.failures
    say = console.warn if is_allowed else console.error
    say(f"{len(failures)} of {evaluation.num_prompts} prompts not measured, and not in the result:")
    for failure in failures[:SHOWN_FAILURES]:
        console.error_text(f"    {failure.error}")
    if len(failures) > SHOWN_FAILURES:
        console.error_text(f"    and {len(failures) - SHOWN_FAILURES} more, which --json lists")
    if not is_allowed or not evaluation.total.num_conversations:
        raise typer.Exit(max(failure.exit_code for failure in failures))


def _measure(answering: "Answering", request: "EvaluationRequest") -> "tuple[Evaluation, Tally]":
    from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
    from dflash_cli.acceptance.measure import measure
    from dflash_cli.generation.answers import Tally
    from dflash_cli.handoff.disaggregation import hold_against_one_engine
    from dflash_cli.workers.crew import WorkersLost

    answering.check_params(request.params)
    answering.warm_up(request.params, len(request.rows))
    tally = Tally(answering.num_draft_tokens)
    with AcceptanceProgress(sum(row.num_turns for row in request.rows)) as progress:
        try:
            evaluation = measure(answering, request, tally=tally, progress=progress)
        except KeyboardInterrupt as error:
            raise Interrupted(progress.text, hint=_how_to_go_on(request)) from error
        except WorkersLost as error:
            raise WorkersLost(f"{error.message}; {progress.text}", hint=_how_to_go_on(request)) from error
    if tally.answers:
        console.status(tally.figures(evaluation.seconds))
    else:
        console.status(f"nothing left to ask: every answer is in {request.journal}")
    return hold_against_one_engine(evaluation, answering, request, tally), tally


def _how_to_go_on(request: "EvaluationRequest") -> str:
    if request.journal is None:
        return "nothing is kept; with --rows FILE answers are, and --resume goes on from them"
    return f"the answers are kept in {request.journal}; give the same command with --resume to go on"


def _print(evaluation: "Evaluation", *, show_all: bool) -> None:
    from dflash_cli.acceptance.acceptance_report import TABLE_NOTE, headline, legend, tables

    console.result(headline(evaluation))
    console.result(legend(evaluation) + "\n" + TABLE_NOTE)
    for title, (columns, rows) in tables(evaluation, is_full=show_all).items():
        console.result("")
        console.table(columns, rows, title=title)
    for match in evaluation.exact_match:
        console.result("\n" + "\n".join(match.lines))
    if evaluation.verdict:
        console.result("\n" + "\n".join(evaluation.verdict))
    for shape in evaluation.shapes:
        console.result("\n" + "\n".join(shape.lines))


def _write_report(evaluation: "Evaluation", path: Path) -> None:
    from dflash_cli.acceptance.acceptance_report import to_markdown
    from dflash_cli.documents.atomic_file import atomic_text

    with atomic_text(path) as stream:
        stream.write(to_markdown(evaluation))
