"""The hand-offs of one run of `dflash generate`: their location, their prompts, and their counts.

torch is imported when the location is opened, so that a malformed hand-off is refused before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_cli.generation.answers import Streaming, Tally
from dflash_cli.generation.prompt_sets import PromptSet
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.handoff.handoff_folder import empty_folder, read_waiting
from dflash_cli.handoff.handoff_options import HandoffOptions, names_folder
from dflash_cli.terminal import console
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import (
    CapacityError,
    DFlashError,
    HandoffMismatch,
    InvalidConfig,
    PeerUnreachable,
    RequestError,
    UsageError,
)
from dflash_runtime.kv_transfer import connector_locations
from dflash_runtime.kv_transfer.handoff import Handoff, HandoffHeader, check_handoff, check_tokens, concerns_target
from dflash_runtime.kv_transfer.transfer_counts import TransferCounts
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dflash_cli.generation.generate_document import HandoffFacts
    from dflash_runtime.kv_transfer.connector import Connector
    from dflash_runtime.llm import LLM, Delta
    from dflash_runtime.transfers import HandoffPlan

SAME_PAIR = "both sides need the same pair, settings and prompts; --force-mismatch loads the parts that fit"
HINTS = {
    CapacityError.exit_code: "the hand-offs before this one are complete; free some room and run again with --force",
    PeerUnreachable.exit_code: "start the other side with --handoff-in and the same prompts, or wait longer with "
    "--handoff-timeout",
}
"""Exit code of an error that ends a sending run -> its hint."""


@dataclass(frozen=True, slots=True)
class RowNote:
    """The note of a hand-off of this tool: number, id and category of its row."""

    index: int | None = None
    id: str | int | None = None
    category: str | None = None

    @classmethod
    def of(cls, handoff: Handoff) -> "RowNote":
        """The note of a hand-off. Empty if another program wrote the hand-off."""
        try:
            return from_json(cls, handoff.note)
        except InvalidConfig:
            return cls()


@dataclass(kw_only=True)
class Handing:
    """Hands the requests of a run off, or continues requests from hand-offs. Keys are the row numbers of prompts.

    place       folder or address of the hand-offs; None for a run without hand-offs
    waiting     the hand-offs in a folder, with their prompts and sampling parameters
    is_of_vllm  the folder contains prefills of vLLM, found by this run's prompts
    """

    place: str | None = None
    is_folder: bool = False
    is_sending: bool = False
    timeout_s: float = 60.0
    force: bool = False
    waiting: tuple[HandoffHeader, ...] = ()
    is_of_vllm: bool = False
    counts: TransferCounts = field(default_factory=TransferCounts)

    @property
    def prompts(self) -> PromptSet | None:
        """The prompts of the waiting hand-offs, with the row numbers, ids and categories of the sending run."""
        rows = [row for row, _ in sorted(self._pairs, key=lambda pair: pair[0].index)]
        return PromptSet(name=str(self.place), rows=rows) if rows else None

    @property
    def params(self) -> SamplingParams | None:
        """The sampling parameters of the first waiting hand-off; None if the user gives the parameters."""
        return self.waiting[0].handoff.params if self.waiting else None

    @property
    def kept_in(self) -> str | None:
        """The folder that receives the hand-offs; None if this run does not write to a folder."""
        return self.place if self.is_sending and self.is_folder else None

    def check_pair(self, llm: "LLM") -> None:
        """Refuse waiting hand-offs that do not fit the pair, before anything is generated.

        Raises:
            HandoffMismatch: names every difference of the first hand-off that does not fit.
            InvalidHandoff: a token id is outside the vocabulary.
        """
        for header in self.waiting:
            item = _without_content(header)
            check_tokens(item, llm.limits.vocab_size, path=f"{self.place}/{item.key}")
            if item.finish_reason is None and not self.force:
                shapes = llm.engine.runner.porter.shapes(item.kv_len)
                check_handoff(item, llm.fingerprint, shapes, path=self.place, hint=SAME_PAIR)

    @contextmanager
    def opened(self, llm: "LLM") -> Iterator[Streaming | None]:
        """Open the location, and yield the function that runs prompts with hand-offs. None without hand-offs.

        Raises:
            PeerUnreachable: the other side of an address does not open it.
        """
        if self.place is None:
            yield None
            return
        if self.is_of_vllm:
            yield partial(self._stream_prefills, llm)
            return
        from dflash_runtime.kv_transfer.connector_locations import open_connector

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
        llm: "LLM",
        connector: "Connector",
        prompts: list[list[int]],
        params: list[SamplingParams],
        rows: list[PromptRow],
    ) -> "Iterator[Delta]":
        """Run prompts with hand-offs; see `Streaming`.

        Raises:
            DFlashError: an error that other prompts would meet too. The other side is gone or full, or a hand-off does
                not fit.
        """
        from dflash_runtime.transfers import HandoffPlan

        by_index = {row.index: item for row, item in self._pairs}
        waiting = [by_index[row.index] for row in rows] if by_index else []
        plan = HandoffPlan(
            connector=connector,
            keys=tuple(item.key for item in waiting) or tuple(f"{row.index:05}" for row in rows),
            is_sending=self.is_sending,
            timeout=self.timeout_s,
            force=self.force,
            notes=tuple(to_json(RowNote(row.index, row.id, row.category)) for row in rows),
        )
        given = [replace(item.params, seed=item.seed) for item in waiting] or params
        for delta in self._counted(llm, prompts, given, plan):
            if delta.output is not None and delta.output.error is not None:
                self._look_at(delta.output, partial(connector.refuse, plan.keys[delta.index]))
            yield delta

    def _stream_prefills(
        self, llm: "LLM", prompts: list[list[int]], params: list[SamplingParams], rows: list[PromptRow]
    ) -> "Iterator[Delta]":
        """Run prompts that continue from prefills of vLLM; see `Streaming`.

        Raises:
            DFlashError: see `find_vllm_prefills`.
        """
        from dflash_runtime.kv_transfer.vllm_prefills import find_vllm_prefills
        from dflash_runtime.transfers import HandoffPlan

        keys, connector = find_vllm_prefills(Path(str(self.place)), prompts, llm.fingerprint)
        try:
            yield from self._counted(llm, prompts, params, HandoffPlan(connector=connector, keys=keys))
        finally:
            connector.close()

    def _counted(
        self, llm: "LLM", prompts: list[list[int]], params: list[SamplingParams], plan: "HandoffPlan"
    ) -> "Iterator[Delta]":
        for delta in llm.stream(prompts, params, handoffs=plan):
            transfers = llm.engine.transfers
            self.counts = transfers.counts if transfers is not None else self.counts
            yield delta

    @cached_property
    def _pairs(self) -> list[tuple[PromptRow, Handoff]]:
        """Each waiting hand-off with its row. Rows are numbered anew unless each hand-off states a different number."""
        handoffs = [header.handoff for header in self.waiting]
        notes = [RowNote.of(item) for item in handoffs]
        has_indices = len({note.index for note in notes} - {None}) == len(notes)
        return [
            (
                PromptRow(
                    index=note.index if has_indices and note.index is not None else position,
                    kind="prompt_token_ids",
                    value=list(item.prompt_token_ids),
                    id=note.id,
                    category=note.category,
                    where=f"{self.place}/{item.key}",
                ),
                item,
            )
            for position, (item, note) in enumerate(zip(handoffs, notes, strict=True))
        ]

    def _look_at(self, output: RequestOutput, refuse: Callable[[str], None]) -> None:
        """Raise an error that stops the other prompts too. For an error of one prompt, tell the other side."""
        assert output.error is not None
        is_unsent = self.is_sending and bool(output.token_ids)
        is_unfit = not self.is_sending and output.exit_code == HandoffMismatch.exit_code
        if is_unsent or is_unfit:
            hint = SAME_PAIR if is_unfit else HINTS.get(output.exit_code)
            error = DFlashError(output.error, id=output.error_id or "", hint=hint)
            error.exit_code = output.exit_code
            raise error
        if self.is_sending:
            with suppress(DFlashError):
                refuse(output.error)

    def tell(self, tally: Tally) -> None:
        """Print the counts of the hand-offs, and warn of hand-offs that did not fit."""
        counts, size = self.counts, f"{self.counts.num_bytes / 1e6:.1f} MB"
        if self.place is None:
            return
        if self.is_sending:
            console.status(f"{plural(counts.num_sent, 'prompt')} handed off, {size}")
            return
        console.status(f"{plural(counts.num_loaded, 'prompt')} continued from hand-offs, {size}")
        if counts.num_given_up:
            text = f"{plural(counts.num_given_up, 'prompt')} prefilled here instead: {counts.why_given_up}"
            console.warn(Notice(text, id="prompts-prefilled-here"))
        if counts.problems:
            rates = tally.counts.per_pos_acceptance_rates
            seen = f"position 1 was accepted in {rates[0]:.2f} of steps; " if rates else ""
            # The draft's rows affect only proposed tokens; the target's rows affect which tokens are accepted.
            has_wrong_text = any(map(concerns_target, counts.problems))
            harm = "the text may be wrong" if has_wrong_text else "acceptance may be lower"
            text = f"hand-offs did not fit, so {harm}: {seen}{'; '.join(counts.problems)}"
            console.warn(Notice(text, id="text-may-be-wrong" if has_wrong_text else "acceptance-may-be-lower"))

    @property
    def facts(self) -> "HandoffFacts | None":
        """The counts for the JSON document; None without hand-offs."""
        from dflash_cli.generation.generate_document import HandoffFacts

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


def open_handing(options: HandoffOptions, given: PromptSet | None, *, check_lossless: bool) -> Handing:
    """The hand-offs of a run with these options. Reads the headers in a folder, and writes nothing yet.

    Raises:
        RequestError: a prompt has several turns.
        UsageError: the location is malformed, or `check_lossless` with samples.
        InvalidHandoff: a hand-off in the folder is malformed or truncated.
    """
    place = options.handoff_out or options.handoff_in
    is_sending = options.handoff_out is not None
    if place is not None:
        _refuse_turns(given.rows if given is not None else ())
    is_folder = place is not None and names_folder(place)
    if place is not None and not is_folder:
        connector_locations.names_folder(place)  # raises if the address is malformed
    waiting = read_waiting(str(place)) if options.brings_prompts else ()
    if check_lossless and not all(item.handoff.params.is_greedy for item in waiting):
        raise UsageError(
            field="--check-lossless", found="sampled hand-offs",
            expected="greedy hand-offs, because a sampled token may have several right values",
        )  # fmt: skip
    return Handing(
        place=place,
        is_folder=is_folder,
        is_sending=is_sending,
        timeout_s=options.handoff_timeout,
        force=options.force_mismatch,
        waiting=waiting,
        is_of_vllm=options.is_of_vllm,
    )


def _without_content(header: HandoffHeader) -> Handoff:
    """The hand-off of a header, with tensors that have shapes only."""
    from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec

    return header.handoff.with_tensors({name: empty_like_spec(spec, "meta") for name, spec in header.tensors.items()})


def _refuse_turns(rows: Sequence[PromptRow]) -> None:
    row = next((row for row in rows if row.num_turns > 1), None)
    if row is not None:
        raise RequestError(
            f"{row.where}: found {row.num_turns} turns, expected 1: a hand-off ends at the first token of an answer",
            id="handoff-of-several-turns", field=row.where, found=row.num_turns,
            hint="hand off one turn at a time, as rows with messages",
        )  # fmt: skip
