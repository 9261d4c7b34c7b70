"""The options by which `dflash generate` hands requests off, or continues hand-offs. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal.options import SamplingOptions, refuse_beside
from dflash_cli.terminal.requests import ENGINE, Option, Request, parameters_of
from dflash_runtime.errors import RequestError, UsageError

if TYPE_CHECKING:
    from dflash_cli.generation.prompt_sets import PromptSet
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.handoff.handing import Handing


@dataclass(frozen=True, kw_only=True)
class TransferOptions(Request):
    """How long a hand-off is waited for, and whether it must fit."""

    handoff_timeout: Annotated[
        float,
        Option(
            min=0.1, metavar="SECONDS", group=ENGINE, is_setting=False,
            help="Seconds to wait for the other side of a hand-off.",
        ),
    ] = 60.0  # fmt: skip
    force_mismatch: Annotated[
        bool,
        Option(
            group=ENGINE, is_setting=False,
            help="Continue hand-offs of another pair or with missing rows as far as they go, and list the differences. "
            "Missing draft rows lower acceptance; missing target rows make the text wrong.",
        ),
    ] = False  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HandoffOptions(TransferOptions):
    """Whether requests are handed off after prefill, or continue from hand-offs."""

    handoff_out: Annotated[
        str | None,
        Option(
            metavar="DEST", group=ENGINE, is_setting=False,
            help="Prefill only, and hand requests off after their first token: to a folder, or to the process that "
            "connects to gloo://, nccl:// or nixl://HOST:PORT.",
        ),
    ] = None  # fmt: skip
    handoff_in: Annotated[
        str | None,
        Option(
            metavar="SOURCE", group=ENGINE, is_setting=False,
            help="Continue requests from --handoff-out. A folder holds prompts and sampling options; for an address, "
            "and for a folder of vLLM's ExampleConnector, both sides are given the same.",
        ),
    ] = None  # fmt: skip

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

    def check(self) -> None:
        super().check()
        if self.handoff_out is not None and self.handoff_in is not None:
            raise UsageError(
                "--handoff-out and --handoff-in exclude each other: an engine prefills or decodes",
                id="options-exclude-each-other", field="--handoff-in",
            )  # fmt: skip
        if self.force_mismatch and self.handoff_in is None:
            raise UsageError("--force-mismatch needs --handoff-in", id="option-needs-another", field="--force-mismatch")
        if self.force_mismatch and self.is_of_vllm:
            raise UsageError(
                "--force-mismatch does not go with prefills of vLLM: these files do not name their pair",
                id="options-exclude-each-other", field="--force-mismatch",
            )  # fmt: skip
        if self.handoff_out is not None:
            refuse_beside(self, OF_ANSWERS, "--handoff-out, which hands requests off before they are answered")
        if self.brings_prompts:
            refuse_beside(self, (*OF_PROMPTS, *OF_SAMPLING), "--handoff-in FOLDER, which holds prompts and options")


OF_ANSWERS = ("output", "trace", "check_lossless")
OF_PROMPTS = ("prompt", "prompts", "dataset", "dataset_format", "num_prompts", "max_new_tokens", "chat", "thinking",
              "chat_template_kwargs")  # fmt: skip
OF_SAMPLING = (*(item.name for item in parameters_of(SamplingOptions)), "verify_width")


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
    from dflash_runtime.kv_transfer.connector_locations import names_folder

    place = options.handoff_out or options.handoff_in
    is_sending = options.handoff_out is not None
    if place is not None:
        _refuse_turns(given.rows if given is not None else ())
    is_folder = place is not None and names_folder(place)
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
