"""`dflash dump`: keep a target's text and hidden states, so that drafts are judged without running it again."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import (
    ChatOption,
    DatasetFormatOption,
    DatasetOption,
    EngineOptions,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    PromptsOption,
    SamplingOptions,
    TemplateOption,
    ThreadsOption,
)
from dflash_cli.terminal.parameters import ESSENTIALS
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.acceptance.dumps.dump_writer import DumpRequest, DumpSummary
    from dflash_cli.generation.loaded_pair import PairSession

TargetArg = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="Target: a directory, a hub repository org/repo[@revision], or the bundled one: tiny."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder to write the dump to.", rich_help_panel=ESSENTIALS),
]
TapsFromOption = Annotated[
    str | None,
    typer.Option(
        "--taps-from",
        metavar="DRAFT",
        help="Keep the hidden states that this draft reads, and with others those of --taps.",
        rich_help_panel=ESSENTIALS,
    ),
]
TapsOption = Annotated[
    str | None,
    typer.Option(
        "--taps",
        metavar="LAYERS",
        help="Keep the outputs of these decoder layers, counted from 0, such as 1,9,17.",
        rich_help_panel=ESSENTIALS,
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts",
        min=1,
        metavar="N",
        help="Dump a sample of N prompts, drawn from each category in proportion by --seed. Default: all.",
        rich_help_panel=ESSENTIALS,
    ),
]
OverhangOption = Annotated[
    int,
    typer.Option(
        "--overhang",
        min=0,
        metavar="N",
        help="Keep N tokens past each answer's end, so that the last blocks can be judged to their ends.",
        rich_help_panel=ESSENTIALS,
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on from the answers that DIR holds.", rich_help_panel=ESSENTIALS),
]


def dump(
    engine: EngineOptions,
    sampling: SamplingOptions,
    target: TargetArg,
    out: OutOption = None,
    taps_from: TapsFromOption = None,
    taps: TapsOption = None,
    prompts: PromptsOption = None,
    dataset: DatasetOption = None,
    dataset_format: DatasetFormatOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    overhang: OverhangOption = 32,
    chat: ChatOption = None,
    chat_template_kwargs: TemplateOption = None,
    resume: ResumeOption = False,
    threads: ThreadsOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep a target's text on your prompts and the hidden states of the layers that drafts read.

    A draft is then judged by eval-acceptance --mode replay, without the target, on any machine. Prompts with text take
    the target's tokenizer. Without --prompts or --dataset, the bundled prompts are used: 64 chats (mix-64), or for the
    bundled target 64 pieces of Python.
    """
    if out is None:
        raise UsageError("no folder to write to", hint="name one with --out DIR")
    if engine.num_speculative_tokens or sampling.verify_width is not None:
        raise UsageError("a dump is of the target alone; leave out --num-speculative-tokens and --verify-width")
    params, config = sampling.params(max_new_tokens), replace(engine.config(), num_draft_tokens=0)
    from dflash_cli.acceptance.dumps.dump_writer import DumpRequest, check_folder
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.loaded_pair import open_session
    from dflash_cli.generation.prompt_sets import read_prompts

    check_folder(out, resume=resume, force=force)
    layers = _choose_taps(taps, taps_from)
    given = read_prompts(prompts, dataset, dataset_format, count=num_prompts)
    announce_loading(None, target, plain=True, device=config.device)
    session = open_session(None, target, config, template_options=chat_template_kwargs, threads=threads)
    _check_taps(session, layers)
    session.check_params(params)
    choice = choose_prompts(session, given, chat=chat, count=num_prompts, seed=sampling.seed)
    request = DumpRequest(
        rows=choice.rows,
        params=params,
        taps=layers,
        folder=out,
        num_overhang=overhang,
        source=choice.source,
        chat=choice.chat,
        resume=resume,
        force=force,
    )
    session.warm_up(params, len(choice.rows))
    summary = _write(session, request)
    if as_json:
        console.result_json({**summary.manifest, "failed": [item.to_json() for item in summary.failures]})
    else:
        console.result(str(out))
    _finish(summary)


def _choose_taps(taps: str | None, draft: str | None) -> tuple[int, ...]:
    """The layers to tap, in order, each once."""
    found: set[int] = set()
    if taps is not None:
        parts = taps.replace(" ", "").split(",")
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--taps {taps!r}: expected layers counted from 0, such as 1,9,17")
        found |= {int(part) for part in parts}
    if draft is not None:
        from dflash_cli.checkpoints.opening import open_draft
        from dflash_cli.checkpoints.references import Role, fetch_directory

        found |= set(open_draft(fetch_directory(draft, Role.DRAFT)).config.target_layer_ids)
    if not found:
        raise UsageError("no layers to tap", hint="name a draft with --taps-from DRAFT, or layers with --taps 1,9,17")
    return tuple(sorted(found))


def _check_taps(session: "PairSession", layers: tuple[int, ...]) -> None:
    num_layers = session.target.facts.num_layers
    if layers[-1] >= num_layers:
        raise UsageError(f"--taps {layers[-1]}: the target has layers 0..{num_layers - 1}")


def _write(session: "PairSession", request: "DumpRequest") -> "DumpSummary":
    from dflash_cli.acceptance.dumps.dump_writer import write_dump
    from dflash_cli.generation.outputs import ProgressSink

    with ExitStack() as stack:
        sink = ProgressSink(sum(row.num_turns for row in request.rows), stack)
        try:
            return write_dump(session, request, sink)
        except KeyboardInterrupt as error:
            num_done = len(list(request.folder.glob("*.safetensors")))
            raise Interrupted(
                f"{num_done} answers are kept in {request.folder}",
                hint="give the same command with --resume to go on",
            ) from error


def _finish(summary: "DumpSummary") -> None:
    """Say how much was written, and name what could not be answered.

    Raises:
        typer.Exit: with the code of the gravest failure.
    """
    requests = summary.manifest["requests"]
    num_tokens = sum(item["num_tokens"] for item in requests)
    console.status(f"{summary.num_written} answers written, {len(requests)} in all, {num_tokens} tokens")
    for failure in summary.failures:
        console.error(failure.error)
    if summary.failures:
        raise typer.Exit(max(failure.exit_code for failure in summary.failures))
