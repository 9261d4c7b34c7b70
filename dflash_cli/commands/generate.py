"""`dflash generate`: generate text with a pair."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from dflash_cli.handoff.handoff_options import HandoffOptions, open_handing
from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import (
    CausalityOption,
    ChatOption,
    DatasetFormatOption,
    DatasetOption,
    DraftOption,
    EngineOptions,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    PromptsOption,
    SamplingOptions,
    TargetOption,
    TemplateOption,
    ThreadsOption,
)
from dflash_cli.terminal.parameters import DRAFTING, ESSENTIALS, OUTPUT, Typed
from dflash_runtime.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dflash_cli.acceptance.prompt_choice import PromptChoice
    from dflash_cli.generation.answers import Event, Tally
    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.generation.outputs import Sink
    from dflash_cli.generation.prompt_sets import PromptSet
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.handoff.handing import Handing
    from dflash_runtime.lossless import Lossless
    from dflash_runtime.scheduling.request import SamplingParams

SHOWN_FAILURES = 20

PromptArg = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the answers to FILE as JSON Lines; - writes them to stdout.",
        rich_help_panel=ESSENTIALS,
    ),
]
TraceOption = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Show each step: the drafted tokens that were accepted, the target's own token, and the drafted token it "
        "replaced. Adds them to --output and --json too.",
        rich_help_panel=OUTPUT,
    ),
]
LosslessOption = Annotated[
    bool,
    typer.Option(
        "--check-lossless",
        help="Compare each token with the target's own choice; exit with 3 if one differs by more than rounding.",
        rich_help_panel=OUTPUT,
    ),
]
AdaptiveWidthOption = Annotated[
    bool | None,
    typer.Option(
        "--adaptive-width/--no-adaptive-width",
        help="Choose for each step how many positions of its blocks to verify, or to decode without drafting, by what "
        "is accepted and how long steps take. The text is the same. Default: on where steps are CUDA graphs, unless "
        "--verify-width is given.",
        show_default=False,
        rich_help_panel=DRAFTING,
    ),
]


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    handoff: HandoffOptions,
    typed: Typed,
    prompt: PromptArg = None,
    draft: DraftOption = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    dataset: DatasetOption = None,
    dataset_format: DatasetFormatOption = None,
    output: OutputOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    chat: ChatOption = None,
    chat_template_kwargs: TemplateOption = None,
    causality: CausalityOption = None,
    adaptive_width: AdaptiveWidthOption = None,
    trace: TraceOption = False,
    check_lossless: LosslessOption = False,
    threads: ThreadsOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text with a pair: a target and the draft made for it.

    Text goes to stdout as it is generated, one line of statistics to stderr. Without --draft and --target, the bundled
    pair runs.
    """
    _check_stdout(output, sampling, as_json=as_json, check_lossless=check_lossless)
    handoff.check(typed)
    params, config = sampling.params(max_new_tokens), engine.config()
    from dflash_cli.documents.atomic_file import check_output
    from dflash_cli.generation.announcements import announce_loading

    if output not in (None, "-"):
        check_output(Path(output), force=force)
    _note_odd_prompts(prompt or [], has_draft=draft is not None)
    given = None if handoff.brings_prompts else _gather(prompt or [], prompts, dataset, dataset_format)
    announce_loading(draft, target, plain=engine.num_speculative_tokens == 0, device=config.device)
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.loaded_pair import open_session
    from dflash_runtime.device.settings import can_adapt

    handing = open_handing(handoff, given, force=force, check_lossless=check_lossless)
    if adaptive_width is None:
        adaptive_width = sampling.verify_width is None and can_adapt(config)
    config = replace(config, adaptive_width=adaptive_width)
    session = open_session(
        draft, target, config, causality=causality, template_options=chat_template_kwargs, threads=threads
    )
    session.check_params(params)
    choice = choose_prompts(session, given or handing.prompts, chat=chat, seed=sampling.seed)
    params = handing.params or params.with_stops(session.stop_token_ids)
    handing.check_pair(session.llm)
    session.warm_up(params, len(choice.rows))
    tally, seconds, interrupted = _answer(session, choice, params, handing, output, trace=trace, as_json=as_json)
    lossless = session.llm.check_lossless(tally.outputs) if check_lossless and not interrupted else None
    if as_json:
        document = tally.to_json(session, seconds, with_trace=trace, lossless=lossless)
        console.result_json(document | {"handoffs": handing.to_json()})
    elif handing.is_sending:
        console.result(f"{handing.place}")
    console.status(tally.figures(seconds))
    _tell(session, tally, params, handing)
    if interrupted:
        _stop(tally, sum(row.num_turns for row in choice.rows), handing.kept_in or output)
    _finish(tally, lossless)


def _check_stdout(output: str | None, sampling: SamplingOptions, *, as_json: bool, check_lossless: bool) -> None:
    if as_json and output == "-":
        raise UsageError("--json and --output - both write to stdout")
    if check_lossless and sampling.temperature > 0:
        raise UsageError("--check-lossless needs --temperature 0: a sampled token has no single right value")


def _gather(prompt: "Sequence[str]", prompts: str | None, dataset: str | None, form: str | None) -> "PromptSet":
    from dflash_cli.generation.prompt_sets import gather_prompts

    return gather_prompts(prompt, prompts, dataset, form)


def _answer(
    session: "PairSession", choice: "PromptChoice", params: "SamplingParams", handing: "Handing", output: str | None,
    *, trace: bool, as_json: bool,
) -> "tuple[Tally, float, bool]":  # fmt: skip
    """Answer the prompts, or hand them off; the counts, the seconds, and whether that was interrupted."""
    from dflash_cli.generation.answers import Tally, answer_rows

    tally = Tally(session.llm.num_draft_tokens)
    with ExitStack() as stack:
        stream = stack.enter_context(handing.opened(session.llm))
        is_silent = as_json or handing.is_sending
        sinks = [tally.add, *_open_sinks(session, choice.rows, output, stack, trace=trace, is_silent=is_silent)]
        started = time.perf_counter()
        events = answer_rows(session, choice.rows, lambda row: params, chat=choice.chat, stream=stream)
        interrupted = _drain(events, sinks)
        return tally, time.perf_counter() - started, interrupted


def _open_sinks(
    session: "PairSession", rows: "Sequence[PromptRow]", output: str | None, stack: ExitStack, *, trace: bool,
    is_silent: bool,
) -> "Iterator[Sink]":  # fmt: skip
    """Where the events go: rows to a file, with a meter; a trace; or text."""
    from dflash_cli.generation.outputs import ProgressSink, TextSink, TraceSink, open_row_sink

    if output is not None:
        yield open_row_sink(rows, output, stack, session.llm.num_draft_tokens, with_trace=trace)
    if output is not None or is_silent:
        yield ProgressSink(sum(row.num_turns for row in rows), stack)
    elif trace:
        yield TraceSink(rows, session.tokenizer)
    else:
        text = TextSink(rows)
        stack.callback(text.end_line)
        yield text


def _drain(events: "Iterator[Event]", sinks: "Sequence[Sink]") -> bool:
    """Pass every event to every sink; returns whether the run was interrupted. Finished answers stay either way."""
    try:
        for event in events:
            for sink in sinks:
                sink(event)
    except KeyboardInterrupt:
        return True
    return False


def _tell(session: "PairSession", tally: "Tally", params: "SamplingParams", handing: "Handing") -> None:
    """What is worth knowing of a run beside its figures."""
    from dflash_cli.generation.announcements import note_cut_answers, suggest_diagnosis

    handing.tell(tally)
    if not handing.is_sending:
        note_cut_answers(tally.outputs, params, session.llm.limits.max_model_len)
    if not handing.counts.problems:  # by which low acceptance is explained
        suggest_diagnosis(tally.counts, session.references)


def _note_odd_prompts(prompts: "Sequence[str]", *, has_draft: bool) -> None:
    """A checkpoint as the only prompt was probably meant as the draft, and single words as one text without quotes."""
    from dflash_cli.checkpoints.references import is_bundled

    is_alone = len(prompts) == 1 and not has_draft
    if is_alone and (is_bundled(prompts[0]) or (Path(prompts[0]) / "config.json").is_file()):
        console.note(f"{prompts[0]} was read as a prompt; to run it as the draft, pass --draft {prompts[0]}")
    if len(prompts) > 1 and all(text.isascii() and len(text.split()) == 1 for text in prompts):
        console.note(
            f"{len(prompts)} prompts of one word each were read; put quotes around a text to make it one prompt"
        )


def _stop(tally: "Tally", num_answers: int, output: str | None) -> NoReturn:
    """Say what is kept of an interrupted run."""
    finished = f"{len(tally.answers)} of {num_answers} answered"
    raise Interrupted(finished if output in (None, "-") else f"{finished}, which {output} holds")


def _finish(tally: "Tally", lossless: "Lossless | None") -> None:
    """Say what did not go well, and stop with the exit code it has."""
    failed = [answer.output.error for answer in tally.answers if answer.output.error is not None]
    for text in failed[:SHOWN_FAILURES]:
        console.error(text)
    if len(failed) > SHOWN_FAILURES:
        console.error(f"and {len(failed) - SHOWN_FAILURES} more prompts that could not be answered")
    if lossless is not None:
        console.status(lossless.summary)
        if not lossless.is_lossless:
            raise GateFailed(
                f"not lossless: {lossless.worst}", hint="run again with --scheduling sync --no-prefix-cache"
            )
    code = max((answer.output.exit_code for answer in tally.answers), default=0)
    if code:
        raise typer.Exit(code)
