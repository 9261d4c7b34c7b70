"""The prompt rows of a step: the chunks of all its prompts, laid out as flat rows for one forward of the target.

The rows of one chunk follow the rows of another. Token ids and lengths go to the device in one copy. The device
computes positions and slots from them.

A fresh request starts without output tokens: the step chooses the first one. A resumed request was preempted, and
continues from its last output token.

Axis letters: T flat rows, G chunks, E requests that end their prefill, F fresh requests among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import RaggedPlan, Segment, plan_ragged
from dflash_kernels.attention.ragged_config import RaggedShape, ragged_shape
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.recurrent.delta_prompts import PromptChunks, chunk_ints
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_kernels.steps.row_changes import ReadyRows
from dflash_kernels.suite import Kernels
from dflash_runtime.device.graphs.decode_graphs import StepMode
from dflash_runtime.device.storage.kv import KVCache
from dflash_runtime.device.storage.recurrent import PromptRecall, RecurrentStates
from dflash_runtime.device.storage.snapshot_pool import PromptKeeps
from dflash_runtime.device.storage.state import DeviceState, Uploader, row_of, rows_of
from dflash_runtime.models.layers import Attend, Recall
from dflash_runtime.scheduling.batch import Chunk
from dflash_runtime.scheduling.request import Request
from dflash_runtime.target_config import TargetConfig


@dataclass(frozen=True, slots=True)
class RaggedAttention(Attend):
    """An `Attend` over the target's cache for one forward of flat rows. It stores their KV too."""

    kernels: Kernels
    cache: KVCache
    page_table: Tensor  # [B, P], of all rows of the state
    plans: Mapping[tuple[int, int], tuple[RaggedPlan, Tensor]]  # by KV heads and head size
    windows: tuple[int | None, ...]
    slots: Tensor  # [T]
    memory: Recall | None = None

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`."""
        assert self.memory is not None
        return self.memory.recall(layer, rows, taps, gates, out)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[T, H, D], [T, KV, D] twice -> [T, H, D]."""
        keys, values = self.kernels.kv_store(keys, values, *self.place(layer))
        return self.read(layer, query, keys, values, softmax)

    def place(self, layer: int) -> KVPlace:
        """See `models.layers.Attend`."""
        return self.cache.place(layer, self.slots)

    def read(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: Softmax = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `models.layers.Attend`; writes into `out` [T, H, D] if it is given."""
        return self.kernels.ragged_attention(
            query,
            keys,
            values,
            *self.cache.layers[layer],
            self.page_table,
            *self.plans[keys.shape[1], keys.shape[2]],
            window=self.windows[layer],
            softmax=softmax,
            scales=self.cache.scales_of(layer),
            out=out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """The chunks of a step as flat rows, and the requests that end their prefill with them."""

    chunks: tuple[Chunk, ...]  # without empty chunks
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    attend: RaggedAttention
    fresh: tuple[Request, ...]  # [F]
    mode: StepMode  # how first tokens are sampled
    last_rows: Tensor  # [F] last flat row of each fresh request
    rows: Tensor  # [E] rows of the state, fresh requests before resumed ones
    kv_lens: Tensor  # [E]
    remaining: Tensor  # [E]
    anchors: Tensor  # [E - F] of resumed requests

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_fresh(self) -> int:
        """F: rows of the state that get a first token."""
        return len(self.last_rows)

    @property
    def wanted(self) -> Tensor:
        """The flat rows that need final hidden states: `last_rows` [F], or row 0 without fresh requests."""
        return self.last_rows if self.num_fresh else self.last_rows.new_zeros(1)

    @property
    def ready(self) -> ReadyRows:
        """The rows of the state to switch on. Their requests decode from the next step on."""
        return ReadyRows(self.rows, self.kv_lens, self.remaining, self.anchors)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Lays out the prompt rows of one runner's steps."""

    config: TargetConfig
    kernels: Kernels
    cache: KVCache
    state: DeviceState
    upload: Uploader
    max_model_len: int
    states: RecurrentStates | None = None

    def lay_out(self, chunks: Sequence[Chunk]) -> PromptRows:
        """The chunks of a step as flat rows, [0] if every chunk is empty.

        The chunk of a resumed request is empty if the prefix cache has every row up to its anchor.
        """
        filled = tuple(chunk for chunk in chunks if chunk.start < chunk.end)
        longest_context = max((chunk.start for chunk in filled), default=0)
        device = self.cache.pages.device
        shape_of = partial(ragged_shape, longest_context=longest_context, device=device, **self.cache.itemsizes)
        plans = plan_chunks(segments_of(filled), self.config, shape_of, device)
        plan = next(iter(plans.values()))
        ended = sorted((chunk.request for chunk in chunks if chunk.is_last), key=is_resumed)
        num_fresh = sum(not is_resumed(request) for request in ended)
        pieces = chunk_ints(plan.segments, padding_text=len(self.state.done) - 1) if self.states is not None else []
        upload = self.upload.lists
        *placed, cuts, ends, shifts, table_rows, rows, kv_lens, remaining, anchors, last_rows, token_ids = upload(
            *(item.ints for item in plans.values()),
            pieces,
            [segment.first_row + segment.num_rows for segment in plan.segments],
            [segment.context_len - segment.first_row for segment in plan.segments],
            [segment.table_row for segment in plan.segments],
            rows_of(ended),
            [request.rows_to_prefill for request in ended],
            [request.remaining(self.max_model_len) for request in ended],
            [request.output_token_ids[-1] for request in ended[num_fresh:]],
            [segment.first_row + segment.num_rows - 1 for segment, chunk in zip(plan.segments, filled, strict=True)
             if chunk.is_last and not is_resumed(chunk.request)],
            [token for chunk in filled for token in chunk.request.token_slice(chunk.start, chunk.end)],
        )  # fmt: skip
        positions, slots = self.kernels.locate_rows(
            self.state.page_table, ends, shifts, table_rows, len(token_ids), self.cache.page_size
        )
        cut = {shape: (item, ints) for (shape, item), ints in zip(plans.items(), placed, strict=True)}
        keeps = self._keeps(filled, plan.segments)
        memory = self.recall(cuts, len(plan.segments), len(token_ids), keeps)
        attend = RaggedAttention(
            self.kernels, self.cache, self.state.page_table, cut, self.config.windows, slots, memory
        )
        fresh = tuple(ended[:num_fresh])
        return PromptRows(
            chunks=filled, token_ids=token_ids, positions=positions, slots=slots, attend=attend,
            fresh=fresh, mode=StepMode.of(fresh), last_rows=last_rows,
            rows=rows, kv_lens=kv_lens, remaining=remaining, anchors=anchors,
        )  # fmt: skip

    def recall(
        self, ints: Tensor, num_chunks: int, num_rows: int, keeps: PromptKeeps | None = None
    ) -> PromptRecall | None:
        """The memory of recurrent layers for chunks that are given as `chunk_ints`. None without recurrent layers."""
        if self.states is None:
            return None
        return PromptRecall.of(self.states, PromptChunks.cut(ints, num_chunks), num_rows, keeps)

    def _keeps(self, chunks: Sequence[Chunk], segments: Sequence[Segment]) -> PromptKeeps | None:
        """The snapshots that these chunks keep, if any."""
        if self.states is None or not any(chunk.keeps for chunk in chunks):
            return None
        ring_rows = self.states.all_layers.rings.shape[2]
        return PromptKeeps.lay_out(self.states.pool, chunks, segments, ring_rows, self.upload)


def segments_of(chunks: Sequence[Chunk]) -> list[Segment]:
    """The flat rows of each chunk, one chunk after the other."""
    lens = [chunk.end - chunk.start for chunk in chunks]
    firsts = accumulate(lens, initial=0)
    return [
        Segment(first, length, chunk.start, row_of(chunk.request))
        for first, length, chunk in zip(firsts, lens, chunks, strict=False)
    ]


def plan_chunks(
    segments: Sequence[Segment], config: TargetConfig, shape_of: Callable[[int], RaggedShape], device: torch.device
) -> dict[tuple[int, int], RaggedPlan]:
    """Divide segments into tiles of attention, for each number and size of KV heads. The size decides the tiles."""
    return {
        (heads, size): plan_ragged(segments, config.num_heads, heads, shape_of(size), device)
        for heads, size in dict.fromkeys(config.kv_shapes)
    }


def is_resumed(request: Request) -> bool:
    """Whether a request has output tokens already, and continues from the last one."""
    return bool(request.output_token_ids)
