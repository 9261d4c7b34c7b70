"""`dflash eval-acceptance`: how many tokens a pair commits per step, with a confidence interval."""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.acceptance.prompt_options import ConditionOptions
from dflash_cli.acceptance.replay_options import ReplayOptions
from dflash_cli.commands.lock import check_lock
from dflash_cli.handoff.handoff_options import DisaggregationOptions
from dflash_cli.terminal import console
from dflash_cli.terminal.engine_options import ConcurrencyOptions, EngineOptions, TensorParallelOptions
from dflash_cli.terminal.grammar_options import OF_GRAMMAR, GrammarOptions
from dflash_cli.terminal.interruption import Interrupted, how_to_continue
from dflash_cli.terminal.options import (
    GateOptions,
    IntervalOptions,
    LockOptions,
    PairOptions,
    ReadingOptions,
    ResumableOptions,
    refuse_beside,
)
from dflash_cli.terminal.parameters import ENGINE, MEASURING, OUTPUT, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.sampling_options import BlockOptions, LookupOptions
from dflash_cli.terminal.tables import print_table
from dflash_cli.terminal.tree_options import TreesOptions
from dflash_runtime.documents import to_json
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_cli.acceptance.acceptance_report import Evaluation
    from dflash_cli.acceptance.measure import EvaluationPlan
    from dflash_cli.acceptance.prompt_choice import PromptChoice
    from dflash_cli.generation.answers import Answering, Tally
    from dflash_cli.generation.conditions import Condition
    from dflash_cli.generation.loaded_pair import OpenedPair
    from dflash_runtime.engine_config import EngineConfig
    from dflash_runtime.scheduling.sampling_params import SamplingParams

OF_THE_TEXT = (
    "prompts", "num_prompts", "target", "chat", "resume", "dataset", "thinking", "context_lengths",
    "chat_template_kwargs", "temperature", "draft_sampling", "verify_width", "calibration", "trace", "workers",
    "disaggregated", "tensor_parallel", "tools", "compare_without", *OF_GRAMMAR,
)  # fmt: skip
"""The options that decide the text on which a draft is judged. With --mode replay, the dump has the text."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(
    GateOptions,
    ReplayOptions,
    DisaggregationOptions,
    LockOptions,
    IntervalOptions,
    ConcurrencyOptions,
    TensorParallelOptions,
    EngineOptions,
    TreesOptions,
    GrammarOptions,
    BlockOptions,
    LookupOptions,
    ResumableOptions,
    ConditionOptions,
    ReadingOptions,
    PairOptions,
):
    """Measure the acceptance length of a draft: the average number of tokens per verify step, with an interval.

    Without --prompts or --dataset, the bundled prompts are used: 64 chats (mix-64), or for the bundled target 64 pieces
    of Python.
    """

    compare_without: Annotated[
        bool,
        Option(
            group=MEASURING, is_setting=False,
            help="Also answer each prompt without the grammar, and print the paired difference of acceptance.",
        ),
    ] = False  # fmt: skip
    workers: Annotated[
        str | None,
        Option(
            is_per_run=True, metavar="N", group=ENGINE, is_setting=False,
            help="N: spread the prompts over N processes, one per GPU. auto or ray://HOST:PORT: spread them over a Ray "
            "cluster; #N at the end asks for N workers, and prompts of a lost one are asked again. Needs ray (extra: "
            "ray).",
        ),
    ] = None  # fmt: skip
    calibration: Annotated[
        bool,
        Option(
            group=MEASURING,
            help="Also report how well the draft's confidence predicts acceptance: its largest probability at each "
            "position, or the prediction of its confidence head.",
        ),
    ] = False  # fmt: skip
    show_all: Annotated[
        bool,
        Option(
            is_per_run=True, flag="--all", group=OUTPUT, is_setting=False,
            help="Also show the most often rejected tokens, and the figure in each project's definition.",
        ),
    ] = False  # fmt: skip
    trace: Annotated[
        int,
        Option(
            is_per_run=True, min=0, group=OUTPUT, is_setting=False,
            help="Also show each step of the first N prompts: accepted tokens, the target's token, the rejected token.",
        ),
    ] = 0  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.verify_width == 1:
            raise UsageError(field="--verify-width", found=1, expected="2 or more: 1 verifies no drafted token")
        if self.mode == "live" and len(self.trees) > 1:
            raise UsageError(
                id="several-trees", field="--tree", found=list(self.trees), expected="one number of nodes",
                hint="--mode replay compares several on a dump",
            )  # fmt: skip
        if self.mode == "replay":
            refuse_beside(self, OF_THE_TEXT, "--mode replay, which judges the text of the dump")
        if self.disaggregated:
            refuse_beside(self, ("workers", "tensor_parallel"), "--disaggregated, which has two engines of its own")
            refuse_beside(self, OF_GRAMMAR, "--disaggregated, where the second engine continues without a grammar")
        if self.compare_without and not self.has_grammar:
            raise UsageError(
                "--compare-without needs a grammar to leave out", id="no-grammar", field="--compare-without",
                hint="add --json-schema, --regex or --grammar",
            )  # fmt: skip
        if self.workers is not None:
            refuse_beside(self, ("tensor_parallel",), "--workers, where each worker has one GPU")

    def check_outputs(self) -> None:
        """Refuse to replace a file before anything is measured.

        Raises:
            UsageError: the output exists, or its parent is not a directory.
        """
        from dflash_cli.documents.atomic_file import check_output

        if self.output is not None:
            hint = "pass --resume to continue it, or --force to replace it"
            check_output(self.output, force=self.force or self.resume, hint=hint)


@verb(EvaluationRequest)
def evaluate(request: EvaluationRequest) -> "Evaluation":
    """Measure how many tokens a pair commits per verify step.

    `Evaluation.total.counts.acceptance_len` is the acceptance length, `Evaluation.total.interval` its interval.
    `Evaluation.failed` lists the failed prompts, which the result leaves out. Whole blocks are verified.

    Raises:
        UsageError, RequestError: the pair or a prompt cannot be served. Loading raises further errors.
        HandoffMismatch: the hand-offs of a disaggregated run do not fit.
    """
    if request.mode == "replay":
        return _replay(request)
    return _run(request)[0]


def command(request: EvaluationRequest) -> None:
    """Measure and print."""
    if request.trace and console.is_json():
        raise UsageError(
            "--json and --trace both write to stdout", id="two-results-on-stdout", field="--trace",
            hint="--output keeps every step",
        )  # fmt: skip
    request.check_outputs()
    if request.mode == "replay":
        evaluation = _replay(request)
        console.show(evaluation, lambda: _print(evaluation, show_all=request.show_all))
        with request.verdict_of("eval-acceptance"):
            _check_minimum(evaluation, request)
        return
    from dflash_cli.generation.announcements import note_cut_answers, suggest_diagnosis, tell_failed_prompts
    from dflash_cli.generation.outputs import show_steps

    evaluation, tally, pair, max_model_len = _run(request)
    console.show(evaluation, lambda: _print(evaluation, show_all=request.show_all))
    show_steps(tally.answers, pair.tokenizer, request.trace)
    note_cut_answers(tally.outputs, request.sampling_params(request.max_new_tokens), max_model_len)
    suggest_diagnosis(evaluation.base.counts, pair.references)
    with request.verdict_of("eval-acceptance"):
        if evaluation.failed:
            tell_failed_prompts(evaluation.failed, is_allowed=request.allow_failed, num_prompts=evaluation.num_prompts)
            if not request.allow_failed or not evaluation.total.num_conversations:
                raise typer.Exit(max(failure.exit_code for failure in evaluation.failed))
        _check_minimum(evaluation, request)


def _replay(request: EvaluationRequest) -> "Evaluation":
    from dflash_cli.acceptance.replay_options import open_replay, run_replay
    from dflash_cli.checkpoints.opening import Overrides

    opened = open_replay(
        request.draft,
        request,
        request.engine_config(num_draft_tokens=request.num_speculative_tokens),
        overrides=Overrides(request.causality, request.layout),
        threads=request.threads,
    )
    return run_replay(
        dataclasses.replace(
            opened,
            confidence=request.confidence,
            num_resamples=request.num_resamples,
            journal=request.output,
            force=request.force,
            trees=request.trees,
            tree_candidates=request.tree_candidates,
        )
    )


def _run(request: EvaluationRequest) -> "tuple[Evaluation, Tally, OpenedPair, int]":
    """Run the pair. Returns the evaluation, the answers, the pair and the model length."""
    config = request.engine_config(
        num_draft_tokens=request.num_speculative_tokens,
        num_tree_nodes=request.trees[0] if request.trees else None,
        tree_candidates=request.tree_candidates,
        draft_sampling=request.draft_sampling,
        drafting=request.drafting,
        draft_confidence=request.calibration,
        max_num_requests=request.concurrency,
        tensor_parallel_size=request.tensor_parallel,
    )
    from dflash_cli.generation.conditions import with_and_without
    from dflash_cli.generation.prompt_sets import read_prompts

    conditions = with_and_without(request.conditions) if request.compare_without else request.conditions
    if request.workers is not None:
        from dflash_cli.workers.ray_start import check_workers

        check_workers(request.workers, config)
    given = read_prompts(request.prompts, request.dataset, request.dataset_format, count=request.num_prompts)
    from dflash_cli.acceptance.answered_run import find_answered
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.checkpoints.opening import Overrides
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.loaded_pair import open_pair

    params = request.sampling_params(request.max_new_tokens)
    pair = open_pair(
        request.draft, request.target, config, params=params, overrides=Overrides(request.causality, request.layout),
        template_options=request.template_options,
    )  # fmt: skip
    choice = choose_prompts(request, pair, given, conditions=conditions)
    plan = _plan(request, pair, params, choice, conditions)
    answered = None if request.disaggregated else find_answered(pair, config, plan)
    _check_prefill_draft(request, config)
    if answered is None:
        announce_loading(pair.references, device=config.device)
    evaluation, tally, max_model_len = _answer(request, pair, config, plan, answered)
    evaluation = dataclasses.replace(evaluation, settings=to_json({**request.settings(), **evaluation.settings}))
    return evaluation, tally, pair, max_model_len


def _plan(
    request: EvaluationRequest, pair: "OpenedPair", params: "SamplingParams", choice: "PromptChoice",
    conditions: "Sequence[Condition]",
) -> "EvaluationPlan":  # fmt: skip
    """The prompts, and how they are answered and counted."""
    from dflash_cli.acceptance.measure import EvaluationPlan
    from dflash_cli.generation.context_marks import context_marks

    return EvaluationPlan(
        rows=choice.rows,
        params=params,
        source=choice.source,
        chat=choice.chat,
        conditions=conditions,
        marks=() if pair.draft is None else context_marks(pair.draft),
        scores=request.exact_match != "none",
        confidence=request.confidence,
        num_resamples=request.num_resamples,
        journal=request.output,
        resume=request.resume,
        force=request.force,
        lock_sha256=check_lock(request.lock, pair.directories),
    )


def _answer(
    request: EvaluationRequest, pair: "OpenedPair", config: "EngineConfig", plan: "EvaluationPlan",
    answered: "Answering | None",
) -> "tuple[Evaluation, Tally, int]":  # fmt: skip
    """Answer the prompts, here or by workers. Returns the evaluation, the answers and the model length."""
    if request.disaggregated:
        from dflash_cli.handoff.disaggregation import compare_with_one_engine
        from dflash_cli.handoff.handed_session import open_handed

        with open_handed(pair, config, request, threads=request.threads) as handed:
            evaluation, tally = _measure(handed, plan)
            return compare_with_one_engine(evaluation, handed, plan, tally), tally, handed.max_model_len
    from dflash_cli.workers.open_crew import open_answering

    opened = open_answering(pair, config, request.workers, threads=request.threads)
    with opened if answered is None else nullcontext(answered) as answering:
        return *_measure(answering, plan), answering.max_model_len


def _check_prefill_draft(request: EvaluationRequest, config: "EngineConfig") -> None:
    """Refuse another draft for the prefill process if it cannot be loaded there."""
    if request.given_prefill_draft is None:
        return
    from dflash_cli.checkpoints.opening import open_draft
    from dflash_cli.checkpoints.references import Role, fetch_directory
    from dflash_runtime.device.setup.early_refusals import refuse_draft

    refuse_draft(open_draft(fetch_directory(request.given_prefill_draft, Role.DRAFT)), config, num_tree_nodes=0)


def _check_minimum(evaluation: "Evaluation", request: EvaluationRequest) -> None:
    """Require the acceptance length of --min-acceptance, and that a hand-off changed nothing.

    Raises:
        GateFailed: the acceptance length is lower, or the hand-off changed text or acceptance.
    """
    from dflash_cli.acceptance.measure import check_gate

    if request.min_acceptance is not None:
        check_gate(evaluation, request.min_acceptance, use_lower_bound=request.gate == "lower")
    if evaluation.disaggregation is not None:
        evaluation.disaggregation.check()


def _measure(answering: "Answering", plan: "EvaluationPlan") -> "tuple[Evaluation, Tally]":
    from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
    from dflash_cli.acceptance.measure import measure
    from dflash_cli.generation.answers import Tally
    from dflash_cli.workers.crew import WorkersLost

    answering.warm_up(plan.params, len(plan.rows))
    tally = Tally(answering.num_draft_tokens)
    num_answers = sum(row.num_turns for row in plan.rows)
    with AcceptanceProgress(num_answers, plan.params.max_new_tokens) as progress:
        try:
            evaluation = measure(answering, plan, tally=tally, progress=progress)
        except KeyboardInterrupt as error:
            raise Interrupted(
                progress.text, num_answers=len(tally.answers), kept_in=plan.journal, hint=how_to_continue(plan.journal)
            ) from error
        except WorkersLost as error:
            raise WorkersLost(f"{error.message}; {progress.text}", hint=how_to_continue(plan.journal)) from error
    if tally.answers:
        console.status(tally.figures(evaluation.seconds))
    else:
        console.status(f"no prompts left to answer: {plan.journal} has every answer")
    return evaluation, tally


def _print(evaluation: "Evaluation", *, show_all: bool) -> None:
    from dflash_cli.acceptance.acceptance_report import TABLE_NOTE, headline, legend, tables

    console.result(headline(evaluation), *legend(evaluation), TABLE_NOTE)
    for title, (columns, rows) in tables(evaluation, is_full=show_all).items():
        console.result("")
        print_table(columns, rows, title=title)
    for paragraph in (*evaluation.remarks, *(shape.lines for shape in evaluation.shapes)):
        console.result("", *paragraph)
