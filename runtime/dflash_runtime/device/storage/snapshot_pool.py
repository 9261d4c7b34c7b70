"""Snapshots of recurrent states on the device: where a hit of the prefix cache continues a text.

A snapshot is the state of all recurrent layers after the last row of a page, and the rows that the next row is
convolved with. The host decides which slot holds which snapshot (`scheduling/snapshots.py`). All copies are queued like
launches, so a slot may be read and then overwritten in one step, and nothing waits for the device.

A chunk of a prompt with boundaries to keep runs in rounds: each round ends at the next boundary of every such chunk.
The rounds differ only in the delta rule; all other launches run the whole chunk. A decode step keeps the state at the
last boundary that a block passed, in the spare slot of its request.

Axis letters: L layers, B texts, N slots, S taps, C channels, K snapshots kept in a step, R requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment
from dflash_kernels.recurrent.delta_prompts import PromptChunks, chunk_ints
from dflash_kernels.recurrent.state_snapshots import LayerMemories, PassedRows, Snapshots
from dflash_kernels.steps.step_rows import StepRows
from dflash_runtime.device.storage.state import DeviceState, Uploader, row_of, rows_of
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.batch import Chunk
from dflash_runtime.scheduling.request import Request
from dflash_runtime.target_config import RecurrenceConfig

NO_SLOT = -1


class SnapshotPool:
    """`num_slots` snapshots of one engine. `spares` [B] is the slot that decode steps of a text write, or NO_SLOT."""

    def __init__(
        self, config: RecurrenceConfig, memories: LayerMemories, num_slots: int, page_size: int, placement: Placement
    ) -> None:
        num_layers, num_texts, *sizes = memories.states.shape
        self.num_slots, self.page_size = num_slots, page_size
        self.snapshots = Snapshots(
            memories.states.new_zeros(num_slots, num_layers, *sizes),
            memories.rings.new_zeros(num_slots, num_layers, config.num_taps - 1, config.num_channels),
        )
        self.spares = torch.full((num_texts,), NO_SLOT, dtype=torch.int64, device=placement.device)
        self._memories, self._kernels = memories, placement.kernels

    def admit(self, requests: Sequence[Request], state_lens: Tensor, upload: Uploader) -> None:
        """Give rows their spare slots, and continue the texts of hits from their snapshots."""
        if not self.num_slots or not requests:
            return
        hits = [(row_of(request), *request.restored) for request in requests if request.restored is not None]
        rows, spares, *restored = upload.lists(
            rows_of(requests),
            [NO_SLOT if request.spare is None else request.spare for request in requests],
            *([item[field] for item in hits] for field in range(3)),
        )
        self.spares[rows] = spares
        if hits:
            texts, lens, slots = restored
            self._restore(texts, lens, slots)
            state_lens[texts] = lens

    def _restore(self, texts: Tensor, lens: Tensor, slots: Tensor) -> None:
        states, latest = self.snapshots.states[slots], self.snapshots.latest[slots]
        self._memories.states[:, texts] = states.transpose(0, 1)
        rings, num_latest = self._memories.rings, latest.shape[2]
        places = (lens[:, None] - num_latest + torch.arange(num_latest, device=lens.device)) % rings.shape[2]
        rings[:, texts[:, None], places] = latest.transpose(0, 1)

    def keep_passed(self, texts: Tensor, step: StepRows, state: DeviceState, state_lens: Tensor) -> None:
        """Keep the state of each text [R] at the last boundary that the accepted rows of its block passed."""
        if self.num_slots:
            passed = PassedRows(texts, self.spares[texts], state_lens[texts], step.kv_lens, state.kv_lens[texts])
            self._kernels.keep_passed(self._memories, passed, self.snapshots, self.page_size)


@dataclass(frozen=True, slots=True)
class Round:
    """Parts of chunks that run in one launch, and the snapshots to write afterwards."""

    prompts: PromptChunks
    texts: Tensor  # [K]
    slots: Tensor  # [K]


@dataclass(frozen=True, slots=True)
class PromptKeeps:
    """The snapshots that the chunks of a step write."""

    snapshots: Snapshots
    rounds: tuple[Round, ...]
    slots: Tensor  # [K * (S - 1)], the slot for each row before a boundary
    columns: Tensor  # [K * (S - 1)], the index of the row in the snapshot
    flat: Tensor  # [K * (S - 1)], its flat row, if the row is in this step
    earlier: tuple[Tensor, Tensor, Tensor] | None  # whether the row is in this step, else its text and ring index

    @classmethod
    def lay_out(
        cls, pool: SnapshotPool, chunks: Sequence[Chunk], segments: Sequence[Segment], ring_rows: int, upload: Uploader
    ) -> "PromptKeeps":
        """The snapshots of chunks with these flat rows. At least one chunk keeps a snapshot."""
        rounds = [_round(chunks, segments, number) for number in range(1 + max(len(chunk.keeps) for chunk in chunks))]
        rounds = [(parts, kept) for parts, kept in rounds if parts]
        rows = _latest_rows(chunks, segments, pool.snapshots.latest.shape[2], ring_rows)
        sent = upload.lists(
            *(ints for parts, kept in rounds for ints in (chunk_ints(parts), *_columns(kept, 2))), *_columns(rows, 6)
        )
        by_round = [sent[3 * number : 3 * number + 3] for number in range(len(rounds))]
        slots, columns, flat, is_here, texts, places = sent[3 * len(rounds) :]
        return cls(
            pool.snapshots,
            tuple(
                Round(PromptChunks.cut(ints, len(parts)), texts, slots)
                for (parts, _), (ints, texts, slots) in zip(rounds, by_round, strict=True)
            ),
            slots, columns, flat,
            None if all(row[3] for row in rows) else (is_here.bool(), texts, places),
        )  # fmt: skip

    def keep_rows(self, index: int, rows: Tensor, ring: Tensor) -> None:
        """Keep the inputs of a layer's convolution before each boundary. The ring still has the rows before the step.

        index  the number of the recurrent layer
        rows   [T, C]
        ring   [B, M, C]
        """
        latest = rows[self.flat]
        if self.earlier is not None:
            is_here, texts, places = self.earlier
            latest = torch.where(is_here[:, None], latest, ring[texts, places])
        self.snapshots.latest[:, index].index_put_((self.slots, self.columns), latest)

    def keep_states(self, index: int, states: Tensor, done: Round) -> None:
        """Keep the states [B, H, K, V] of a layer after a round."""
        if len(done.slots):
            self.snapshots.states[:, index].index_put_((done.slots,), states[done.texts])


def _round(
    chunks: Sequence[Chunk], segments: Sequence[Segment], number: int
) -> tuple[list[Segment], list[tuple[int, int]]]:
    """The parts of chunks after `number` boundaries, and the text and slot of each snapshot at their ends."""
    parts, kept = list[Segment](), list[tuple[int, int]]()
    for chunk, segment in zip(chunks, segments, strict=True):
        ends = [keep.position for keep in chunk.keeps]
        if number > len(ends):
            continue
        begin, end = (chunk.start, *ends)[number], (*ends, chunk.end)[number]
        if begin < end:
            first = segment.first_row + begin - chunk.start
            parts.append(Segment(first, end - begin, begin, segment.table_row))
        if number < len(ends):
            kept.append((segment.table_row, chunk.keeps[number].slot))
    return parts, kept


def _latest_rows(
    chunks: Sequence[Chunk], segments: Sequence[Segment], num_latest: int, ring_rows: int
) -> list[tuple[int, ...]]:
    """Slot, column, flat row, whether it is in this step, text, and place in the ring of each row before a boundary."""
    return [
        (keep.slot, column, max(0, segment.first_row + position - chunk.start), position >= chunk.start,
         segment.table_row, position % ring_rows)
        for chunk, segment in zip(chunks, segments, strict=True)
        for keep in chunk.keeps
        for column, position in enumerate(range(keep.position - num_latest, keep.position))
    ]  # fmt: skip


def _columns(rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The columns of rows of `count` integers."""
    return [[row[field] for row in rows] for field in range(count)]
