"""Options for hand-offs: of `dflash generate`, and of `dflash eval-acceptance --disaggregated`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from dflash_cli.documents.atomic_file import check_output
from dflash_cli.terminal.options import CarrierName, refuse_beside
from dflash_cli.terminal.parameters import ENGINE, MEASURING, Option
from dflash_cli.terminal.requests import Request, parameters_of
from dflash_cli.terminal.sampling_options import SamplingOptions
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_runtime.kv_transfer.handoff_folders import has_vllm_prefills, header_document, list_handoffs

ADDRESSES = tuple(name for name in get_args(CarrierName) if name != "file")
NO_DRAFT = "none"
OF_ANSWERS = ("output", "trace", "check_lossless")
OF_PROMPTS = ("prompt", "prompts", "dataset", "dataset_format", "num_prompts", "max_new_tokens", "chat", "thinking",
              "chat_template_kwargs")  # fmt: skip
OF_SAMPLING = (*(item.name for item in parameters_of(SamplingOptions)), "verify_width")


@dataclass(frozen=True, kw_only=True)
class TransferOptions(Request):
    """How long a run waits for a hand-off, and whether a hand-off must fit."""

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
            is_per_run=True, group=ENGINE, is_setting=False,
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
            is_per_run=True, metavar="DEST", group=ENGINE, is_setting=False,
            help="Prefill only, and hand requests off after their first token: to a folder, or to the process that "
            "connects to gloo://, nccl:// or nixl://HOST:PORT.",
        ),
    ] = None  # fmt: skip
    handoff_in: Annotated[
        str | None,
        Option(
            is_per_run=True, metavar="SOURCE", group=ENGINE, is_setting=False,
            help="Continue requests from --handoff-out. A folder contains prompts and sampling options. With an "
            "address, or a folder of vLLM's ExampleConnector, give the same prompts and options on both sides.",
        ),
    ] = None  # fmt: skip

    @property
    def has_handoffs(self) -> bool:
        """Whether requests are handed off, or continue from hand-offs."""
        return self.handoff_out is not None or self.handoff_in is not None

    @property
    def brings_prompts(self) -> bool:
        """Whether prompts, sampling parameters and lengths come from the hand-offs in a folder."""
        return self._is_folder and not self.is_of_vllm

    @property
    def is_of_vllm(self) -> bool:
        """Whether the folder contains prefills of vLLM, which lack token ids."""
        return self._is_folder and has_vllm_prefills(Path(str(self.handoff_in)))

    @property
    def _is_folder(self) -> bool:
        return self.handoff_in is not None and names_folder(self.handoff_in)

    def check_folders(self, *, force: bool) -> None:
        """Refuse a folder that hand-offs cannot be written to.

        Raises:
            UsageError: the path is a file, its parent does not exist, or the folder has files and `force` is false.
        """
        if self.handoff_out is None or not names_folder(self.handoff_out):
            return
        folder = Path(self.handoff_out)
        if folder.exists() and not folder.is_dir():
            raise UsageError("is a file, expected a new or empty folder", id="handoff-folder-is-a-file", path=folder)
        is_empty = folder.is_dir() and not any(folder.iterdir())
        check_output(folder, force=force or is_empty, is_folder=True)

    def check(self) -> None:
        super().check()
        if self._is_folder and Path(str(self.handoff_in)).is_file():
            raise UsageError(
                "is a file, expected a folder of hand-offs", id="handoff-folder-is-a-file", path=self.handoff_in,
                expected="a folder of hand-offs", hint="dflash generate --handoff-out writes one",
            )  # fmt: skip
        if self._is_folder and not Path(str(self.handoff_in)).is_dir():
            raise CheckpointNotFound(
                "no such directory", id="no-handoff-folder", path=self.handoff_in,
                hint="dflash generate --handoff-out writes one",
            )  # fmt: skip
        if self.handoff_out is not None and self.handoff_in is not None:
            raise UsageError(
                "--handoff-out and --handoff-in exclude each other: a run either prefills or decodes",
                id="options-exclude-each-other", field="--handoff-in",
            )  # fmt: skip
        if self.force_mismatch and self.handoff_in is None:
            raise UsageError("--force-mismatch needs --handoff-in", id="option-needs-another", field="--force-mismatch")
        if self.force_mismatch and self.is_of_vllm:
            raise UsageError(
                "--force-mismatch cannot be used with prefills of vLLM, because these files do not name their pair",
                id="options-exclude-each-other", field="--force-mismatch",
            )  # fmt: skip
        if self.handoff_out is not None:
            refuse_beside(self, OF_ANSWERS, "--handoff-out, which hands requests off before they are answered")
        if self.brings_prompts:
            refuse_beside(self, (*OF_PROMPTS, *OF_SAMPLING), "--handoff-in FOLDER, which contains prompts and options")
            folder = Path(str(self.handoff_in))
            for key in list_handoffs(folder):
                header_document(folder / key)


def names_folder(location: str) -> bool:
    """Whether a location of hand-offs is a folder, and neither an address nor the beginning of one."""
    return "://" not in location and location.partition(":")[0] not in ADDRESSES


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions(TransferOptions):
    """Whether another process prefills the prompts, and how its hand-offs reach this process."""

    disaggregated: Annotated[
        bool,
        Option(
            group=MEASURING,
            help="Prefill in another process, hand every request over and decode here. Then compare text, steps and "
            "acceptance with one engine, and exit with 3 if they differ.",
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
            help="With --disaggregated: prefill with another draft, or with none. This tests that the difference is "
            "detected and, with --force-mismatch, its cost.",
        ),
    ] = None  # fmt: skip

    @property
    def given_prefill_draft(self) -> str | None:
        """The draft that the other process loads; None without --prefill-draft, or for plain decoding there."""
        return None if self.prefill_draft == NO_DRAFT else self.prefill_draft

    @property
    def carrier(self) -> CarrierName:
        return self.connector or "file"

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
