"""`dflash tune`: how many tokens to draft at each batch size, and whether drafting pays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal import console
from dflash_cli.terminal.engine_options import EngineOptions
from dflash_cli.terminal.interruption import Interrupted, how_to_continue
from dflash_cli.terminal.options import (
    IntervalOptions,
    PairOptions,
    PromptOptions,
    ReadingOptions,
    ResumeOptions,
    refuse_beside,
)
from dflash_cli.terminal.parameters import DRAFTING, ESSENTIALS, MEASURING, Option
from dflash_cli.terminal.progress import Meter
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.sampling_options import RivalOptions, SamplingOptions
from dflash_cli.terminal.tables import print_table
from dflash_cli.tuning.what_if import parse_what_ifs
from dflash_runtime.engine_config import MAX_TREE_NODES
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
    from dflash_cli.acceptance.prompt_choice import PromptChoice
    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.tuning.tuned_engines import EngineSettings
    from dflash_cli.tuning.tuner import Tuning
    from dflash_cli.tuning.tuning_plan import TuningPlan
    from dflash_runtime.engine_config import EngineConfig
    from dflash_runtime.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class TuningRequest(
    IntervalOptions,
    EngineOptions,
    SamplingOptions,
    RivalOptions,
    PromptOptions,
    ResumeOptions,
    ReadingOptions,
    PairOptions,
):
    """Find out how many tokens to draft at each batch size, and whether drafting pays.

    The best number depends on the text: give prompts of your users with --prompts.
    """

    num_speculative_tokens: Annotated[
        tuple[int, ...],
        Option(
            short="-k", metavar="K,...", min=1, group=ESSENTIALS,
            help="Numbers of draft tokens to try. The trained number is always tried. Default: 1, 3, 7, ... and the "
            "trained number.",
        ),
    ] = ()  # fmt: skip
    concurrency: Annotated[
        tuple[int, ...],
        Option(
            min=1, group=ESSENTIALS,
            help="Numbers of requests at once to choose for. Default: 1,8,32, or the batch sizes in --step-times.",
        ),
    ] = ()  # fmt: skip
    tree: Annotated[
        tuple[int, ...],
        Option(
            metavar="N,...", min=1, max=MAX_TREE_NODES, group=ESSENTIALS,
            help="Also try trees of N draft tokens, and say where they are slower than a block.",
        ),
    ] = ()  # fmt: skip
    step_times: Annotated[
        Path | None,
        Option(
            group=ESSENTIALS, is_setting=False,
            help="Milliseconds per step by K and batch size, measured elsewhere; see dflash docs tuning. Default: "
            "measure them here.",
        ),
    ] = None  # fmt: skip
    what_if: Annotated[
        str | None,
        Option(
            metavar="PART=FORMAT,...", group=ESSENTIALS,
            help="Also measure acceptance with draft, kv or target rounded to another number format, such as "
            "draft=fp8. + combines parts; all tests every format of each part.",
        ),
    ] = None  # fmt: skip
    budget: Annotated[
        bool,
        Option(
            group=MEASURING,
            help="Also simulate a row budget: in each step, verified rows go to the tokens that are most likely "
            "accepted, across all requests.",
        ),
    ] = False  # fmt: skip
    engine: Annotated[
        tuple[str, ...],
        Option(
            short="-e", metavar="NAME[@RELEASE],...", group=DRAFTING, is_setting=False,
            help="Engines to print commands for.",
        ),
    ] = ("vllm", "sglang", "llama.cpp", "tensorrt-llm")  # fmt: skip
    rounds: Annotated[
        int,
        Option(
            min=2, group=MEASURING,
            help="Rounds to time for each K and batch size, plus one untimed warm-up round.",
        ),
    ] = 4  # fmt: skip
    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="DIR", group=ESSENTIALS, is_setting=False,
            help="Keep each answer when it ends, and the step times, in files of DIR.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        _check_engines(self.engine)
        if self.max_new_tokens < 2:
            raise UsageError(
                field="--max-new-tokens", found=self.max_new_tokens,
                expected="2 or more: a prompt's own pass gives the first token, and no verify step",
            )  # fmt: skip
        if self.tree:
            refuse_beside(self, ("budget",), "--tree: a row budget shares out the rows of blocks")
        if self.what_if is not None:
            parse_what_ifs(self.what_if)


@verb(TuningRequest)
def tune(request: TuningRequest) -> "Tuning":
    """Measure acceptance and step times, and choose K for each batch size.

    `Tuning.choices` has the speed-up of every candidate per batch size, the best first, and whether drafting pays.

    Raises:
        UsageError, RequestError: a K does not fit the pair, or a prompt cannot be served.
    """
    from dflash_cli.generation.prompt_sets import read_prompts

    given = read_prompts(request.prompts, request.dataset, request.dataset_format, count=request.num_prompts)
    config = request.engine_config(draft_confidence=request.budget)
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.checkpoints.opening import Overrides
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.loaded_pair import load_session, open_pair

    params = request.sampling_params(request.max_new_tokens)
    most = max(request.num_speculative_tokens, default=None)
    widest = replace(config, num_draft_tokens=most, num_tree_nodes=max(request.tree, default=None))
    opened = open_pair(
        request.draft, request.target, widest, params=params,
        overrides=Overrides(request.causality, request.layout), template_options=request.template_options,
    )  # fmt: skip
    plan = _plan(request, choose_prompts(request, opened, given), config, params)
    assert opened.draft is not None
    plan.runs(opened.draft.config.num_draft_tokens)  # refuses numbers and files that do not fit
    announce_loading(opened.references, device=config.device)
    from dflash_cli.tuning.speed import smallest

    return _measure(load_session(opened, smallest(config), threads=request.threads), plan)


def _plan(
    request: TuningRequest, choice: "PromptChoice", config: "EngineConfig", params: "SamplingParams"
) -> "TuningPlan":
    """What is measured, and how."""
    from dflash_cli.acceptance.measure import EvaluationPlan
    from dflash_cli.tuning.tuning_plan import TuningPlan

    return TuningPlan(
        evaluation=EvaluationPlan(
            rows=choice.rows,
            params=params,
            source=choice.source,
            chat=choice.chat,
            confidence=request.confidence,
            num_resamples=request.num_resamples,
            resume=request.resume,
            force=request.force,
        ),
        config=config,
        numbers=sorted(set(request.num_speculative_tokens)) or None,
        trees=sorted(set(request.tree)),
        batches=sorted(set(request.concurrency)) or None,
        num_rounds=request.rounds,
        step_times=request.step_times,
        what_ifs=parse_what_ifs(request.what_if) if request.what_if is not None else (),
        rivals=request.rivals,
        folder=request.output,
    )


def command(request: TuningRequest) -> None:
    """Measure, choose and print."""
    tuning = tune(request)
    settings = _engine_settings(tuning, request.engine)
    if console.is_json():
        from dflash_cli.tuning.tuning_report import tune_document

        console.result_json(tune_document(tuning, settings))
    else:
        _print(tuning, settings)


def _check_engines(names: tuple[str, ...]) -> None:
    from dflash_cli.engines.engine_names import parse_engines

    parse_engines(",".join(names))


class _Shown:
    """Progress on stderr."""

    @contextmanager
    def answers(self, name: str, num_answers: int) -> "Iterator[AcceptanceProgress]":
        from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress

        with AcceptanceProgress(num_answers) as progress:
            yield progress
        console.status(f"{name}: {progress.text.replace(' so far', '')}")

    @contextmanager
    def rounds(self, total: int) -> Iterator[Callable[[int], None]]:
        with Meter(total, "rounds") as meter:
            yield meter.update


def _measure(session: "PairSession", request: "TuningPlan") -> "Tuning":
    from dflash_cli.tuning.tuner import tune as run

    try:
        return run(session, request, _Shown())
    except KeyboardInterrupt as error:
        raise Interrupted(kept_in=request.folder, hint=how_to_continue(request.folder)) from error


def _engine_settings(tuning: "Tuning", engines: tuple[str, ...]) -> "list[EngineSettings]":
    """Each engine's settings or refusal; empty if drafting pays at no batch size."""
    from dflash_cli.tuning.tuned_engines import tuned_engines

    if tuning.overall is None:
        return []
    references = tuning.session.references
    return tuned_engines(
        ",".join(engines),
        references["draft"] or "",
        references["target"] or "",
        tuning.overall.num_speculative_tokens,
        tuple(tuning.schedule),
    )


def _print(tuning: "Tuning", settings: "list[EngineSettings]") -> None:
    from dflash_cli.tuning.tuning_report import advice, rival_advice, settings_line, tables

    for line in (*advice(tuning.choices), *rival_advice(tuning.contests)):
        console.result(line)
    for legend, (columns, rows) in tables(tuning):
        console.result("", *legend.split("\n"))
        print_table(columns, rows)
    if settings:
        console.result("", *settings_line(tuning).split("\n"))
    for item in settings:
        console.result(f"# {item.engine}")
        console.result(*(item.text or f"# {item.refusal}").split("\n"))
