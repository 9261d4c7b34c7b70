"""The options by which `dflash eval-acceptance` prefills in another process. Imports no torch."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.handoff.handoff_options import TransferOptions
from dflash_cli.terminal.requests import MEASURING, Option
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.generation.answers import Answering
    from dflash_cli.generation.loaded_pair import OpenedPair

CarrierName = Literal["file", "gloo", "nccl", "nixl"]


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions(TransferOptions):
    """Whether another process prefills the prompts, and how its hand-offs come here."""

    disaggregated: Annotated[
        bool,
        Option(
            group=MEASURING,
            help="Prefill in another process, hand every request over and decode here; then compare text, steps and "
            "acceptance with one engine. Exits with 3 if the hand-off changes them.",
        ),
    ] = False
    connector: Annotated[
        CarrierName | None,
        Option(
            group=MEASURING, is_setting=False,
            help="With --disaggregated: the carrier of hand-offs. Default: file, a temporary folder.",
        ),
    ] = None  # fmt: skip
    prefill_draft: Annotated[
        str | None,
        Option(
            metavar="DRAFT", group=MEASURING,
            help="With --disaggregated: prefill with another draft, or with none, to see that it is noticed; with "
            "--force-mismatch, what it costs.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.disaggregated:
            return
        for item in self.changed():
            if item.name in ("connector", "prefill_draft", "force_mismatch"):
                raise UsageError(
                    f"{item.flag} needs --disaggregated", id="option-needs-another", field=item.flag,
                    hint="add --disaggregated",
                )  # fmt: skip

    def open_answering(
        self, pair: "OpenedPair", config: EngineConfig, *, workers: str | None, threads: int | None = None
    ) -> "AbstractContextManager[Answering]":
        """The side that answers: this process alone, workers, or this process after a prefill process."""
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
