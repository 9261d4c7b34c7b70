"""`dflash tune`: how many tokens to draft for which batch size, and whether drafting pays at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_cli.commands.eval_acceptance import BootstrapOption, ConfidenceOption, NumPromptsOption
from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import (
    CausalityOption,
    ChatOption,
    DatasetFormatOption,
    DatasetOption,
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
from dflash_cli.terminal.parameters import DRAFTING, ESSENTIALS, MEASURING
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.tuning.tuner import Tuning, TuningRequest

NumbersOption = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens-list",
        metavar="K,...",
        help="Numbers of drafted tokens to try. Default: 1, 3, 7, ... and what the draft was trained for, which is "
        "measured in any case.",
        rich_help_panel=ESSENTIALS,
    ),
]
BatchSizesOption = Annotated[
    str | None,
    typer.Option(
        "--batch-sizes",
        metavar="B,...",
        help="Batch sizes to choose for. Default: 1,8,32, or those of --step-times.",
        rich_help_panel=ESSENTIALS,
    ),
]
StepTimesOption = Annotated[
    Path | None,
    typer.Option(
        "--step-times",
        metavar="FILE",
        help="Milliseconds of steps by K and batch size, as measured elsewhere; docs/tuning.md has the form. Default: "
        "measure them here.",
        rich_help_panel=ESSENTIALS,
    ),
]
WhatIfOption = Annotated[
    str | None,
    typer.Option(
        "--what-if",
        metavar="PART=FORMAT,...",
        help="Also measure acceptance with draft, kv or target rounded to another number format, such as draft=fp8; + "
        "joins several parts, and all is every format of each.",
        rich_help_panel=ESSENTIALS,
    ),
]
EnginesOption = Annotated[
    str,
    typer.Option(
        "--engine",
        "-e",
        metavar="NAME[@RELEASE],...",
        help="Engines to print the settings for; tensorrt-llm is known here too.",
        rich_help_panel=DRAFTING,
    ),
]
TimedRoundsOption = Annotated[
    int,
    typer.Option(
        "--rounds",
        min=2,
        metavar="N",
        help="Rounds to time of each K at each batch size, one more of which comes first.",
        rich_help_panel=MEASURING,
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FOLDER",
        help="Keep each answer as it ends, and the step times, in files of FOLDER.",
        rich_help_panel=ESSENTIALS,
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an interrupted run: measure only what the --rows folder lacks.",
        rich_help_panel=ESSENTIALS,
    ),
]


def tune(
    engine: EngineOptions,
    sampling: SamplingOptions,
    draft: OptionalDraftArg = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    dataset: DatasetOption = None,
    dataset_format: DatasetFormatOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    chat: ChatOption = None,
    numbers: NumbersOption = None,
    batch_sizes: BatchSizesOption = None,
    step_times: StepTimesOption = None,
    what_if: WhatIfOption = None,
    engines: EnginesOption = "vllm,sglang,llama.cpp,tensorrt-llm",
    folder: FolderOption = None,
    resume: ResumeOption = False,
    rounds: TimedRoundsOption = 4,
    confidence: ConfidenceOption = 0.95,
    bootstrap: BootstrapOption = 10_000,
    chat_template_kwargs: TemplateOption = None,
    causality: CausalityOption = None,
    threads: ThreadsOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find out how many tokens to draft at each batch size, and whether drafting pays.

    The best number depends on the text: give --prompts like those the draft is to serve.
    """
    if engine.num_speculative_tokens is not None or sampling.verify_width is not None:
        raise UsageError("-k and --verify-width are what is tried here", hint="--num-speculative-tokens-list 1,3,7")
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence:g}, expected a number between 0 and 1")
    if resume and folder is None:
        raise UsageError("--resume needs --rows FOLDER to resume from")
    numbers_to_try = _parse(numbers, "--num-speculative-tokens-list")
    batches = _parse(batch_sizes, "--batch-sizes")
    _check_engines(engines)
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.prompt_sets import read_prompts

    given, config = read_prompts(prompts, dataset, dataset_format, count=num_prompts), engine.config()
    announce_loading(draft, target, device=config.device)
    from dflash_cli.acceptance.measure import EvaluationRequest
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.loaded_pair import open_session
    from dflash_cli.tuning.speed import smallest
    from dflash_cli.tuning.tuner import TuningRequest
    from dflash_cli.tuning.what_if import parse_what_ifs

    session = open_session(
        draft, target, smallest(config), causality=causality, template_options=chat_template_kwargs, threads=threads
    )
    choice = choose_prompts(session, given, chat=chat, count=num_prompts, seed=sampling.seed)
    request = TuningRequest(
        evaluation=EvaluationRequest(
            rows=choice.rows,
            params=sampling.params(max_new_tokens),
            source=choice.source,
            chat=choice.chat,
            confidence=confidence,
            num_resamples=bootstrap,
            resume=resume,
            force=force,
        ),
        config=config,
        numbers=numbers_to_try,
        batches=batches,
        num_rounds=rounds,
        step_times=step_times,
        what_ifs=parse_what_ifs(what_if) if what_if is not None else (),
        folder=folder,
    )
    tuning = _measure(session, request)
    settings = _engine_settings(tuning, engines)
    if as_json:
        from dflash_cli.tuning.tuning_report import to_json

        console.result_json({**to_json(tuning), "engines": settings})
    else:
        _print(tuning, settings)


def _parse(text: str | None, option: str) -> list[int] | None:
    """`1,3,7`, in rising order."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers from 1 on, such as 1,3,7")
    return sorted({int(part) for part in parts})


def _check_engines(text: str) -> None:
    from dflash_cli.engines.serving_engine import parse_engines
    from dflash_cli.tuning.tensorrt_llm import without

    parse_engines(without(text))


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
        with console.Meter(total, "rounds") as meter:
            yield meter.update


def _measure(session: "PairSession", request: "TuningRequest") -> "Tuning":
    from dflash_cli.tuning.tuner import tune

    if request.folder is not None:
        try:
            request.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"--rows {request.folder}: cannot be made: {error.strerror}") from error
    try:
        return tune(session, request, _Shown())
    except KeyboardInterrupt as error:
        is_kept = request.folder is not None
        kept = f"answers are kept in {request.folder}; give the same command with --resume to go on"
        raise Interrupted(hint=kept if is_kept else "with --rows FOLDER answers are kept") from error


def _engine_settings(tuning: "Tuning", engines: str) -> list[dict[str, Any]]:
    """What each engine is told, or why it is told nothing; none where drafting pays nowhere."""
    from dflash_cli.tuning.tuned_engines import tuned_engines

    if tuning.overall is None:
        return []
    references = tuning.session.references
    return tuned_engines(
        engines,
        references["draft"] or "",
        references["target"] or "",
        tuning.overall.num_draft_tokens,
        tuple(tuning.schedule),
    )


def _print(tuning: "Tuning", settings: list[dict[str, Any]]) -> None:
    from dflash_cli.tuning.tuning_report import advice, settings_line, tables

    for line in advice(tuning.choices):
        console.result(line)
    for legend, (columns, rows) in tables(tuning):
        console.result(f"\n{legend}")
        console.table(columns, rows)
    if settings:
        console.result(f"\n{settings_line(tuning)}")
    for item in settings:
        console.result(f"# {item['engine']}")
        console.result(item["text"] or f"# {item['refusal']}")
