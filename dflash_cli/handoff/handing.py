"""The hand-offs of a run of `dflash generate`: where they go, or come from, and what came of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from dflash_cli.generation.answers import Streaming, Tally
from dflash_cli.generation.generate_document import HandoffFacts
from dflash_cli.generation.prompt_sets import PromptSet
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.handoff.handoff_folder import empty_folder
from dflash_cli.handoff.handoff_problems import without_echoes
from dflash_cli.terminal import console
from dflash_runtime.errors import (
    CapacityError,
    DFlashError,
    HandoffMismatch,
    PeerUnreachable,
)
from dflash_runtime.json_values import is_int
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.handoff import Handoff, check_handoff
from dflash_runtime.kv_transfer.vllm_prefills import find_vllm_prefills
from dflash_runtime.llm import LLM, Delta
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import RequestOutput, SamplingParams
from dflash_runtime.transfers import HandoffPlan, TransferCounts

SAME_PAIR = "both sides need the same pair, settings and prompts; --force-mismatch takes what fits of another pair's"


@dataclass(kw_only=True)
class Handing:
    """Hands the requests of a run off, each under its row's number, or lets them go on from hand-offs.

    Without a place it does neither. `waiting` are those that lie in a folder; prompts and parameters come from them.
    What vLLM has prefilled has neither, and is found by the prompts that are given.
    """

    place: str | None = None
    is_folder: bool = False
    is_sending: bool = False
    timeout_s: float = 60.0
    force: bool = False
    waiting: tuple[Handoff, ...] = ()
    is_of_vllm: bool = False
    counts: TransferCounts = field(default_factory=TransferCounts)

    @property
    def prompts(self) -> PromptSet | None:
        """What waits, as prompts with the numbers, ids and categories that they had where they were prefilled."""
        rows = [row for row, _ in sorted(self._pairs, key=lambda pair: pair[0].index)]
        return PromptSet(name=str(self.place), rows=rows) if rows else None

    @property
    def params(self) -> SamplingParams | None:
        """How the first of those that wait is to go on; None where the user says how."""
        return self.waiting[0].params if self.waiting else None

    @property
    def kept_in(self) -> str | None:
        """The folder that holds what was handed off, if it is one."""
        return self.place if self.is_sending and self.is_folder else None

    def check_pair(self, llm: LLM) -> None:
        """Refuse what waits and does not fit the pair, before anything is generated.

        Raises:
            HandoffMismatch: naming every difference of the first hand-off that does not fit.
        """
        for item in self.waiting:
            if item.finish_reason is None and not self.force:
                try:
                    check_handoff(item, llm.fingerprint, llm.engine.runner.porter.shapes(item.kv_len))
                except HandoffMismatch as error:
                    raise HandoffMismatch(error.message, path=self.place, hint=SAME_PAIR) from error

    @contextmanager
    def opened(self, llm: LLM) -> Iterator[Streaming | None]:
        """What runs prompts so that they are handed over; an address is opened together with the other side.

        Raises:
            PeerUnreachable: nobody is at the other end.
        """
        if self.place is None:
            yield None
            return
        if self.is_of_vllm:
            yield partial(self._stream_prefills, llm)
            return
        if self.is_sending and self.is_folder:
            empty_folder(self.place)
        if not self.is_folder:
            console.status(f"waiting for the other side of {self.place} ...")
        device = llm.device if llm.device.type == "cuda" else None
        connector = open_connector(self.place, "prefill" if self.is_sending else "decode", self.timeout_s, device)
        try:
            yield partial(self._stream, llm, connector)
        finally:
            connector.close()

    def _stream(
        self,
        llm: LLM,
        connector: Connector,
        prompts: list[list[int]],
        params: list[SamplingParams],
        rows: list[PromptRow],
    ) -> Iterator[Delta]:
        """See `Streaming`.

        Raises:
            DFlashError: the other side is gone or full, or what came does not fit: others would end so too.
        """
        by_index = {row.index: item for row, item in self._pairs}
        waiting = [by_index[row.index] for row in rows] if by_index else []
        plan = HandoffPlan(
            connector=connector,
            keys=tuple(item.key for item in waiting) or tuple(f"{row.index:05}" for row in rows),
            is_sending=self.is_sending,
            timeout=self.timeout_s,
            force=self.force,
            notes=tuple({"index": row.index, "id": row.id, "category": row.category} for row in rows),
        )
        given = [replace(item.params, seed=item.seed) for item in waiting] or params
        for delta in self._counted(llm, prompts, given, plan):
            if delta.output is not None and delta.output.error is not None:
                self._look_at(delta.output, partial(connector.refuse, plan.keys[delta.index]))
            yield delta

    def _stream_prefills(
        self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams], rows: list[PromptRow]
    ) -> Iterator[Delta]:
        """See `Streaming`; prompts begin with what vLLM has prefilled of them.

        Raises:
            DFlashError: see `find_vllm_prefills`.
        """
        keys, connector = find_vllm_prefills(Path(str(self.place)), prompts, llm.fingerprint)
        try:
            yield from self._counted(llm, prompts, params, HandoffPlan(connector=connector, keys=keys))
        finally:
            connector.close()

    def _counted(
        self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams], plan: HandoffPlan
    ) -> Iterator[Delta]:
        for delta in llm.stream(prompts, params, handoffs=plan):
            transfers = llm.engine.transfers
            self.counts = transfers.counts if transfers is not None else self.counts
            yield delta

    @cached_property
    def _pairs(self) -> list[tuple[PromptRow, Handoff]]:
        """What waits, each with the row that it is."""
        told = [item.note.get("index") for item in self.waiting]
        is_told = len(set(told)) == len(told) and all(map(is_int, told))
        return [
            (
                PromptRow(
                    index=item.note["index"] if is_told else place,
                    kind="prompt_token_ids",
                    value=list(item.prompt_token_ids),
                    id=item.note.get("id"),
                    category=item.note.get("category"),
                    where=f"{self.place}/{item.key}",
                ),
                item,
            )
            for place, item in enumerate(self.waiting)
        ]

    def _look_at(self, output: RequestOutput, refuse: Callable[[str], None]) -> None:
        """Stop at an error that is not of one prompt alone; let the other side know of one that is."""
        assert output.error is not None
        is_unsent = self.is_sending and bool(output.token_ids)
        is_unfit = not self.is_sending and output.exit_code == HandoffMismatch.exit_code
        if is_unsent or is_unfit:
            error = DFlashError(output.error, hint=SAME_PAIR if is_unfit else HINTS.get(output.exit_code))
            error.exit_code = output.exit_code
            raise error
        if self.is_sending:
            with suppress(DFlashError):
                refuse(output.error)

    def tell(self, tally: Tally) -> None:
        """Say what came of the hand-offs."""
        counts, size = self.counts, f"{self.counts.num_bytes / 1e6:.1f} MB"
        if self.place is None:
            return
        if self.is_sending:
            console.status(f"{plural(counts.num_sent, 'prompt')} handed off, {size}")
            return
        console.status(f"{plural(counts.num_loaded, 'prompt')} went on from hand-offs, {size}")
        if counts.num_given_up:
            console.warn(f"{plural(counts.num_given_up, 'prompt')} prefilled here instead: {counts.why_given_up}")
        if counts.problems:
            rates = tally.counts.per_pos_acceptance_rates
            seen = f"; position 1 was accepted in {rates[0]:.2f} of steps" if rates else ""
            # The draft's rows decide what is proposed, the target's what is said.
            is_said_wrongly = any("target " in text for text in counts.problems)
            harm = "the text may be wrong" if is_said_wrongly else "acceptance may be lower"
            listed = "; ".join(without_echoes(counts.problems))
            console.warn(f"went on from hand-offs that do not fit, and {harm} for it{seen}: {listed}")

    @property
    def facts(self) -> HandoffFacts | None:
        """What was handed off or loaded; None without a place."""
        counts = self.counts
        if self.place is None:
            return None
        return HandoffFacts(
            place=self.place,
            is_sending=self.is_sending,
            num_sent=counts.num_sent,
            num_loaded=counts.num_loaded,
            num_bytes=counts.num_bytes,
            num_given_up=counts.num_given_up,
            why_given_up=counts.why_given_up or None,
            problems=tuple(counts.problems),
        )


HINTS = {
    CapacityError.exit_code: "what was handed off before lies there whole; make room and run it again with --force",
    PeerUnreachable.exit_code: "start the other side with --handoff-in and the same prompts; --handoff-timeout is how "
    "long it is waited for",
}
"""Of what ends a run that hands off."""
