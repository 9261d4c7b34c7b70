"""The options by which `dflash eval-acceptance` prefills in another process. Needs no torch itself."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_cli.handoff.handoff_options import ForceMismatchOption, TimeoutOption
from dflash_cli.terminal.parameters import MEASURING
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.generation.answers import Answering
    from dflash_cli.generation.loaded_pair import OpenedPair

CarrierName = Literal["file", "gloo", "nccl", "nixl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationOptions:
    """Whether prompts are prefilled in another process, and how what it hands off comes here."""

    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="Prefill in a process of its own, hand every request over, and decode here; then ask one engine the "
            "same and compare text, steps and acceptance. Exits with 3 if the hand-off changes them.",
            rich_help_panel=MEASURING,
        ),
    ] = False
    connector: Annotated[
        CarrierName | None,
        typer.Option(
            "--connector",
            help="With --disaggregated: what carries hand-offs. Default: file, a folder that goes with the run.",
            show_default=False,
            rich_help_panel=MEASURING,
        ),
    ] = None
    prefill_draft: Annotated[
        str | None,
        typer.Option(
            "--prefill-draft",
            metavar="DRAFT",
            help="With --disaggregated: prefill with another draft, or with none, to see that it is noticed; with "
            "--force-mismatch, what it costs.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    handoff_timeout: TimeoutOption = 60.0
    force_mismatch: ForceMismatchOption = False

    def check(self, workers: str | None, mode: str = "live") -> None:
        """Refuse what goes with --disaggregated without it, and what does not go with it.

        Raises:
            UsageError: naming the option.
        """
        given = {
            "--connector": self.connector,
            "--prefill-draft": self.prefill_draft,
            "--force-mismatch": self.force_mismatch,
        }
        name = next((name for name, value in given.items() if value), None)
        if name is not None and not self.disaggregated:
            raise UsageError(f"{name} goes with --disaggregated")
        if self.disaggregated and workers is not None:
            raise UsageError("--workers does not go with --disaggregated, which has two engines of its own")
        if self.disaggregated and mode == "replay":
            raise UsageError("--disaggregated does not go with --mode replay, which prefills nothing")

    def open(
        self, pair: "OpenedPair", config: EngineConfig, *, workers: str | None, threads: int | None = None
    ) -> "AbstractContextManager[Answering]":
        """Who answers: this process alone, workers, or this one after a prefill process."""
        if not self.disaggregated:
            from dflash_cli.workers.open_crew import open_answering

            return open_answering(pair, config, workers, threads=threads)
        from dflash_cli.handoff.handed_session import PrefillRequest, open_handed

        request = PrefillRequest(
            connector=self.connector or "file",
            draft=self.prefill_draft,
            timeout_s=self.handoff_timeout,
            force=self.force_mismatch,
        )
        return open_handed(pair, config, request, threads=threads)
