"""The options by which `dflash generate` hands requests off, or goes on with them. Needs no torch itself."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.terminal.options import SamplingOptions
from dflash_cli.terminal.parameters import ENGINE, Typed
from dflash_runtime.errors import RequestError, UsageError

if TYPE_CHECKING:
    from dflash_cli.generation.prompt_sets import PromptSet
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.handoff.handing import Handing

TimeoutOption = Annotated[
    float,
    typer.Option(
        "--handoff-timeout",
        min=0.1,
        metavar="SECONDS",
        help="How long the other side of a hand-off is waited for.",
        rich_help_panel=ENGINE,
    ),
]
ForceMismatchOption = Annotated[
    bool,
    typer.Option(
        "--force-mismatch",
        help="Go on from hand-offs of another pair or without all their rows, as far as they go, and say what did not "
        "fit. Without rows of the draft acceptance falls; without the target's the text is wrong too.",
        rich_help_panel=ENGINE,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """Whether requests end after their prompts and are handed off, or go on from hand-offs."""

    handoff_out: Annotated[
        str | None,
        typer.Option(
            "--handoff-out",
            metavar="PLACE",
            help="Run prompts to their first token, and hand the requests off: to a folder, or to the process that "
            "connects to gloo://, nccl:// or nixl://HOST:PORT.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    handoff_in: Annotated[
        str | None,
        typer.Option(
            "--handoff-in",
            metavar="PLACE",
            help="Go on from what --handoff-out hands off. A folder brings its prompts and how to sample; for an "
            "address, and for a folder of vLLM's ExampleConnector, both sides are given the same.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    handoff_timeout: TimeoutOption = 60.0
    force_mismatch: ForceMismatchOption = False

    @property
    def brings_prompts(self) -> bool:
        """Whether prompts, sampling and lengths come from hand-offs that lie in a folder."""
        return self._is_folder and not self.is_of_vllm

    @property
    def is_of_vllm(self) -> bool:
        """Whether what lies in a folder are prefills of vLLM, which hold no tokens."""
        if not self._is_folder:
            return False
        from dflash_runtime.kv_transfer.vllm_prefills import has_vllm_prefills

        return has_vllm_prefills(Path(str(self.handoff_in)))

    @property
    def _is_folder(self) -> bool:
        return self.handoff_in is not None and "://" not in self.handoff_in

    def check(self, typed: Typed) -> None:
        """Refuse options that contradict each other, also where one says what is so without it.

        Raises:
            UsageError: naming one that does not go with where requests come from, or go to.
        """
        if self.handoff_out is not None and self.handoff_in is not None:
            raise UsageError("--handoff-out and --handoff-in do not go together: an engine prefills, or goes on")
        if self.force_mismatch and self.handoff_in is None:
            raise UsageError("--force-mismatch goes with --handoff-in")
        if self.force_mismatch and self.is_of_vllm:
            raise UsageError(
                "--force-mismatch does not go with prefills of vLLM, which do not say what pair they are of"
            )
        if self.handoff_out is not None:
            _refuse(typed, OF_ANSWERS, "--handoff-out, which hands requests off before they are answered")
        if self.brings_prompts:
            _refuse(typed, (*OF_PROMPTS, *OF_SAMPLING), "--handoff-in FOLDER, whose hand-offs bring their own")


OF_ANSWERS = ("--output", "--trace", "--check-lossless")
OF_PROMPTS = ("PROMPT", "--prompts", "--dataset", "--dataset-format", "--max-new-tokens", "--chat",
              "--chat-template-kwargs")  # fmt: skip
OF_SAMPLING = tuple(f"--{item.name.replace('_', '-')}" for item in fields(SamplingOptions))


def open_handing(options: HandoffOptions, given: "PromptSet | None", *, force: bool, check_lossless: bool) -> "Handing":
    """The hand-offs of a run, of which there may be none. Headers of a folder are read; nothing is written yet.

    Raises:
        RequestError: a prompt of several turns.
        UsageError, CheckpointNotFound: no such place, a folder that may not be written to, or samples that are to be
            judged.
        InvalidHandoff: a hand-off in the folder is malformed, or cut short.
    """
    from dflash_cli.handoff.handing import Handing
    from dflash_cli.handoff.handoff_folder import check_folder, read_waiting
    from dflash_runtime.kv_transfer.places import check_place

    place = options.handoff_out or options.handoff_in
    is_sending = options.handoff_out is not None
    if place is not None:
        _refuse_turns(given.rows if given is not None else ())
    is_folder = place is not None and check_place(place)
    if is_folder and is_sending:
        check_folder(str(place), force=force)
    waiting = read_waiting(str(place)) if options.brings_prompts else ()
    if check_lossless and not all(item.params.is_greedy for item in waiting):
        raise UsageError("--check-lossless: these hand-offs are sampled, and a sample has no single right value")
    return Handing(
        place=place,
        is_folder=is_folder,
        is_sending=is_sending,
        timeout_s=options.handoff_timeout,
        force=options.force_mismatch,
        waiting=waiting,
        is_of_vllm=options.is_of_vllm,
    )


def _refuse_turns(rows: "Sequence[PromptRow]") -> None:
    row = next((row for row in rows if row.num_turns > 1), None)
    if row is not None:
        raise RequestError(
            f"{row.where}: has {row.num_turns} turns, and a turn after the first builds on an answer to come",
            hint="hand off one turn at a time, as rows with messages",
        )


def _refuse(typed: Typed, names: tuple[str, ...], why: str) -> None:
    name = next((name for name in names if name in typed), None)
    if name is not None:
        raise UsageError(f"{name} does not go with {why}")
