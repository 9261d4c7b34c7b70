"""A pair of which another process prefills the prompts, turn by turn, and this one decodes."""

import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dflash_cli.generation.loaded_pair import OpenedPair, PairSession, load_session
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.handoff.disaggregation_options import CarrierName
from dflash_cli.handoff.handoff_problems import without_echoes
from dflash_cli.handoff.prefill_side import PrefillProcess
from dflash_cli.terminal import console
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import DFlashError, HandoffMismatch, PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_locations import FOLDER, open_connector
from dflash_runtime.kv_transfer.file_connector import FileConnector
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.llm import LLM, Delta
from dflash_runtime.scheduling.request import SamplingParams
from dflash_runtime.transfers import HandoffPlan, TransferCounts

NO_DRAFT = "none"
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """How prompts are to reach this process. `draft` is another one than the pair's, or NO_DRAFT; None is the same."""

    connector: CarrierName = "file"
    draft: str | None = None
    timeout_s: float = 60.0
    force: bool = False


@dataclass(kw_only=True)
class PrefillSide:
    """The prefill process and what carries its hand-offs; `counts` are of all that was asked of it."""

    request: PrefillRequest
    process: PrefillProcess
    connector: Connector
    differences: Sequence[str] = ()
    counts: TransferCounts = field(default_factory=TransferCounts)
    _keys: list[str] = field(default_factory=list)  # all that were asked for

    def __post_init__(self) -> None:
        self.process.when_lost(self._give_up)

    def stream(self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[Delta]:
        """Have prompts prefilled in the other process, and decode them with `llm`."""
        keys = tuple(f"{len(self._keys) + place:06}" for place in range(len(prompts)))
        self._keys += keys
        if self.process.loss is not None:
            self._give_up(self.process.loss)
        self.process.say({"keys": keys, "prompts": prompts, "params": [asdict(item) for item in params]})
        plan = HandoffPlan(
            connector=self.connector, keys=keys, timeout=self.request.timeout_s, force=self.request.force
        )
        counts = TransferCounts()
        for delta in llm.stream(prompts, params, handoffs=plan):
            transfers = llm.engine.transfers
            counts = transfers.counts if transfers is not None else counts
            if delta.output is not None and isinstance(self.connector, FileConnector):
                shutil.rmtree(self.connector.folder / keys[delta.index], ignore_errors=True)  # disks are not endless
            yield delta
        self._count(counts)

    def _count(self, counts: TransferCounts) -> None:
        own = self.counts
        own.num_loaded += counts.num_loaded
        own.num_bytes += counts.num_bytes
        own.num_given_up += counts.num_given_up
        own.why_given_up = own.why_given_up or counts.why_given_up
        own.problems |= counts.problems

    def _give_up(self, loss: DFlashError) -> None:
        """Have nobody wait for files that nobody writes any more; connectors by address notice for themselves."""
        if isinstance(self.connector, FileConnector):
            with suppress(DFlashError):  # no room to write it down; then the time limit says so
                for key in list(self._keys):
                    self.connector.refuse(key, loss.message)


@dataclass(frozen=True, kw_only=True)
class HandedSession(PairSession):
    """A session whose prompts are prefilled on the other side."""

    side: PrefillSide

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams], rows: Sequence[PromptRow]
    ) -> Iterator[Delta]:
        """Run prompts that the other process prefills."""
        return self.side.stream(self.llm, prompts, params)

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """As `PairSession.run_settings`: answers of a plain run are no answers of this one."""
        asked = self.side.request
        return {**super().run_settings(params, chat=chat), "disaggregated": True, "prefill_draft": asked.draft}

    def alone(self) -> PairSession:
        """The same pair by itself, and nothing in its prefix cache of what came by hand-offs."""
        self.llm.close()
        self.llm.engine.scheduler.restart()
        return PairSession(**{item.name: getattr(self, item.name) for item in fields(PairSession)})


@contextmanager
def open_handed(
    pair: OpenedPair, config: EngineConfig, request: PrefillRequest, *, threads: int | None = None
) -> Iterator[HandedSession]:
    """Start the prefill process, load the pair in both, and let them meet; it ends with the block.

    Raises:
        HandoffMismatch: what is prefilled there does not fit here, and is not to be forced.
        DFlashError: whatever loading or meeting raises, on either side.
    """
    there, shares = _config_there(config, request)
    with ExitStack() as stack:
        process = PrefillProcess(_spec(pair, there, request, threads))
        stack.callback(process.close)
        with console.working("loading weights in the prefill process"):
            answer = process.hear() if shares else None  # it takes its part of the memory first
        session = load_session(pair, config, threads=threads)
        with console.working("waiting for the prefill process"):
            answer = answer or process.hear()
        there_is = Fingerprint.read(answer["fingerprint"])
        differences = without_echoes(session.llm.fingerprint.differences(there_is))
        if differences and not request.force:
            raise HandoffMismatch(
                f"what the prefill process hands off does not fit: {'; '.join(differences)}",
                hint="--force-mismatch takes it all the same, to see what that does to acceptance",
            )
        place = _place(request.connector, stack)
        connector = _meet(process, place, request, session.llm)
        stack.callback(connector.close)
        side = PrefillSide(request=request, process=process, connector=connector, differences=differences)
        console.status(f"prompts are prefilled in process {process.pid} and handed over by {request.connector}")
        yield HandedSession(side=side, **{item.name: getattr(session, item.name) for item in fields(PairSession)})


def _spec(pair: OpenedPair, config: EngineConfig, request: PrefillRequest, threads: int | None) -> Mapping[str, Any]:
    """The first line that the process is told: what to load."""
    own = None if pair.draft is None else str(pair.draft.checkpoint.path.resolve())
    draft = own if request.draft is None else None if request.draft == NO_DRAFT else request.draft
    return {
        "draft": draft,
        "target": str(pair.target.checkpoint.path.resolve()),
        "config": asdict(config),
        "causality": pair.causality,
        "threads": threads,
    }


def _config_there(config: EngineConfig, request: PrefillRequest) -> tuple[EngineConfig, bool]:
    """The other engine's config, and whether both share one GPU; where there are more it takes the next.

    Raises:
        UsageError: nccl, which joins two GPUs, with one.
    """
    import torch

    there = replace(config, graphs=False)  # which are of steps that decode
    if request.draft == NO_DRAFT:
        there = replace(there, num_draft_tokens=0, draft_sampling="greedy")
    num_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if num_gpus > 1 and config.device_map is None:
        own = int(config.device.partition(":")[2] or 0)
        return replace(there, device=f"cuda:{(own + 1) % num_gpus}"), False
    if num_gpus and request.connector == "nccl":
        raise UsageError(
            "--connector nccl joins two GPUs, and there is none to spare", hint="gloo and file do with one"
        )
    share = config.gpu_memory_utilization / (2 if num_gpus else 1)
    return replace(there, gpu_memory_utilization=share), num_gpus > 0


def _place(connector: str, stack: ExitStack) -> str:
    """A folder for the run, or an address of this machine that is free."""
    if connector == FOLDER:
        return stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-handoffs-", ignore_cleanup_errors=True))
    with socket.create_server((HOST, 0)) as free:
        return f"{connector}://{HOST}:{free.getsockname()[1]}"


def _meet(process: PrefillProcess, place: str, request: PrefillRequest, llm: LLM) -> Connector:
    """Open both sides of a place."""
    process.say({"place": place, "timeout_s": request.timeout_s})
    device = llm.device if llm.device.type == "cuda" else None
    try:
        connector = open_connector(place, "decode", request.timeout_s, device)
    except PeerUnreachable:
        if process.loss is not None:
            raise process.loss from None
        raise
    try:
        process.hear()
    except DFlashError:
        connector.close()
        raise
    return connector
