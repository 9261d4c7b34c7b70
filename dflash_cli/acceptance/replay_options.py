"""The options by which `dflash eval-acceptance` judges a draft on a dump, and what they open. Needs no torch itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.terminal import console
from dflash_cli.terminal.parameters import MEASURING
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_report import Evaluation
    from dflash_cli.acceptance.replay import ReplayRequest
    from dflash_cli.checkpoints.opening import Causality


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Whether a draft is judged in a run or on a dump, and on which."""

    mode: Annotated[
        Literal["live", "replay"],
        typer.Option(
            "--mode",
            help="Run the pair (live), or judge the draft along the text and hidden states of --dump, without its "
            "target (replay).",
            rich_help_panel=MEASURING,
        ),
    ] = "live"
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump",
            metavar="DIR",
            help="With --mode replay: what dflash dump, vLLM or SGLang wrote.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    dump_layer_ids: Annotated[
        str | None,
        typer.Option(
            "--dump-layer-ids",
            metavar="IDS",
            help="The layers that vLLM or SGLang was asked for, in its own numbers, such as 2,10,18: its files do not "
            "say.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    head_from: Annotated[
        str | None,
        typer.Option(
            "--head-from",
            metavar="TARGET",
            help="With --mode replay: the target whose embedding and head the draft borrows; no other weights of it "
            "are read. Default: the copies in the draft's own file.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    every: Annotated[
        int,
        typer.Option(
            "--every",
            min=0,
            metavar="N",
            help="With --mode replay: take every Nth anchor into the mean over anchors; 0 takes none.",
            rich_help_panel=MEASURING,
        ),
    ] = 1

    @property
    def is_asked(self) -> bool:
        """Whether it is a dump that the draft is judged on.

        Raises:
            UsageError: a dump without --mode replay, or the other way round.
        """
        given = {"--dump": self.dump, "--dump-layer-ids": self.dump_layer_ids, "--head-from": self.head_from}
        if self.mode == "replay" and self.dump is None:
            raise UsageError(
                "--mode replay: no dump to replay", hint="name one with --dump DIR; dflash dump writes one"
            )
        if self.mode == "live" and any(given.values()):
            raise UsageError(f"{next(name for name in given if given[name])} goes with --mode replay")
        return self.mode == "replay"

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        """The engine's layer ids as numbers.

        Raises:
            UsageError: they are none.
        """
        if self.dump_layer_ids is None:
            return None
        parts = self.dump_layer_ids.replace(" ", "").split(",")
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--dump-layer-ids {self.dump_layer_ids!r}: expected ids such as 2,10,18")
        return tuple(int(part) for part in parts)


def refuse_other_text(given: Mapping[str, Any]) -> None:
    """Refuse options that say of which text a draft is judged, or how it was made: that is the dump's.

    Raises:
        UsageError: naming the first that is given.
    """
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        raise UsageError(f"{name} does not go with --mode replay, whose text is the dump's")


def open_replay(
    draft: str | None,
    options: ReplayOptions,
    config: EngineConfig,
    *,
    causality: "Causality | None" = None,
    threads: int | None = None,
) -> "ReplayRequest":
    """Open what the options name: headers of the draft and of the target, and the dump but for its hidden states.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError, UsageError: what is not there, or cannot be read.
    """
    from dflash_cli.acceptance.dumps.dump_format import open_dump
    from dflash_cli.acceptance.replay import ReplayRequest
    from dflash_cli.checkpoints.opening import open_draft, open_target
    from dflash_cli.generation.threads import use_threads

    assert options.dump is not None
    dump = open_dump(options.dump, options.layer_ids)
    opened = open_draft(fetch_directory(draft or TINY, Role.DRAFT), causality=causality)
    opened.check_runnable()
    for text in opened.parsed.notes:
        console.note(text)
    if not dump.is_complete:
        console.warn(f"{options.dump}: is not complete; judged on the {len(dump.texts)} answers that it holds")
    if dump.note is not None:
        console.warn(dump.note)
    target = None if options.head_from is None else open_target(fetch_directory(options.head_from, Role.TARGET))
    use_threads(threads, config.device, [opened.checkpoint])
    return ReplayRequest(
        draft=opened,
        draft_reference=draft or TINY,
        dump=dump,
        head_from=target,
        config=config,
        every=options.every,
        causality=causality,
    )


def run_replay(request: "ReplayRequest") -> "Evaluation":
    """Judge the draft, saying what is being done and how quickly it was."""
    from dflash_cli.acceptance.replay import replay as judge

    console.status(f"replaying {request.dump.path} for draft {request.draft_reference} ...")
    with console.working("replaying"):
        evaluation = judge(request)
    num_steps, num_blocks = evaluation.total.counts.num_drafts, evaluation.measured["num_blocks"]
    if evaluation.seconds > 0 and num_blocks:
        console.status(
            f"{num_blocks} blocks drafted along {len(request.dump.texts)} answers, {num_steps} of them steps of a run, "
            f"{num_blocks / evaluation.seconds:.1f} blocks/s (without loading weights)"
        )
    return evaluation
