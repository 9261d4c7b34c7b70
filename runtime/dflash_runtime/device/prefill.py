"""Prefill: all chunks of a step in one forward, whatever prompts they are of.

Flat rows are those of one chunk after the other. Lengths, which the host knows, go up in one copy together with the
tokens; positions and slots are made of them on the device. After the forward the first tokens of all prompts that end
in it are chosen together, and their rows of the device state switched on, as are those of resumed requests.

Axis letters: T flat rows, G chunks, E requests whose prefill ends, F those of them whose first token is chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dflash_kernels.block_attention import PLAIN, Softmax
from dflash_kernels.launch_config import ragged_shape
from dflash_kernels.ragged_attention import RaggedPlan, Segment, plan_ragged
from dflash_kernels.rope_store import KVPlace
from dflash_kernels.slot_mapping import PAD
from dflash_kernels.suite import Kernels
from dflash_runtime.device.kv import KVCache
from dflash_runtime.device.results import StepResults
from dflash_runtime.device.state import DeviceState, Uploader
from dflash_runtime.device.texts import Texts
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Chunk
from dflash_runtime.scheduling.request import Request

ChooseFirst = Callable[[Sequence[Request], Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(requests, batch rows [F], hidden states [F, hidden], positions [F]) -> token ids [F], how many are finite [F]."""

WriteContext = Callable[[Tensor | None, Tensor, Tensor], None]
"""(features [T, F], positions [T], slots [T]): stores the draft's context KV."""


@dataclass(frozen=True, slots=True)
class RaggedAttention:
    """An `Attend` over the target's cache for one forward of flat rows, whose KV it stores as well."""

    kernels: Kernels
    cache: KVCache
    page_table: Tensor  # [B, P], of all batch rows
    plans: Mapping[tuple[int, int], tuple[RaggedPlan, Tensor]]  # by KV heads and their size
    windows: tuple[int | None, ...]
    slots: Tensor  # [T]

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[T, H, D], [T, KV, D] twice -> [T, H, D]."""
        self.kernels.kv_store(keys, values, *self.place(layer))
        return self.read(layer, query, keys, values, softmax)

    def place(self, layer: int) -> KVPlace:
        """See `models.layers.Attend`."""
        return KVPlace(*self.cache.layers[layer], self.slots)

    def read(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """See `models.layers.Attend`."""
        return self.kernels.ragged_attention(
            query,
            keys,
            values,
            *self.cache.layers[layer],
            self.page_table,
            *self.plans[keys.shape[1], keys.shape[2]],
            window=self.windows[layer],
            softmax=softmax,
        )


@dataclass(frozen=True, slots=True)
class Prefill:
    """Runs chunks through the target with what the runner has for it."""

    target: Target
    kernels: Kernels
    cache: KVCache
    texts: Texts | None
    state: DeviceState
    upload: Uploader
    taps: tuple[int, ...]
    max_model_len: int
    choose_first: ChooseFirst
    write_context: WriteContext

    def fill(self, chunks: Sequence[Chunk]) -> tuple[list[Request], Tensor | None]:
        """Queue chunks -> requests whose first token is chosen, and their packed results; None where there are none.

        The chunk of a resumed request may be empty: every row up to its anchor was in the prefix cache.
        """
        filled = [chunk for chunk in chunks if chunk.start < chunk.end]
        plans = self._plans(filled)
        plan = next(iter(plans.values()))
        ended = sorted((chunk.request for chunk in chunks if chunk.is_last), key=_is_resumed)
        fresh = [request for request in ended if not _is_resumed(request)]
        *placed, ends, shifts, table_rows, rows, kv_lens, remaining, anchors, last_rows, token_ids = self.upload.lists(
            *(item.ints for item in plans.values()),
            [segment.first_row + segment.num_rows for segment in plan.segments],
            [segment.context_len - segment.first_row for segment in plan.segments],
            [segment.table_row for segment in plan.segments],
            [_row(request) for request in ended],
            [request.rows_to_prefill for request in ended],
            [request.remaining(self.max_model_len) for request in ended],
            [request.output_token_ids[-1] for request in ended[len(fresh) :]],
            [segment.first_row + segment.num_rows - 1 for segment, chunk in zip(plan.segments, filled, strict=True)
             if chunk.is_last and not _is_resumed(chunk.request)],
            [token for chunk in filled for token in chunk.request.token_slice(chunk.start, chunk.end)],
        )  # fmt: skip
        is_done, packed = torch.zeros_like(rows, dtype=torch.bool), None
        if filled:
            positions, slots = self._locate(len(token_ids), ends, shifts, table_rows)
            if self.texts is not None:
                hidden, features = self.texts.fill(filled, token_ids, self.taps)
            else:
                windows = self.target.config.windows
                cut = {shape: (item, ints) for (shape, item), ints in zip(plans.items(), placed, strict=True)}
                attend = RaggedAttention(self.kernels, self.cache, self.state.page_table, cut, windows, slots)
                hidden, features = self.target(token_ids, positions, attend, self.taps)
            self.write_context(features, positions, slots)
        if fresh:
            results = self._first_tokens(fresh, rows, hidden[last_rows], positions[last_rows], remaining)
            is_done = torch.cat((results.is_done, is_done[len(fresh) :]))
            anchors = torch.cat((results.token_ids[:, 0], anchors))
            remaining = torch.cat((remaining[: len(fresh)] - 1, remaining[len(fresh) :]))
            packed = results.pack()
        if ended:
            self.state.activate(rows, kv_lens, anchors, remaining, is_done)
        return fresh, packed

    def _plans(self, chunks: Sequence[Chunk]) -> dict[tuple[int, int], RaggedPlan]:
        """The chunks' rows one after the other, cut for each number and size of the target's KV heads."""
        lens = [chunk.end - chunk.start for chunk in chunks]
        firsts = accumulate(lens, initial=0)
        segments = [
            Segment(first, length, chunk.start, _row(chunk.request))
            for first, length, chunk in zip(firsts, lens, chunks, strict=False)
        ]
        config, pages = self.target.config, self.cache.pages
        longest_context = max((chunk.start for chunk in chunks), default=0)
        plans = {}
        for heads, size in dict.fromkeys(config.kv_shapes):
            shape = ragged_shape(size, pages.element_size(), longest_context, pages.device)
            plans[heads, size] = plan_ragged(segments, config.num_heads, heads, shape, pages.device)
        return plans

    def _locate(self, num_rows: int, ends: Tensor, shifts: Tensor, table_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Position and slot of each flat row, [T] each, from what is known of each chunk, [G]."""
        flat = torch.arange(num_rows, device=ends.device)
        chunk = torch.bucketize(flat, ends, right=True)
        positions = flat + shifts[chunk]
        page_size = self.cache.page_size
        pages = self.state.page_table[table_rows[chunk], positions // page_size]
        return positions, torch.where(pages > 0, pages * page_size + positions % page_size, PAD)

    def _first_tokens(
        self, requests: Sequence[Request], rows: Tensor, hidden: Tensor, positions: Tensor, remaining: Tensor
    ) -> StepResults:
        """Choose the tokens after prompts from hidden states [F, hidden] of their last rows.

        `rows` and `remaining` are those of all requests whose prefill ends, these before the resumed ones: [E].
        """
        rows, remaining = rows[: len(requests)], remaining[: len(requests)]
        chosen, num_finite = self.choose_first(requests, rows, hidden, positions)
        zero, nothing = torch.zeros_like(rows), rows.new_empty((len(rows), 0))
        accepted = self.kernels.accept_block(nothing, chosen[:, None], zero, self.state.stop_ids[rows], remaining)
        return StepResults(
            num_committed=accepted.num_committed,
            num_accepted=zero,
            is_drafting=zero,
            is_done=accepted.is_stopped | (remaining <= 1),
            num_finite=num_finite,
            generations=self.state.generations[rows],
            token_ids=chosen[:, None],
            draft_ids=nothing,
        )


def _is_resumed(request: Request) -> bool:
    """Whether it has tokens already, and goes on from its last one."""
    return bool(request.output_token_ids)


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
