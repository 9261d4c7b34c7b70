"""Options of `dflash eval-acceptance` that judge a draft on a dump. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.terminal import console
from dflash_cli.terminal.parameters import MEASURING, Option
from dflash_cli.terminal.progress import working
from dflash_cli.terminal.requests import Request
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_report import Evaluation
    from dflash_cli.acceptance.replay_request import ReplayRequest
    from dflash_cli.checkpoints.opening import Overrides


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Request):
    """Options that choose between a live run and a dump."""

    mode: Annotated[
        Literal["live", "replay"],
        Option(
            group=MEASURING,
            help="live: run the pair. replay: judge the draft without its target, on the text and hidden states of "
            "--dump.",
        ),
    ] = "live"
    dump: Annotated[
        Path | None,
        Option(
            metavar="DIR", group=MEASURING, is_setting=False,
            help="With --mode replay: the dump to read, written by dflash dump, vLLM or SGLang.",
        ),
    ] = None  # fmt: skip
    dump_layer_ids: Annotated[
        tuple[int, ...],
        Option(
            min=0, metavar="ID,...", group=MEASURING,
            help="Layer ids that vLLM or SGLang was started with, in the engine's numbering, such as 2,10,18. Required "
            "for dumps of these engines.",
        ),
    ] = ()  # fmt: skip
    head_from: Annotated[
        str | None,
        Option(
            metavar="TARGET", group=MEASURING, is_setting=False,
            help="With --mode replay: read the embedding and head from this target. Default: the copies in the draft's "
            "own file.",
        ),
    ] = None  # fmt: skip
    every: Annotated[
        int,
        Option(
            min=0, group=MEASURING,
            help="With --mode replay: use every Nth anchor for the mean over anchors. 0 leaves the mean out.",
        ),
    ] = 1  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.mode == "replay" and self.dump is None:
            raise UsageError(
                "--mode replay needs --dump", id="option-needs-another", field="--dump",
                hint="write one with dflash dump",
            )  # fmt: skip
        for item in self.changed():
            if self.mode == "live" and item.name in ("dump", "dump_layer_ids", "head_from"):
                raise UsageError(
                    f"{item.flag} needs --mode replay", id="option-needs-another", field=item.flag,
                    hint="add --mode replay",
                )  # fmt: skip


def open_replay(
    draft: str | None,
    options: ReplayOptions,
    config: EngineConfig,
    *,
    overrides: "Overrides | None" = None,
    threads: int | None = None,
) -> "ReplayRequest":
    """Open the draft, the target and the dump that the options name, without weights and hidden states.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError, UsageError: a file is missing or cannot be read.
    """
    from dflash_cli.acceptance.dumps.dump_format import open_dump
    from dflash_cli.acceptance.replay_request import ReplayRequest
    from dflash_cli.checkpoints.opening import NO_OVERRIDES, open_draft, open_target
    from dflash_cli.generation.threads import use_threads

    assert options.dump is not None
    dump = open_dump(options.dump, options.dump_layer_ids or None)
    overrides = overrides or NO_OVERRIDES
    opened = open_draft(fetch_directory(draft or TINY, Role.DRAFT), overrides=overrides)
    opened.check_runnable()
    for text in opened.parsed.notes:
        console.note(text)
    if not dump.is_complete:
        told = f"{options.dump}: the dump is incomplete; the draft is judged on its {plural(len(dump.texts), 'answer')}"
        console.warn(Notice(told, id="incomplete-dump"))
    if dump.note is not None:
        console.warn(dump.note)
    target = None if options.head_from is None else open_target(fetch_directory(options.head_from, Role.TARGET))
    request = ReplayRequest(
        draft=opened,
        draft_reference=draft or TINY,
        dump=dump,
        head_from=target,
        config=config,
        every=options.every,
        overrides=overrides,
    )
    use_threads(threads, config.device, [opened.checkpoint])
    return request


def run_replay(request: "ReplayRequest") -> "Evaluation":
    """Judge the draft, and print progress and speed."""
    from dflash_cli.acceptance.replay import replay as judge
    from dflash_cli.generation.run_facts import ReplayRun

    console.status(f"replaying {request.dump.path} for draft {request.draft_reference} ...")
    with working("replaying"):
        evaluation = judge(request)
    assert isinstance(evaluation.measured, ReplayRun)
    num_steps, num_blocks = evaluation.total.counts.num_drafts, evaluation.measured.num_blocks
    if evaluation.seconds > 0 and num_blocks:
        console.status(
            f"{plural(num_blocks, 'block')} drafted for {plural(len(request.dump.texts), 'answer')}, {num_steps} of "
            f"them in the chained walk, {num_blocks / evaluation.seconds:.1f} blocks/s (without loading weights)"
        )
    return evaluation
