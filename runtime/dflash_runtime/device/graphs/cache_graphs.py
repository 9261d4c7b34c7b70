"""Forwards after a target's own cache as CUDA graphs: one launch instead of thousands.

A graph has fixed shapes and addresses. So it reads tokens and cache from buffers.

* Texts, tokens and the cache's tokens are padded to a few sizes. Tokens are padded on the right, a cache on the left.
* The graph writes new states over the old ones. So forwards of one token after another copy no states in.
* The graph gives the keys and values of its tokens. A new cache appends them to the old keys and values.
* A graph fixes plain values of a cache, such as flags. A new cache has the values of the captured forward.

A shape is captured when it is needed for the second time. The first replay must equal an uncaptured forward on the same
buffers, with other tokens than the captured forward had.

Axis letters: B texts, T tokens, F feature width.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_runtime.device.graphs.graph_memory import GraphMemory
from dflash_runtime.models.agreement import agree
from dflash_runtime.models.hosting.cache_rows import rebuild_cache
from dflash_runtime.models.hosting.cache_state import Path, leaves, name_of
from dflash_runtime.models.hosting.hosted_loading import first_line
from dflash_runtime.models.hosting.own_cache import GRAIN, LEAST_ROWS, OwnCacheTarget
from dflash_runtime.models.hosting.stream_capture import capture_stream, no_collection
from dflash_runtime.models.placement import as_current
from dflash_runtime.notices import Notice

logger = logging.getLogger(__name__)

ROOM_GRAIN = 256
"""The tokens of a cache are padded to a multiple of 256, and long caches by a quarter at most."""

MOST_GRAPHS = 64
"""Most graphs at once. The least recently used graph makes room for a new one."""

LEAST_USES = 2
"""A shape is captured when it is needed for this time, because a capture takes as long as about four forwards."""


LEAST_USES_BESIDE = 16
"""Uses before a shape is captured while a graph with more texts or tokens stands in for it."""


class Shape(NamedTuple):
    """Sizes of a captured forward: texts, tokens, and tokens of the cache. The last is 0 if a cache has only states."""

    num_texts: int
    num_tokens: int
    room: int


class Outputs(NamedTuple):
    """Results of a recorded forward. New states lie in the buffers.

    hidden     [B, T, hidden]
    features   [B, T, F]
    tails      the keys and values of the T tokens, as in the cache
    after      the new cache
    """

    hidden: Tensor
    features: Tensor | None
    tails: Mapping[Path, Tensor]
    after: Any


Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Record a forward -> a function that runs it again on the same buffers, and the results that this overwrites."""


class GraphRecorder:
    """Records forwards as CUDA graphs on one device. The graphs share memory, because one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """See `Record`."""
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device)
        recording = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        # A failed capture may leave its stream as the current stream.
        with no_collection(), torch.cuda.stream(torch.cuda.current_stream()), recording:
            outputs = run()
        return graph.replay, outputs


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """The tensors that a graph reads: tokens [B, T], lengths of texts [B], and a cache."""

    shape: Shape
    token_ids: Tensor
    lens: Tensor
    cache: Mapping[Path, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A recorded forward. The tensors of `outputs.after` are empty."""

    buffers: _Buffers
    replay: Callable[[], None]
    outputs: Outputs


class _Differs(Exception):
    """A replay gives another result than the forward."""


_Key = tuple[Shape, tuple[int, ...], tuple[tuple[Path, object], ...]]
"""Shape, taps and plain values of the cache."""


class CacheGraphs:
    """The captured forwards of a target's engine. `problem` says why no more forwards are captured."""

    def __init__(
        self,
        target: OwnCacheTarget,
        device: torch.device,
        max_texts: int,
        make_recorder: Callable[[torch.device], Record] = GraphRecorder,
    ) -> None:
        self._target, self._grown, self._device = target, target.layout.grown, device
        self._max_texts = max_texts
        self._make_recorder = make_recorder
        self._record: Record | None = None
        self._tensors: dict[Path, Tensor] = {}
        self._graphs: dict[_Key, _Graph] = {}
        self._uses: Counter[_Key] = Counter()
        self._memory = GraphMemory(device)
        self.problem: Notice | None = None

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all graphs, the least recently used one first."""
        return [graph.buffers.shape for graph in self._graphs.values()]

    def run(
        self,
        token_ids: Tensor,
        lens: Sequence[int],
        taps: Sequence[int],
        cache: Any,
        *,
        makes_cache: bool,
        goes_on: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any] | None:
        """Run tokens [B, T] after a cache, which stays as it is -> hidden states, features and new cache.

        Hidden states [B, T, hidden] and features [B, T, F] are valid until the next replay. The new cache is None
        without `makes_cache`. `goes_on` says that the last replay made `cache`. Returns None if no graph has the shape.
        """
        num_texts, num_tokens = token_ids.shape
        shape = self._shape_of(num_texts, num_tokens, max(lens), is_exact=makes_cache)
        if shape is None:
            return None
        parts = dict(leaves(cache))
        key = (shape, tuple(taps), tuple(item for item in parts.items() if not isinstance(item[1], Tensor)))
        used = key if key in self._graphs else self._stand_in(key, is_exact=makes_cache)
        if used != key and self._is_due(key, has_stand_in=used is not None):
            graph, used, goes_on = self._captured(shape, token_ids, lens, taps, cache), key, False
        else:
            graph = None if used is None else self._graphs.pop(used)
        if graph is None or used is None:
            return None
        self._graphs[used] = graph  # the last graph is the most recently used one
        _fill(graph.buffers, self._grown, token_ids, lens, None if goes_on and not shape.room else parts)
        graph.replay()
        hidden, features, _, _ = graph.outputs
        return (
            hidden[:num_texts, :num_tokens],
            None if features is None else features[:num_texts, :num_tokens],
            _new_cache(graph, self._grown, parts, num_texts) if makes_cache else None,
        )

    def _is_due(self, key: _Key, *, has_stand_in: bool) -> bool:
        """Count a use of a shape without a graph -> whether to capture it now."""
        self._uses[key] += 1
        return self.problem is None and self._uses[key] >= (LEAST_USES_BESIDE if has_stand_in else LEAST_USES)

    def _stand_in(self, key: _Key, *, is_exact: bool) -> _Key | None:
        """The key of the smallest graph with more texts, or more tokens unless `is_exact`, than a shape has."""
        shape = key[0]
        tokens = [shape.num_tokens] if is_exact else range(shape.num_tokens, LEAST_ROWS + 1, GRAIN)
        texts = [shape.num_texts << count for count in range(self._max_texts.bit_length())]
        shapes = (Shape(min(size, self._max_texts), count, shape.room) for count in tokens for size in texts)
        return next((other for item in shapes if (other := (item, *key[1:])) in self._graphs), None)

    def _shape_of(self, num_texts: int, num_tokens: int, longest: int, *, is_exact: bool) -> Shape | None:
        """The sizes of a forward's graph. With `is_exact` tokens are not padded, because a new state would read them.

        Returns None for forwards of prompts, with many or with odd numbers of tokens.
        """
        has_room = bool(self._grown)
        grain = 1 if is_exact or not self._target.reads_at_once else GRAIN * (1 + has_room)
        padded = -(-num_tokens // grain) * grain
        if padded > LEAST_ROWS or (padded > GRAIN and padded % GRAIN):
            return None
        size = max(ROOM_GRAIN, (1 << longest.bit_length()) // 8)
        room = -(-longest // size) * size if has_room else 0
        return Shape(min(1 << (num_texts - 1).bit_length(), self._max_texts), padded, room)

    def _captured(
        self, shape: Shape, token_ids: Tensor, lens: Sequence[int], taps: Sequence[int], cache: Any
    ) -> _Graph | None:
        """Capture a forward. If that fails, drop all graphs, set `problem` and return None."""
        reason = None
        with as_current(self._device):
            try:
                with self._memory.attempt("the target's forwards run slower"):
                    return self._capture(shape, token_ids, lens, taps, cache)
                reason = self._memory.shortage
            except _Differs:
                reason = Notice("a replay of a captured forward gives another result", id="target-capture-differs")
            except Exception as error:  # code of a model may raise any type
                text, kind = f"the model's code fails in a capture: {first_line(error)}", type(error).__name__
                reason = Notice(text, id="target-capture-fails", field=kind)
        self._drop_all()
        self._memory.give_back()
        if self.problem is None and reason is not self._memory.shortage:
            logger.warning("forwards of the %s target run slower: %s", self._target.config.model_type, reason)
        self.problem = reason
        return None

    def _capture(self, shape: Shape, token_ids: Tensor, lens: Sequence[int], taps: Sequence[int], cache: Any) -> _Graph:
        """Capture a forward of other tokens -> its graph, after a replay with the given tokens.

        Raises:
            _Differs: the replay gives another result than an uncaptured forward.
        """
        parts = dict(leaves(cache))
        buffers = self._make_buffers(shape, parts)

        def run() -> Outputs:
            before = rebuild_cache(cache, lambda path, value, owner: buffers.cache.get(path, value))
            found = self._target.forward_in_room(buffers.token_ids, buffers.lens, taps, before, shape.room)
            return _outputs(buffers, self._grown, *found)

        _fill(buffers, self._grown, token_ids, lens, parts)
        count = len(token_ids)
        wanted = [item.clone() for item in _results(buffers, self._grown, self._rehearse(run), count)]
        _fill(buffers, self._grown, (token_ids + 1) % self._target.config.vocab_size, lens, parts)
        self._record = self._record or self._make_recorder(self._device)
        replay, outputs = self._record(run)
        # Another graph may use the memory of the new keys and values.
        after = rebuild_cache(outputs.after, lambda path, value, owner: _emptied(value))
        outputs = outputs._replace(after=after)
        _fill(buffers, self._grown, token_ids, lens, parts)
        replay()
        found = _results(buffers, self._grown, outputs, count)
        if not all(_agree(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)):
            raise _Differs
        logger.info("captured a forward of %d texts, %d tokens, and %d tokens in the cache", *shape)
        return _Graph(buffers, replay, outputs)

    def _rehearse(self, run: Callable[[], Outputs]) -> Outputs:
        """Run a forward on the capture stream, so that nothing is compiled or loaded during the capture."""
        if self._device.type != "cuda":
            return run()
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = run()
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _make_buffers(self, shape: Shape, parts: Mapping[Path, Any]) -> _Buffers:
        """Buffers of a shape. All graphs share the tensors of a cache. Larger ones replace them and drop the graphs."""
        found = {path: value for path, value in parts.items() if isinstance(value, Tensor)}
        sizes = {path: self._size_of(path, value, shape) for path, value in found.items()}
        held = {path: tuple(item.shape) for path, item in self._tensors.items()}
        largest = {path: tuple(map(max, size, held.get(path, size))) for path, size in sizes.items()}
        if largest != held:
            self._drop_all()
            self._tensors = {path: value.new_zeros(largest[path]) for path, value in found.items()}
        elif len(self._graphs) >= MOST_GRAPHS:
            self._wait()
            self._graphs.pop(next(iter(self._graphs)))
        views = {path: item[: shape.num_texts] for path, item in self._tensors.items()}
        views |= {path: views[path].narrow(axis, 0, shape.room) for path, axis in self._grown.items()}
        token_ids = torch.zeros(shape[:2], dtype=torch.int64, device=self._device)
        return _Buffers(shape, token_ids, token_ids.new_zeros(shape.num_texts), views)

    def _size_of(self, path: Path, value: Tensor, shape: Shape) -> tuple[int, ...]:
        size = [shape.num_texts, *value.shape[1:]]
        if path in self._grown:
            size[self._grown[path]] = shape.room
        return tuple(size)

    def _drop_all(self) -> None:
        self._wait()
        self._graphs.clear()
        self._tensors.clear()
        self._record = None  # torch does not reopen the memory of graphs that are gone

    def _wait(self) -> None:
        """Wait for replays, before their graphs are dropped."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _fill(
    buffers: _Buffers,
    grown: Mapping[Path, int],
    token_ids: Tensor,
    lens: Sequence[int],
    parts: Mapping[Path, Any] | None,
) -> None:
    """Put tokens [B, T], lengths of texts and the parts of a cache into buffers. Without parts the states there stay.

    Keys and values of a cache lie on the right. Padding has zeros: a number that is not finite would spread.
    """
    num_texts, num_tokens = token_ids.shape
    longest = max(lens)
    buffers.token_ids[:num_texts, :num_tokens].copy_(token_ids)
    buffers.lens[:num_texts].copy_(torch.tensor(lens, pin_memory=buffers.lens.is_cuda), non_blocking=True)
    if parts is None:
        return
    places = {path: item[:num_texts] for path, item in buffers.cache.items()}
    num_padding = buffers.shape.room - longest
    if grown and num_padding:
        torch._foreach_zero_([places[path].narrow(axis, 0, num_padding) for path, axis in grown.items()])
    places |= {path: places[path].narrow(axis, num_padding, longest) for path, axis in grown.items()}
    torch._foreach_copy_(list(places.values()), [parts[path] for path in places])


def _outputs(
    buffers: _Buffers, grown: Mapping[Path, int], hidden: Tensor, features: Tensor | None, after: Any
) -> Outputs:
    """Put the new states into the buffers -> the results of a forward."""
    found, shape = dict(leaves(after)), buffers.shape
    for path, buffer in buffers.cache.items():
        state = found.get(path)
        if path in grown or state is buffer:
            continue
        if not isinstance(state, Tensor) or state.shape != buffer.shape or state.dtype != buffer.dtype:
            raise TypeError(f"{name_of(path)} in the cache changes its shape or dtype")
        buffer.copy_(state)
    tails = {path: found[path].narrow(axis, shape.room, shape.num_tokens).clone() for path, axis in grown.items()}
    return Outputs(hidden, features, tails, after)


def _results(buffers: _Buffers, grown: Mapping[Path, int], outputs: Outputs, num_texts: int) -> list[Tensor]:
    """The numbers of a forward that its replay must give too. States of the first text stand for all states."""
    states = [item[:1] for path, item in buffers.cache.items() if path not in grown]
    rows = [outputs.hidden, *outputs.tails.values(), *(() if outputs.features is None else (outputs.features,))]
    return [*(item[:num_texts] for item in rows), *states]


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether results are equal up to rounding. Numbers that are not finite may be equal, too."""
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    return agree(ours.nan_to_num(), theirs.nan_to_num())


def _new_cache(graph: _Graph, grown: Mapping[Path, int], parts: Mapping[Path, Any], num_texts: int) -> Any:
    """The cache of the first texts after a replay, which began with these parts of a cache."""
    states = {path: item[:num_texts] for path, item in graph.buffers.cache.items() if path not in grown}
    new = {path: torch.empty_like(item) for path, item in states.items()}
    if new:
        torch._foreach_copy_(list(new.values()), list(states.values()))
    for path, axis in grown.items():
        new[path] = torch.cat((parts[path], graph.outputs.tails[path][:num_texts]), dim=axis)
    return rebuild_cache(graph.outputs.after, lambda path, value, owner: new.get(path, value))


def _emptied(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, Tensor) else value
