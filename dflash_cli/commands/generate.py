"""`dflash generate`: generate text with a pair."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

import typer

from dflash_cli.handoff.handoff_options import HandoffOptions
from dflash_cli.terminal import console
from dflash_cli.terminal.engine_options import ConcurrencyOptions, EngineOptions, TensorParallelOptions
from dflash_cli.terminal.grammar_options import OF_GRAMMAR, GrammarOptions
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import (
    DRAFT_HELP,
    ForceOptions,
    PairOptions,
    PromptOptions,
    ReadingOptions,
    refuse_beside,
)
from dflash_cli.terminal.parameters import DRAFTING, ESSENTIALS, OUTPUT, Argument, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.sampling_options import DraftingOptions
from dflash_cli.terminal.shown import Shown
from dflash_cli.terminal.tree_options import TreeOptions
from dflash_runtime.errors import GateFailed, UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflash_cli.acceptance.prompt_choice import PromptChoice
    from dflash_cli.generation.answers import Event, Tally
    from dflash_cli.generation.generate_document import GenerateDocument
    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.generation.outputs import Sink
    from dflash_cli.generation.prompt_sets import PromptSet
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.handoff.handing import Handing
    from dflash_runtime.engine_config import EngineConfig
    from dflash_runtime.lossless import Lossless
    from dflash_runtime.scheduling.sampling_params import SamplingParams

SHOWN_FAILURES = 20

Width = int | Literal["auto", "all", "budget"]


def parse_width(text: str) -> Width:
    """Parse `auto`, `all`, `budget` or a number of rows.

    Raises:
        ValueError: the text has another form.
    """
    if text in ("auto", "all", "budget"):
        return cast(Width, text)
    if (width := int(text)) < 1:
        raise ValueError(text)
    return width


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(
    HandoffOptions,
    ConcurrencyOptions,
    TensorParallelOptions,
    EngineOptions,
    TreeOptions,
    GrammarOptions,
    DraftingOptions,
    PromptOptions,
    ForceOptions,
    ReadingOptions,
    PairOptions,
):
    """Generate text with a pair: a target and the draft made for it.

    Text goes to stdout as it is generated, one line of statistics to stderr. Without --draft and --target, the bundled
    pair runs.
    """

    prompt: Annotated[tuple[str, ...], Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")] = ()
    draft: Annotated[
        str | None, Option(short="-d", metavar="DRAFT", group=ESSENTIALS, help=f"{DRAFT_HELP} Default: tiny.")
    ] = None
    output: Annotated[
        str | None,
        Option(
            is_per_run=True, short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="Write the answers to FILE as JSON Lines; - writes them to stdout.",
        ),
    ] = None  # fmt: skip
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            short="-k", metavar="K", min=0, group=ESSENTIALS,
            help="Draft K tokens per step; 0 runs the target alone. Default: the draft's block size minus one, which "
            "is also the most.",
        ),
    ] = None  # fmt: skip
    verify_width: Annotated[
        Width | None,
        Option(
            metavar="N|all|auto|budget", group=DRAFTING, parse=parse_width,
            expected="all, auto, budget or a whole number from 1 on",
            help="Verify the first N positions of a block, the last committed token included. auto: choose N per "
            "step by acceptance and step times. budget: choose positions per request by the draft's confidence. "
            "The text is the same. Default: auto with CUDA graphs, otherwise all.",
        ),
    ] = None  # fmt: skip
    trace: Annotated[
        int,
        Option(
            is_per_run=True, min=0, group=OUTPUT, is_setting=False,
            help="Show each step of the first N prompts: accepted tokens, the target's own token, the rejected one. "
            "--output and --json contain these steps too.",
        ),
    ] = 0  # fmt: skip
    check_lossless: Annotated[
        bool,
        Option(
            group=OUTPUT, is_setting=False,
            help="Compare each token with the target's own choice; exit with 3 if one differs by more than rounding.",
        ),
    ] = False  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.has_handoffs:
            refuse_beside(self, ("tensor_parallel",), "hand-offs, which have the KV of all heads")
            refuse_beside(self, OF_GRAMMAR, "hand-offs, which another engine continues without a grammar")
        if self.trees and self.verify_width in ("auto", "budget"):
            refuse_beside(self, ("verify_width",), "--tree: step times are measured for blocks")
        if self.has_grammar and self.verify_width in ("auto", "budget"):
            refuse_beside(self, ("verify_width",), "a grammar, because its steps are not timed")
        if self.check_lossless and self.temperature > 0:
            raise UsageError(
                field="--check-lossless", found=f"--temperature {self.temperature:g}",
                expected="--temperature 0, because sampled tokens may differ",
            )  # fmt: skip
        if len(self.thinking) > 1:
            raise UsageError(
                field="--thinking", found=list(self.thinking), expected="one value",
                hint="dflash eval-acceptance measures several side by side",
            )  # fmt: skip

    @property
    def verified_rows(self) -> int | None:
        return self.verify_width if isinstance(self.verify_width, int) else None


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(Shown):
    """The answers of a run. `lossless` is set by check_lossless."""

    session: "PairSession"
    tally: "Tally"
    seconds: float
    lossless: "Lossless | None" = None
    handoffs: "Handing"
    num_answers: int
    is_interrupted: bool = False
    num_traced: int = 0

    @property
    def texts(self) -> "list[str | None]":
        """The text of each answer, in the order of the prompts; None without a tokenizer."""
        return [item.text for item in sorted(self.tally.answers, key=lambda item: (item.row.index, item.turn))]

    @property
    def document(self) -> "GenerateDocument":
        from dflash_cli.generation.generate_document import generate_document

        return generate_document(
            self.tally, self.session, self.seconds, num_traced=self.num_traced, lossless=self.lossless,
            handoffs=self.handoffs.facts,
        )  # fmt: skip

    def summary(self) -> list[str]:
        return [self.tally.figures(self.seconds)]


def run(
    request: GenerationRequest, open_sinks: "Callable[[PairSession, Sequence[PromptRow], ExitStack], Iterator[Sink]]"
) -> Generation:
    """Answer the prompts or hand them off, and pass every event to the sinks."""
    from dflash_cli.generation.prompt_sets import gather_prompts

    request.check_folders(force=request.force)
    named = None if request.brings_prompts else gather_prompts(
        request.prompt, request.prompts, request.dataset, request.dataset_format, count=request.num_prompts
    )  # fmt: skip
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.checkpoints.opening import Overrides
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.conditions import make_conditions
    from dflash_cli.generation.loaded_pair import load_session, open_pair

    handing = _open_handing(request, named) if request.has_handoffs else None  # before anything is fetched
    config = _engine_config(request)
    params = request.sampling_params(request.max_new_tokens)
    opened = open_pair(
        request.draft, request.target, config, params=params, overrides=Overrides(request.causality, request.layout),
        template_options=request.template_options,
    )  # fmt: skip
    conditions = make_conditions(request.thinking, (), with_plain=False, template_options=request.template_options)
    given = handing.prompts if handing is not None and named is None else named
    choice = choose_prompts(request, opened, given, conditions=conditions)
    announce_loading(opened.references, plain=config.num_draft_tokens == 0, device=config.device)
    handing = handing or _open_handing(request, named)
    session = load_session(opened, _with_width(request, config), threads=request.threads)
    params = handing.params or params.with_stops(session.stop_token_ids)
    handing.check_pair(session.llm)
    session.warm_up(params, len(choice.rows))
    tally, seconds, is_interrupted = _answer(session, choice, params, handing, open_sinks)
    is_checked = request.check_lossless and not is_interrupted
    lossless = session.llm.check_lossless(tally.outputs, params) if is_checked else None
    return Generation(
        session=session,
        tally=tally,
        seconds=seconds,
        lossless=lossless,
        handoffs=handing,
        num_answers=sum(row.num_turns for row in choice.rows),
        is_interrupted=is_interrupted,
        num_traced=request.trace,
    )


def _engine_config(request: GenerationRequest) -> "EngineConfig":
    return request.engine_config(
        num_draft_tokens=request.num_speculative_tokens,
        num_tree_nodes=request.tree,
        tree_candidates=request.tree_candidates,
        draft_sampling=request.draft_sampling,
        max_num_requests=request.concurrency,
        tensor_parallel_size=request.tensor_parallel,
    )


def _with_width(request: GenerationRequest, config: "EngineConfig") -> "EngineConfig":
    """The config with adaptive width or a row budget, as asked for. By default, steps adapt where they can."""
    from dflash_runtime.device.setup.settings import can_adapt

    may_adapt = request.verify_width is None and not request.has_grammar and can_adapt(config)
    is_adaptive = request.verify_width == "auto" or may_adapt
    return replace(config, adaptive_width=is_adaptive, row_budget=request.verify_width == "budget")


@verb(GenerationRequest)
def generate(request: GenerationRequest) -> Generation:
    """Answer prompts with a pair, and return the answers with their steps and figures.

    Raises:
        UsageError, RequestError: the pair or a prompt cannot be served. Loading raises further errors.
    """
    return run(request, lambda session, rows, stack: iter(()))


def command(request: GenerationRequest) -> None:
    """Answer and print."""
    if console.is_json() and request.output == "-":
        raise UsageError(
            "--json and --output - both write to stdout", id="two-results-on-stdout", field="--output",
            hint="leave out --output -: the document of --json contains the rows",
        )  # fmt: skip
    from dflash_cli.documents.atomic_file import check_output

    if request.output not in (None, "-"):
        check_output(Path(str(request.output)), force=request.force)
    _note_odd_prompts(request.prompt, has_draft=request.draft is not None)
    found = run(request, lambda session, rows, stack: _open_sinks(request, session, rows, stack))
    if console.is_json():
        console.result_json(found.document)
    elif found.handoffs.is_sending:
        console.result(f"{found.handoffs.place}")
    if any(answer.output.error is None for answer in found.tally.answers) or found.is_interrupted:
        console.status(found.tally.figures(found.seconds))
    _tell(found, request)
    if found.is_interrupted:
        _stop(found, found.handoffs.kept_in or request.output)
    _finish(found.tally, found.lossless)


def _open_handing(request: GenerationRequest, named: "PromptSet | None") -> "Handing":
    """The hand-offs of the run, which may be none."""
    from dflash_cli.handoff.handing import open_handing

    return open_handing(request, named, check_lossless=request.check_lossless)


def _answer(
    session: "PairSession", choice: "PromptChoice", params: "SamplingParams", handing: "Handing",
    open_sinks: "Callable[[PairSession, Sequence[PromptRow], ExitStack], Iterator[Sink]]",
) -> "tuple[Tally, float, bool]":  # fmt: skip
    """Answer the prompts or hand them off. Returns the counts, the seconds, and whether the run was interrupted."""
    from dflash_cli.generation.answers import Tally

    tally = Tally(session.llm.num_draft_tokens)
    with ExitStack() as stack:
        stream = stack.enter_context(handing.opened(session.llm))
        sinks = [tally.add, *open_sinks(session, choice.rows, stack)]
        started = time.perf_counter()
        events = session.answer(choice.rows, params, chat=choice.chat, stream=stream)
        interrupted = _drain(events, sinks)
        return tally, time.perf_counter() - started, interrupted


def _open_sinks(
    request: GenerationRequest, session: "PairSession", rows: "Sequence[PromptRow]", stack: ExitStack
) -> "Iterator[Sink]":
    """The outputs of the command: rows in a file and a meter, or steps, or text."""
    from dflash_cli.generation.outputs import ProgressSink, TextSink, TraceSink, open_row_sink

    if request.output is not None:
        yield open_row_sink(rows, request.output, stack, session.llm.num_draft_tokens, num_traced=request.trace)
    if request.output is not None or console.is_json() or request.handoff_out is not None:
        yield ProgressSink(sum(row.num_turns for row in rows), stack, request.max_new_tokens)
    elif request.trace:
        yield TraceSink(rows, session.tokenizer, request.trace)
    else:
        text = TextSink(rows)
        stack.callback(text.end_line)
        yield text
    if not request.check_lossless:
        yield lambda _: console.stop_without_reader()


def _drain(events: "Iterator[Event]", sinks: "Sequence[Sink]") -> bool:
    """Pass every event to every sink. Returns whether the run was interrupted; finished answers are kept."""
    try:
        for event in events:
            for sink in sinks:
                sink(event)
    except KeyboardInterrupt:
        return True
    return False


def _tell(found: Generation, request: GenerationRequest) -> None:
    """Print notes about a run after its figures."""
    from dflash_cli.generation.announcements import note_cut_answers, suggest_diagnosis

    handing, tally = found.handoffs, found.tally
    handing.tell(tally)
    if not handing.is_sending:
        params = handing.params or request.sampling_params(request.max_new_tokens)
        note_cut_answers(tally.outputs, params, found.session.llm.limits.max_model_len)
    if not handing.counts.problems:  # which explain low acceptance
        suggest_diagnosis(tally.counts, found.session.references)


def _note_odd_prompts(prompts: "Sequence[str]", *, has_draft: bool) -> None:
    """Print a note if the only prompt names a checkpoint, or if every prompt is one word, as without quotes."""
    from dflash_cli.checkpoints.references import is_bundled

    is_alone = len(prompts) == 1 and not has_draft
    if is_alone and (is_bundled(prompts[0]) or (Path(prompts[0]) / "config.json").is_file()):
        text = f"{prompts[0]} was read as a prompt; to run it as the draft, pass --draft {prompts[0]}"
        console.note(Notice(text, id="prompt-names-a-checkpoint"))
    if len(prompts) > 1 and all(text.isascii() and len(text.split()) == 1 for text in prompts):
        text = f"{len(prompts)} prompts of one word each were read; put quotes around a text to make it one prompt"
        console.note(Notice(text, id="prompts-of-one-word"))


def _stop(found: Generation, output: str | None) -> NoReturn:
    """End an interrupted run with an error that says which answers are kept."""
    num_answers = len(found.tally.answers)
    finished = f"{num_answers} of {found.num_answers} answered"
    if output in (None, "-"):
        raise Interrupted(finished, num_answers=num_answers)
    raise Interrupted(f"{finished} and kept in {output}", num_answers=num_answers, kept_in=output)


def _finish(tally: "Tally", lossless: "Lossless | None") -> None:
    """Print the failed prompts and the comparison with plain decoding. Exits with the code of the gravest failure."""
    failed = [answer.output.error for answer in tally.answers if answer.output.error is not None]
    for text in failed[:SHOWN_FAILURES]:
        console.error(text)
    if len(failed) > SHOWN_FAILURES:
        console.error(f"and {len(failed) - SHOWN_FAILURES} more prompts that could not be answered")
    if lossless is not None:
        console.status(lossless.summary)
        if not lossless.is_lossless:
            raise GateFailed(
                f"not lossless: {lossless.worst}",
                id="not-lossless",
                hint="run again with --scheduling sync --no-prefix-cache",
            )
    code = max((answer.output.exit_code for answer in tally.answers), default=0)
    if code:
        raise typer.Exit(code)
