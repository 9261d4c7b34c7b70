"""`dflash dump`: keep a target's text and hidden states to judge drafts without running the target again."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.engine_options import ConcurrencyOptions, EngineOptions
from dflash_cli.terminal.interruption import Interrupted, how_to_continue
from dflash_cli.terminal.options import TARGET_HELP, PromptOptions, ResumeOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Argument, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.sampling_options import SamplingOptions
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.acceptance.dumps.dump_writer import DumpPlan, DumpSummary
    from dflash_cli.generation.loaded_pair import OpenedPair, PairSession


@dataclass(frozen=True, kw_only=True)
class DumpRequest(ConcurrencyOptions, EngineOptions, SamplingOptions, PromptOptions, ResumeOptions):
    """Keep a target's text on your prompts and the hidden states of the layers that drafts read.

    eval-acceptance --mode replay then judges drafts on any machine, without the target. Prompts with text need the
    target's tokenizer. Without --prompts or --dataset, the bundled prompts are used: 64 chats (mix-64), or for the
    bundled target 64 pieces of Python.
    """

    target: Annotated[str, Argument(metavar="TARGET", flag="--target", short="-t", help=TARGET_HELP)]
    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="DIR", group=ESSENTIALS, is_setting=False, help="Folder of the dump."
        ),
    ] = None
    taps_from: Annotated[
        str | None,
        Option(
            metavar="DRAFT", group=ESSENTIALS,
            help="Keep the outputs of the layers that this draft taps, in addition to --taps.",
        ),
    ] = None  # fmt: skip
    taps: Annotated[
        tuple[int, ...],
        Option(
            metavar="LAYER,...", min=0, group=ESSENTIALS,
            help="Keep the outputs of these decoder layers, numbered from 0, such as 1,9,17.",
        ),
    ] = ()  # fmt: skip
    overhang: Annotated[
        int,
        Option(
            min=0, group=ESSENTIALS,
            help="Keep N more tokens after the end of each answer, so that whole blocks can be judged there.",
        ),
    ] = 32  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.output is None:
            raise UsageError(
                "no folder to write to", id="missing-option", field="--output", hint="name one with --output DIR"
            )
        if not self.taps and self.taps_from is None:
            raise UsageError(
                "no layers to tap", id="missing-option", field="--taps",
                hint="name a draft with --taps-from DRAFT, or layers with --taps 1,9,17",
            )  # fmt: skip


@verb(DumpRequest)
def dump(request: DumpRequest) -> "DumpSummary":
    """Run the target and write its dump.

    `DumpSummary.failed` lists the prompts that failed.

    Raises:
        UsageError: the folder exists, or the target lacks a layer. Loading raises further errors.
    """
    config = request.engine_config(num_draft_tokens=0, max_num_requests=request.concurrency)
    params = request.sampling_params(request.max_new_tokens)
    from dflash_cli.acceptance.dumps.dump_writer import DumpPlan, check_folder
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.conditions import make_conditions
    from dflash_cli.generation.loaded_pair import load_session, open_pair
    from dflash_cli.generation.prompt_sets import read_prompts

    assert request.output is not None
    check_folder(request.output, resume=request.resume, force=request.force)
    layers = _choose_taps(request)
    given = read_prompts(request.prompts, request.dataset, request.dataset_format, count=request.num_prompts)
    opened = open_pair(None, request.target, config, params=params, template_options=request.template_options)
    _check_taps(opened, layers)
    conditions = make_conditions(request.thinking, (), with_plain=False, template_options=request.template_options)
    choice = choose_prompts(request, opened, given, conditions=conditions)
    announce_loading(opened.references, device=config.device)
    session = load_session(opened, config, threads=request.threads)
    plan = DumpPlan(
        rows=choice.rows,
        params=params,
        taps=layers,
        folder=request.output,
        num_overhang=request.overhang,
        source=choice.source,
        chat=choice.chat,
        resume=request.resume,
        force=request.force,
    )
    session.warm_up(params, len(choice.rows))
    return _write(session, plan)


def command(request: DumpRequest) -> None:
    """Write the dump and print its folder."""
    summary = dump(request)
    console.show(summary, lambda: console.result(str(request.output)))
    _finish(summary)


def _choose_taps(request: DumpRequest) -> tuple[int, ...]:
    """The layers to tap, in order, each once."""
    found = set(request.taps)
    if request.taps_from is not None:
        from dflash_cli.checkpoints.opening import open_draft
        from dflash_cli.checkpoints.references import Role, fetch_directory

        found |= set(open_draft(fetch_directory(request.taps_from, Role.DRAFT)).config.target_layer_ids)
    return tuple(sorted(found))


def _check_taps(pair: "OpenedPair", layers: tuple[int, ...]) -> None:
    num_layers = pair.target.facts.num_layers
    if layers[-1] >= num_layers:
        raise UsageError(field="--taps", found=layers[-1], expected=f"layers from 0 to {num_layers - 1}")


def _write(session: "PairSession", request: "DumpPlan") -> "DumpSummary":
    from dflash_cli.acceptance.dumps.dump_writer import write_dump as write
    from dflash_cli.generation.outputs import ProgressSink

    with ExitStack() as stack:
        sink = ProgressSink(sum(row.num_turns for row in request.rows), stack, request.params.max_new_tokens)
        try:
            return write(session, request, sink)
        except OSError as error:
            if any(request.folder.glob("*.safetensors")):
                error.add_note(how_to_continue(request.folder))
            raise
        except KeyboardInterrupt as error:
            num_done = len(list(request.folder.glob("*.safetensors")))
            raise Interrupted(
                f"{plural(num_done, 'answer')} written",
                num_answers=num_done,
                kept_in=request.folder,
                hint=how_to_continue(request.folder),
            ) from error


def _finish(summary: "DumpSummary") -> None:
    """Print the number of written answers and the failed prompts.

    Raises:
        typer.Exit: a prompt failed; with the code of the gravest failure.
    """
    requests = summary.manifest.requests or ()
    num_tokens = sum(item.num_tokens for item in requests)
    console.status(
        f"{plural(summary.num_written, 'answer')} written, {len(requests)} in all, {plural(num_tokens, 'token')}"
    )
    for failure in summary.failed:
        console.error(failure.error)
    if summary.failed:
        raise typer.Exit(max(failure.exit_code for failure in summary.failed))
