"""Room for prompt rows in captured decode steps: the layout of prompts in a tensor with a fixed address.

A step with few decoding rows and few prompt rows (`scheduling/step_load.py`) is one CUDA graph for a fixed number of
prompt rows. Prompts fill the first rows, and padding fills the others. Padding rows lack a page, so their KV is not
stored, and nobody reads them. Padding tiles of attention are empty. A padding prompt uses the padding row of the state,
which is always done.

Axis letters: T rows of the room, E prompts that may end.
"""

from collections.abc import Sequence
from functools import partial

from dflash_kernels.attention.ragged_attention import RaggedPlan, Segment, room_for_plans
from dflash_kernels.attention.ragged_config import few_rows_shape
from dflash_kernels.kv.slot_mapping import slots_of
from dflash_kernels.recurrent.delta_prompts import PIECE, chunk_ints, even
from dflash_runtime.device.graphs.decode_graphs import StepMode
from dflash_runtime.device.prefill import (
    PromptLayout,
    PromptRows,
    RaggedAttention,
    is_resumed,
    plan_chunks,
    segments_of,
)
from dflash_runtime.device.storage.state import row_of
from dflash_runtime.scheduling.batch import Chunk
from dflash_runtime.scheduling.request import Request

MOST_PROMPTS = 8
"""The most prompts of a captured step. Steps with more prompts run in pieces or uncaptured."""


class PromptRoom:
    """Room for prompts with at most `num_rows` rows in total."""

    def __init__(self, num_rows: int, layout: PromptLayout) -> None:
        self.num_rows = num_rows
        self._layout = layout
        self._padding_row = len(layout.state.done) - 1
        self._num_prompts = min(MOST_PROMPTS, self._padding_row)
        num_heads, device = layout.config.num_heads, layout.cache.pages.device
        self._plans = {
            (heads, size): room_for_plans(num_rows, self._num_prompts, num_heads, heads, plan.shape, device)
            for (heads, size), plan in self._plan(()).items()
        }
        lists = self._lists(())
        self._sizes = tuple(len(values) for values in lists)
        self._ints = layout.upload.ints([value for values in lists for value in values])

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        """Whether these chunks fit. The last chunk of a resumed request and chunks that keep snapshots never fit."""
        num_rows = sum(chunk.end - chunk.start for chunk in chunks)
        is_resuming = any(chunk.is_last and is_resumed(chunk.request) for chunk in chunks)
        is_keeping = any(chunk.keeps for chunk in chunks)
        return not (is_resuming or is_keeping) and len(chunks) <= self._num_prompts and num_rows <= self.num_rows

    def fill(self, chunks: Sequence[Chunk]) -> tuple[Request, ...]:
        """Copy chunks into the room -> the requests that end their prefill, in the order of their results."""
        self._layout.upload.over(self._ints, [value for values in self._lists(chunks) for value in values])
        return tuple(chunk.request for chunk in chunks if chunk.is_last)

    def prompts(self, mode: StepMode) -> PromptRows:
        """The prompt rows of this room, for a captured step in this mode.

        The captured step looks up the slots: the requests, and so their pages, change from step to step.
        """
        layout = self._layout
        *placed, pieces, token_ids, positions, table_rows, last_rows, rows, kv_lens, remaining = self._ints.split(
            self._sizes
        )
        slots = slots_of(layout.state.page_table, table_rows, positions, layout.cache.page_size)
        plans = {key: (plan, ints) for (key, plan), ints in zip(self._plans.items(), placed, strict=True)}
        attend = RaggedAttention(
            layout.kernels,
            layout.cache,
            layout.state.page_table,
            plans,
            layout.config.windows,
            slots,
            layout.recall(pieces, self._num_prompts, self.num_rows),
        )
        return PromptRows(
            chunks=(), token_ids=token_ids, positions=positions, slots=slots, attend=attend,
            fresh=(), mode=mode, last_rows=last_rows,
            rows=rows, kv_lens=kv_lens, remaining=remaining, anchors=rows[:0],
        )  # fmt: skip

    def _plan(self, segments: Sequence[Segment]) -> dict[tuple[int, int], RaggedPlan]:
        cache = self._layout.cache
        shape_of = partial(few_rows_shape, device=cache.pages.device, **cache.itemsizes)
        return plan_chunks(segments, self._layout.config, shape_of, cache.pages.device)

    def _lists(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """The parts of the room's tensor for these chunks, padded to its size.

        First come the plans of attention, and the chunks for recurrent layers. Then come token ids, positions and rows
        of the page table, [T] each. The last parts describe the prompts that end: last flat rows, rows of the state, KV
        lengths and remaining tokens, [E] each.
        """
        segments, padding_row = segments_of(chunks), self._padding_row
        plans = self._plan(segments)
        last = [
            (segment.first_row + segment.num_rows - 1, chunk.request)
            for segment, chunk in zip(segments, chunks, strict=True) if chunk.is_last
        ]  # fmt: skip
        by_row = [
            ([token for chunk in chunks for token in chunk.request.token_slice(chunk.start, chunk.end)], 0),
            ([position for chunk in chunks for position in range(chunk.start, chunk.end)], 0),
            ([row_of(chunk.request) for chunk in chunks for _ in range(chunk.start, chunk.end)], padding_row),
        ]
        by_prompt = [
            ([row for row, _ in last], 0),
            ([row_of(request) for _, request in last], padding_row),
            ([request.rows_to_prefill for _, request in last], 0),
            ([request.remaining(self._layout.max_model_len) for _, request in last], 0),
        ]
        return [
            *(plan.padded(self._plans[key]).ints for key, plan in plans.items()),
            self._chunks(segments),
            *(_filled(values, padding, self.num_rows) for values, padding in by_row),
            *(_filled(values, padding, self._num_prompts) for values, padding in by_prompt),
        ]

    def _chunks(self, segments: Sequence[Segment]) -> list[int]:
        """The chunks for recurrent layers; empty without such layers."""
        if self._layout.states is None:
            return []
        num_chunks, num_pieces = even(self._num_prompts), self.num_rows // PIECE + self._num_prompts
        return chunk_ints(segments, num_chunks, num_pieces, self._padding_row)


def _filled(values: list[int], padding: int, count: int) -> list[int]:
    return [*values, *[padding] * (count - len(values))]
