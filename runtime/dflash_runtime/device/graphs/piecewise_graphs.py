"""Forwards with prompts captured as CUDA graphs in pieces. A piece is everything between the attention of two layers.

Up to about a thousand rows, the host needs longer to launch a forward with prompts than a GPU needs to run it. The
whole forward cannot be captured, because the division of rows into prompts and blocks changes from step to step. Only
attention depends on that division. So everything else is captured for a bucket of rows, and attention is launched
between the pieces over the rows of the step. No KV is stored for padding rows of the bucket, and nobody reads them.

The target's code need not know of pieces: every call of `Attend.read` or `Attend.recall` ends a piece and begins the
next.

Axis letters: T flat rows, M rows of the largest bucket, H heads, KV heads of keys and values, D head dim, F features,
C channels of a recurrent layer, V size of its values.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.kv.slot_mapping import PAD
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_kernels.suite import Kernels
from dflash_runtime.device.graphs.graph_memory import GraphMemory
from dflash_runtime.device.graphs.row_buckets import bucket_of_rows, row_buckets
from dflash_runtime.device.joined_attention import JoinedAttention
from dflash_runtime.device.prefill import RaggedAttention
from dflash_runtime.device.storage.kv import KVCache
from dflash_runtime.models.hosting.stream_capture import capture_stream, no_collection
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.placement import as_current
from dflash_runtime.models.target import Target
from dflash_runtime.notices import Notice

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]
"""Query heads, key-value heads, and head size: (H, KV, D)."""

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records the launches between `begin` and `end`, for replay."""

    def recording(self) -> AbstractContextManager[None]:
        """A context in which to record. It closes an open recording if an error leaves it."""
        ...

    def begin(self) -> None:
        """Begin a recording."""
        ...

    def end(self) -> Replay:
        """End the recording -> a function that replays it."""
        ...


class CudaRecorder:
    """Records CUDA graphs in one memory pool. The graphs of a forward run in order, and two forwards never overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch gives the type of a handle no public name
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """See `Recorder`."""
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with no_collection(), torch.cuda.stream(stream):
            try:
                yield
            finally:
                if self._graph is not None:
                    with suppress(RuntimeError):  # ending a failed capture raises its error again
                        self._graph.capture_end()
                    self._graph = self._pool = None  # torch does not reopen a pool after its graphs are freed
        torch.cuda.current_stream().wait_stream(stream)

    def begin(self) -> None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        assert self._graph is not None
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph.replay


@dataclass(frozen=True, slots=True)
class ReadCut:
    """Attention of a layer between two pieces."""

    layer: int
    shape: Shape
    softmax: Softmax

    def run(self, buffers: "Buffers", num_rows: int, attend: RaggedAttention | JoinedAttention) -> None:
        """Attend over the first rows of the buffers."""
        query, keys, values, attended = buffers.at_attention(self.shape, num_rows)
        attend.read(self.layer, query, keys, values, self.softmax, attended)


@dataclass(frozen=True, slots=True)
class RecallCut:
    """The convolution and the delta rule of a recurrent layer between two pieces."""

    layer: int
    taps: Tensor  # [S, C]
    log_rate: Tensor  # [H]
    bias: Tensor  # [H]
    value_size: int

    def run(self, buffers: "Buffers", num_rows: int, attend: RaggedAttention | JoinedAttention) -> None:
        """Run the first rows of the buffers."""
        heads, channels = len(self.bias), self.taps.shape[1]
        rows, decay, beta = buffers.channels_of(channels, heads, num_rows).split((channels, heads, heads), dim=1)
        out = _shaped(buffers.attended, num_rows, heads, self.value_size)
        attend.recall(self.layer, rows, self.taps, Gates(decay, beta, self.log_rate, self.bias), out)


@dataclass(frozen=True, slots=True)
class Piece:
    """The launches before attention or a recurrence, and its parameters."""

    replay: Replay
    cut: ReadCut | RecallCut


@dataclass(frozen=True, slots=True)
class Pieces:
    """A captured forward: its pieces, and the launches after the last cut."""

    before_cuts: tuple[Piece, ...]
    rest: Replay


@dataclass(frozen=True, slots=True)
class Buffers:
    """Tensors that pieces and attention read and write, for all buckets. A smaller bucket uses the first rows."""

    token_ids: Tensor  # [M]
    positions: Tensor  # [M]
    slots: Tensor  # [M]
    hidden: Tensor  # [M, hidden]
    features: Tensor  # [M, F]
    heads: Tensor  # inputs of attention or of a recurrence, for M rows of the widest layer
    attended: Tensor  # outputs of attention or of a recurrence, for M rows of the widest layer

    @classmethod
    def of(cls, target: Target, num_taps: int, num_rows: int, device: torch.device) -> "Buffers":
        """Buffers for forwards of a target with up to `num_rows` rows."""
        config, dtype = target.config, target.embedding.dtype
        ints = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        heads = max((config.num_heads + 2 * num_kv) * size for num_kv, size in config.kv_shapes)
        attended = max(config.num_heads * size for _, size in config.kv_shapes)
        if config.recurrence is not None:
            heads = max(heads, config.recurrence.num_channels + 2 * config.recurrence.num_value_heads)
            attended = max(attended, config.recurrence.values_width)
        hidden = config.hidden_size
        parts = [
            torch.zeros((num_rows, width), dtype=dtype, device=device)
            for width in (hidden, num_taps * hidden, heads, attended)
        ]
        return cls(*ints, *parts)

    def fill(self, token_ids: Tensor, positions: Tensor, slots: Tensor, num_rows: int) -> None:
        """Copy T rows into a bucket of `num_rows`."""
        count = len(token_ids)
        self.token_ids[:count].copy_(token_ids)
        self.positions[:count].copy_(positions)
        self.slots[:count].copy_(slots)
        self.slots[count:num_rows].fill_(PAD)

    def heads_of(self, shape: Shape, num_rows: int) -> Tensor:
        """Queries, keys and values of T rows in the shape of one layer: [T, H + 2 KV, D]."""
        num_heads, num_kv, size = shape
        return _shaped(self.heads, num_rows, num_heads + 2 * num_kv, size)

    def attended_of(self, shape: Shape, num_rows: int) -> Tensor:
        """Outputs of attention of T rows in the shape of one layer: [T, H, D]."""
        return _shaped(self.attended, num_rows, shape[0], shape[2])

    def channels_of(self, num_channels: int, num_heads: int, num_rows: int) -> Tensor:
        """Channels of T rows, and the inputs of their decays and betas: [T, C + 2 H]."""
        return _shaped(self.heads, num_rows, 1, num_channels + 2 * num_heads)[:, 0]

    def at_attention(self, shape: Shape, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, KV, D], and the output [T, H, D] of one layer's attention."""
        num_heads, num_kv, _ = shape
        query, keys, values = self.heads_of(shape, num_rows).split((num_heads, num_kv, num_kv), dim=1)
        return query, keys, values, self.attended_of(shape, num_rows)


@dataclass(slots=True)
class CuttingAttention(Attend):
    """An `Attend` without attention and states: `read` and `recall` end a piece and begin the next one.

    Without a recorder it records nothing, which is a rehearsal of the forward.
    """

    kernels: Kernels
    cache: KVCache
    buffers: Buffers
    num_rows: int
    recorder: Recorder | None
    value_size: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[T, H, D], [T, KV, D] twice -> [T, H, D]."""
        keys, values = self.kernels.kv_store(keys, values, *self.place(layer))
        return self.read(layer, query, keys, values, softmax)

    def place(self, layer: int) -> KVPlace:
        """See `models.layers.Attend`."""
        return self.cache.place(layer, self.buffers.slots[: self.num_rows])

    def read(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Copy the layer's heads into the buffers -> the buffer with the output of attention, [T, H, D]."""
        shape = (query.shape[1], *keys.shape[1:])
        torch.cat((query, keys, values), dim=1, out=self.buffers.heads_of(shape, self.num_rows))
        self._cut(ReadCut(layer, shape, softmax))
        return self.buffers.attended_of(shape, self.num_rows)

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """Copy the layer's channels and gates into the buffers -> the buffer with the output, [T, H, V]."""
        heads = len(gates.bias)
        room = self.buffers.channels_of(taps.shape[1], heads, self.num_rows)
        torch.cat((rows, gates.decay, gates.beta), dim=1, out=room)
        self._cut(RecallCut(layer, taps, gates.log_rate, gates.bias, self.value_size))
        return _shaped(self.buffers.attended, self.num_rows, heads, self.value_size)

    def _cut(self, cut: ReadCut | RecallCut) -> None:
        if self.recorder is not None:
            self.pieces.append(Piece(self.recorder.end(), cut))
            self.recorder.begin()


class PiecewiseGraphs:
    """Forwards of a target with prompts, captured at start or when a bucket of rows is first needed."""

    def __init__(
        self,
        target: Target,
        taps: Sequence[int],
        kernels: Kernels,
        cache: KVCache,
        max_rows: int,
        recorder: Recorder | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self._target, self._taps, self._kernels, self._cache = target, taps, kernels, cache
        self._device = cache.pages.device
        self._buckets = row_buckets(max_rows, target.config)
        self._recorder = recorder or CudaRecorder(self._device)
        self._buffers: Buffers | None = None
        # None after a capture without enough memory. Those forwards run uncaptured.
        self._captured: dict[int, Pieces | None] = {}
        self._memory = GraphMemory(self._device, is_shared=is_shared)

    @property
    def shortage(self) -> Notice | None:
        """A warning if memory did not hold every capture."""
        return self._memory.shortage

    @property
    def captured(self) -> tuple[int, ...]:
        """The captured buckets, in order of capture."""
        return tuple(bucket for bucket, pieces in self._captured.items() if pieces is not None)

    def missing(self) -> list[int]:
        """The buckets to capture. The largest comes first, so that smaller buckets reuse the memory that it freed."""
        return [bucket for bucket in reversed(self._buckets) if bucket not in self._captured]

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: RaggedAttention | JoinedAttention,
        taps: Sequence[int],
        wanted: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the target: in pieces if its bucket is captured, otherwise uncaptured. See `Target.__call__`.

        The next call overwrites the features.
        """
        bucket = bucket_of_rows(len(token_ids))
        if bucket in self._buckets and bucket not in self._captured:
            self.capture(bucket)
        pieces, buffers = self._captured.get(bucket), self._buffers
        if pieces is None or buffers is None:
            return self._target(token_ids, positions, attend, taps, wanted)
        self._run(pieces, buffers, bucket, token_ids, positions, attend)
        return buffers.hidden[wanted], buffers.features[: len(token_ids)] if taps else None

    def _run(
        self,
        pieces: Pieces,
        buffers: Buffers,
        bucket: int,
        token_ids: Tensor,
        positions: Tensor,
        attend: RaggedAttention | JoinedAttention,
    ) -> None:
        count = len(token_ids)
        buffers.fill(token_ids, positions, attend.slots, bucket)
        for piece in pieces.before_cuts:
            piece.replay()
            piece.cut.run(buffers, count, attend)
        pieces.rest()

    @torch.inference_mode()
    def capture(self, bucket: int) -> None:
        """Capture the forward of a bucket, or note that memory does not hold it.

        First the forward runs once, so that no kernel is compiled or loaded during the capture.
        """
        started = time.perf_counter()
        captured = None
        with as_current(self._device), self._memory.attempt(f"prompts of up to {bucket} tokens begin slower"):
            if self._buffers is None:
                self._buffers = Buffers.of(self._target, len(self._taps), self._buckets[-1], self._device)
            self._buffers.slots.fill_(PAD)  # these runs store no KV
            with self._recorder.recording():
                self._forward(bucket, self._buffers, None)
                captured = self._record(bucket, self._buffers)
        self._captured[bucket] = captured
        if captured is None:
            self._memory.give_back()
        else:
            logger.info("captured forwards of %d rows in %.2f s", bucket, time.perf_counter() - started)

    def _record(self, bucket: int, buffers: Buffers) -> Pieces:
        self._recorder.begin()
        pieces = self._forward(bucket, buffers, self._recorder)
        return Pieces(tuple(pieces), self._recorder.end())

    def _forward(self, bucket: int, buffers: Buffers, recorder: Recorder | None) -> list[Piece]:
        """Run the target without attention over a bucket of rows."""
        recurrence = self._target.config.recurrence
        value_size = recurrence.value_size if recurrence is not None else 0
        attend = CuttingAttention(self._kernels, self._cache, buffers, bucket, recorder, value_size)
        ids, positions = buffers.token_ids[:bucket], buffers.positions[:bucket]
        hidden, features = self._target(ids, positions, attend, self._taps)
        buffers.hidden[:bucket].copy_(hidden)
        if features is not None:
            buffers.features[:bucket].copy_(features)
        return attend.pieces


def _shaped(room: Tensor, num_rows: int, num_heads: int, size: int) -> Tensor:
    """The beginning of a buffer as [T, heads, D]."""
    return room.flatten()[: num_rows * num_heads * size].view(num_rows, num_heads, size)
