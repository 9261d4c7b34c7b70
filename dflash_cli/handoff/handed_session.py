"""A pair with a separate prefill process. This process continues from the hand-offs and decodes."""

import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dflash_cli.generation.loaded_pair import OpenedPair, PairSession, load_session
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.handoff.handoff_options import NO_DRAFT, DisaggregationOptions
from dflash_cli.handoff.prefill_messages import Loaded, Opened, Opening, PrefillRequest
from dflash_cli.handoff.prefill_process import PrefillProcess
from dflash_cli.terminal import console
from dflash_cli.terminal.progress import working
from dflash_cli.workers.messages import WorkerSpec
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import DFlashError, HandoffMismatch, PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_locations import FOLDER, open_connector
from dflash_runtime.kv_transfer.file_connector import FileConnector
from dflash_runtime.kv_transfer.transfer_counts import TransferCounts
from dflash_runtime.llm import LLM, Delta
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan

HOST = "127.0.0.1"


@dataclass(kw_only=True)
class PrefillSide:
    """The prefill process, its connector, and the counts of all hand-offs."""

    options: DisaggregationOptions
    process: PrefillProcess
    connector: Connector
    differences: Sequence[str] = ()
    counts: TransferCounts = field(default_factory=TransferCounts)
    _keys: list[str] = field(default_factory=list)  # of all requests so far

    def __post_init__(self) -> None:
        self.process.when_lost(self._give_up)

    def stream(self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[Delta]:
        """Prefill prompts in the other process, and decode them with `llm`."""
        keys = tuple(f"{len(self._keys) + place:06}" for place in range(len(prompts)))
        self._keys += keys
        if self.process.loss is not None:
            self._give_up(self.process.loss)
        self.process.say(PrefillRequest(keys=keys, prompts=prompts, params=params))
        plan = HandoffPlan(
            connector=self.connector,
            keys=keys,
            timeout=self.options.handoff_timeout,
            force=self.options.force_mismatch,
        )
        counts = TransferCounts()
        for delta in llm.stream(prompts, params, handoffs=plan):
            transfers = llm.engine.transfers
            counts = transfers.counts if transfers is not None else counts
            if delta.output is not None and isinstance(self.connector, FileConnector):  # keep the disk from filling up
                shutil.rmtree(self.connector.folder / keys[delta.index], ignore_errors=True)
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
        """Refuse the files that the lost process no longer writes. Other connectors notice the loss themselves."""
        if isinstance(self.connector, FileConnector):
            with suppress(DFlashError):  # a full disk: the requests run into their time limit instead
                for key in list(self._keys):
                    self.connector.refuse(key, loss.message)


@dataclass(frozen=True, kw_only=True)
class HandedSession(PairSession):
    """A session with a prefill process."""

    side: PrefillSide

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams], rows: Sequence[PromptRow]
    ) -> Iterator[Delta]:
        return self.side.stream(self.llm, prompts, params)

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """`PairSession.run_settings` with a mark, so that a plain run does not resume this run's answers."""
        settings = super().run_settings(params, chat=chat)
        return {**settings, "disaggregated": True, "prefill_draft": self.side.options.prefill_draft}

    def alone(self) -> PairSession:
        """The same pair without the other process. Its prefix cache is empty, so it prefills every prompt itself."""
        self.llm.close()
        self.llm.engine.scheduler.restart()
        return PairSession(**{item.name: getattr(self, item.name) for item in fields(PairSession)})


@contextmanager
def open_handed(
    pair: OpenedPair, config: EngineConfig, options: DisaggregationOptions, *, threads: int | None = None
) -> Iterator[HandedSession]:
    """Start the prefill process, load the pair in both processes and connect them. The process ends with the block.

    Raises:
        HandoffMismatch: hand-offs of the process do not fit this pair, and `force_mismatch` is not given.
        DFlashError: an error of loading or connecting, on either side.
    """
    there, shares_gpu = _config_there(config, options)
    with ExitStack() as stack:
        process = PrefillProcess(_pair_to_load(pair, there, options, threads))
        stack.callback(process.close)
        with working("loading weights in the prefill process"):
            answer = process.hear(Loaded) if shares_gpu else None  # it reserves its part of the memory first
        session = load_session(pair, config, threads=threads)
        with working("waiting for the prefill process"):
            answer = answer or process.hear(Loaded)
        differences = session.llm.fingerprint.notices(answer.fingerprint)
        if differences and not options.force_mismatch:
            raise HandoffMismatch(
                f"hand-offs of the prefill process do not fit: {'; '.join(differences)}",
                id="prefill-does-not-fit", field="fingerprint", found=differences,
                hint="--force-mismatch loads the parts that fit, to measure the effect on acceptance",
            )  # fmt: skip
        connector = _connect(process, _location(options.carrier, stack), options.handoff_timeout, session.llm)
        stack.callback(connector.close)
        side = PrefillSide(options=options, process=process, connector=connector, differences=differences)
        console.status(f"process {process.pid} prefills the prompts and hands them over by {options.carrier}")
        yield HandedSession(side=side, **{item.name: getattr(session, item.name) for item in fields(PairSession)})


def _pair_to_load(
    pair: OpenedPair, config: EngineConfig, options: DisaggregationOptions, threads: int | None
) -> WorkerSpec:
    """The pair that the process loads."""
    own = None if pair.draft is None else str(pair.draft.checkpoint.path.resolve())
    return WorkerSpec(
        draft=own if options.prefill_draft is None else options.given_prefill_draft,
        target=str(pair.target.checkpoint.path.resolve()),
        config=config,
        overrides=pair.overrides,
        threads=threads,
    )


def _config_there(config: EngineConfig, options: DisaggregationOptions) -> tuple[EngineConfig, bool]:
    """The config of the other engine, and whether both engines share one GPU. With several GPUs it takes the next one.

    Raises:
        UsageError: nccl needs two GPUs, and this machine has one.
    """
    import torch

    there = replace(config, graphs=False)  # graphs are for decode steps
    if options.prefill_draft == NO_DRAFT:
        there = replace(there, num_draft_tokens=0, draft_sampling="greedy")
    num_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if num_gpus > 1 and config.device_map is None:
        own = int(config.device.partition(":")[2] or 0)
        return replace(there, device=f"cuda:{(own + 1) % num_gpus}"), False
    if num_gpus and options.carrier == "nccl":
        raise UsageError(
            field="--connector", found="nccl", expected="a carrier for one GPU; nccl needs two",
            hint="use --connector gloo or file",
        )  # fmt: skip
    share = config.gpu_memory_utilization / (2 if num_gpus else 1)
    return replace(there, gpu_memory_utilization=share), num_gpus > 0


def _location(carrier: str, stack: ExitStack) -> str:
    """A temporary folder, or a free address of this machine."""
    if carrier == FOLDER:
        return stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-handoffs-", ignore_cleanup_errors=True))
    with socket.create_server((HOST, 0)) as free:
        return f"{carrier}://{HOST}:{free.getsockname()[1]}"


def _connect(process: PrefillProcess, location: str, timeout_s: float, llm: LLM) -> Connector:
    """Open both sides of a location.

    Raises:
        DFlashError: either side cannot open it.
    """
    secret = secrets.token_hex(16)
    process.say(Opening(place=location, timeout_s=timeout_s, secret=secret))
    device = llm.device if llm.device.type == "cuda" else None
    try:
        connector = open_connector(location, "decode", timeout_s, device, secret)
    except PeerUnreachable:
        if process.loss is not None:
            raise process.loss from None
        raise
    try:
        process.hear(Opened)
    except DFlashError:
        connector.close()
        raise
    return connector
