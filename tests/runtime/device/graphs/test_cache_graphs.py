"""Captured forwards after a cache: their shapes, buffers and limits. On the CPU a recorded forward runs again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dflash_runtime.device.graphs import cache_graphs
from dflash_runtime.device.graphs.cache_graphs import CacheGraphs, Outputs, Shape
from dflash_runtime.models.hosting.cache_rows import CacheLayout
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_testing.graphs import rerunning

CPU = torch.device("cpu")
LAYOUT = CacheLayout(grown={("keys",): 1})


@dataclass
class SmallCache:
    """Keys [B, N] that grow, a sum of all tokens [B, 1], a flag and integers [B]."""

    keys: Tensor
    state: Tensor
    is_warm: bool = True
    count: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.int64))

    @classmethod
    def of(cls, *texts: Sequence[float]) -> "SmallCache":
        rows = torch.tensor(texts, dtype=torch.float32)
        return cls(rows, rows.sum(1, keepdim=True), count=torch.ones(len(rows), dtype=torch.int64))


class SmallTarget:
    """Hidden states are the sums of all keys seen, where masked keys count 0 times, and of the state."""

    def __init__(self, layout: CacheLayout = LAYOUT) -> None:
        self.layout, self.reads_at_once = layout, True
        self.config = SimpleNamespace(vocab_size=100, model_type="small")
        self.num_runs = 0

    def forward_in_room(
        self, token_ids: Tensor, lens: Tensor, taps: Sequence[int], cache: SmallCache, room: int
    ) -> tuple[Tensor, Tensor | None, Any]:
        self.num_runs += 1
        keys = torch.cat((cache.keys[:, :room], token_ids.float()), dim=1)
        seen = torch.arange(keys.shape[1]) >= (room - lens)[:, None]
        sums = (keys * seen).cumsum(1)[:, room:] + cache.state
        cache.state += token_ids.sum(1, keepdim=True)
        return sums[..., None], None, SmallCache(keys, cache.state, is_warm=True, count=cache.count)


def graphs_of(target: SmallTarget, max_texts: int = 8, **given: Any) -> CacheGraphs:
    return CacheGraphs(cast(OwnCacheTarget, target), CPU, max_texts, **{"make_recorder": rerunning, **given})


def run(graphs: CacheGraphs, cache: SmallCache, *tokens: Sequence[int], **given: bool) -> list[float] | None:
    """Run tokens of each text -> the hidden states of the last token of each, or None if no graph ran."""
    lens = [cache.keys.shape[1]] * len(tokens)
    found = graphs.run(torch.tensor(tokens), lens, (), cache, **{"makes_cache": False, **given})
    return None if found is None else found[0][:, -1, 0].tolist()


@pytest.fixture(autouse=True)
def at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_graphs, "LEAST_USES", 1)
    monkeypatch.setattr(cache_graphs, "LEAST_USES_BESIDE", 1)


def test_texts_tokens_and_room_are_padded() -> None:
    graphs, cache = graphs_of(SmallTarget()), SmallCache.of([1, 2], [3, 4], [5, 6])
    assert run(graphs, cache, [7, 8], [1, 1], [2, 2]) == [3 + 3 + 15, 7 + 7 + 2, 11 + 11 + 4]
    assert graphs.shapes == [Shape(num_texts=4, num_tokens=16, room=256)]
    assert (cache.keys.shape, cache.state.tolist()) == ((3, 2), [[3], [7], [11]])


def test_no_more_texts_are_padded_than_run() -> None:
    graphs = graphs_of(SmallTarget(), max_texts=3)
    run(graphs, SmallCache.of([1], [1], [1]), [1], [1], [1])
    assert [shape.num_texts for shape in graphs.shapes] == [3]


def test_a_new_cache_has_the_tokens_and_nothing_of_the_padding() -> None:
    graphs, cache = graphs_of(SmallTarget()), SmallCache.of([1, 2], [3, 4], [5, 6])
    for _ in range(2):
        found = graphs.run(torch.tensor([[7, 8]] * 3), [2] * 3, (), cache, makes_cache=True)
        assert found is not None
        assert found[2].keys.tolist() == [[1, 2, 7, 8], [3, 4, 7, 8], [5, 6, 7, 8]]
        assert found[2].state.tolist() == [[18], [22], [26]]
    assert graphs.shapes == [Shape(4, 2, 256)]


def test_flags_are_of_the_captured_forward() -> None:
    """A cache with another flag needs another graph, and a new cache has the flag after the forward."""
    graphs, warm = graphs_of(SmallTarget()), SmallCache.of([1])
    for cache in (warm, replace(warm, is_warm=False)):
        found = graphs.run(torch.tensor([[7]]), [1], (), cache, makes_cache=True)
        assert found is not None
        assert found[2].is_warm
    assert len(graphs.shapes) == 2


def test_numbers_that_are_not_finite_stay_in_their_text() -> None:
    """Buffers had a longer text of another request before."""
    graphs = graphs_of(SmallTarget())
    run(graphs, SmallCache.of([1.0, float("nan"), 1.0, 1.0]), [1])
    assert run(graphs, SmallCache.of([1.0, 2.0]), [1]) == [3 + 3 + 1]


def test_a_chain_of_tokens_reads_the_states_of_the_last_replay() -> None:
    graphs, cache = graphs_of(SmallTarget(CacheLayout())), SmallCache.of([1])
    graphs._target.reads_at_once = False
    states = []
    for token, goes_on in ((5, False), (6, True), (7, True), (5, False)):
        given = SmallCache(torch.zeros(1, 1), torch.zeros(1, 1)) if goes_on else cache
        found = graphs.run(torch.tensor([[token]]), [1], (), given, makes_cache=True, goes_on=goes_on)
        assert found is not None
        states.append(found[2].state.item())
    assert states == [6, 12, 19, 6]


def test_larger_buffers_replace_smaller_ones() -> None:
    graphs = graphs_of(SmallTarget())
    run(graphs, SmallCache.of([1]), [1])
    run(graphs, SmallCache.of([1] * 300), [1])
    assert graphs.shapes == [Shape(1, 16, 512)]
    assert run(graphs, SmallCache.of([1]), [1]) == [3]
    run(graphs, SmallCache.of([1], [1]), [1], [1])
    assert graphs.shapes == [Shape(2, 16, 256)]
    assert graphs._tensors["keys",].shape == (2, 512)


def test_the_least_recently_used_graph_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_graphs, "MOST_GRAPHS", 2)
    graphs, cache = graphs_of(SmallTarget()), SmallCache.of([1], [1], [1])
    for count in (16, 1, 32, 1, 48):
        run(graphs, cache, *[[1] * count] * 3)
    assert [shape.num_tokens for shape in graphs.shapes] == [16, 48]


@pytest.mark.parametrize(("num_tokens", "makes_cache"), [(65, False), (9, True), (23, True)])
def test_prompts_and_odd_sizes_are_not_captured(num_tokens: int, *, makes_cache: bool) -> None:
    target = SmallTarget()
    graphs = graphs_of(target)
    assert run(graphs, SmallCache.of([1]), [1] * num_tokens, makes_cache=makes_cache) is None
    assert not target.num_runs


def test_a_shape_is_captured_when_it_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_graphs, "LEAST_USES", 2)
    graphs, cache = graphs_of(SmallTarget()), SmallCache.of([1])
    assert run(graphs, cache, [1]) is None
    assert run(graphs, cache, [1]) == [3]


def test_a_larger_graph_stands_in_until_a_shape_is_used_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_graphs, "LEAST_USES_BESIDE", 3)
    graphs, cache = graphs_of(SmallTarget()), SmallCache.of([1], [1], [1])
    run(graphs, cache, *[[1] * 30] * 3)
    for _ in range(2):
        assert run(graphs, SmallCache.of([2]), [7]) == [2 + 2 + 7]
        assert graphs.shapes == [Shape(4, 32, 256)]
    assert run(graphs, SmallCache.of([2]), [7]) == [2 + 2 + 7]
    assert graphs.shapes == [Shape(4, 32, 256), Shape(1, 16, 256)]


def test_a_graph_with_more_tokens_makes_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_graphs, "LEAST_USES_BESIDE", 3)
    graphs, cache = graphs_of(SmallTarget()), SmallCache.of([1], [1], [1])
    run(graphs, cache, *[[1] * 16] * 3)
    for num_tokens in (2, 2, 16):
        found = graphs.run(torch.ones(2, num_tokens), [1, 1], (), SmallCache.of([1], [1]), makes_cache=True)
        assert found is not None
        assert found[2].keys.shape == (2, 1 + num_tokens)
    assert graphs.shapes == [Shape(2, 2, 256), Shape(4, 16, 256)]


def stale(device: torch.device) -> Any:
    """Records forwards. A replay changes nothing."""
    return lambda forward: (lambda: None, forward())


def failing(error: Exception) -> Callable[[torch.device], Any]:
    def make(device: torch.device) -> Any:
        def record(forward: Callable[[], Outputs]) -> Any:
            raise error

        return record

    return make


@pytest.mark.parametrize(
    ("make_recorder", "id", "field"),
    [
        (stale, "target-capture-differs", None),
        (failing(ValueError("no")), "target-capture-fails", "ValueError"),
        (failing(torch.OutOfMemoryError("full")), "no-memory-for-graphs", None),
    ],
)
def test_a_capture_that_fails_is_named_once(
    make_recorder: Any, id: str, field: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, cache = graphs_of(SmallTarget(), make_recorder=make_recorder), SmallCache.of([1])
    assert run(graphs, cache, [1]) is None
    assert run(graphs, SmallCache.of([1] * 300), [1]) is None
    assert graphs.problem is not None
    assert (graphs.problem.id, graphs.problem.field) == (id, field)
    assert not graphs.shapes
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_state_that_changes_its_dtype_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SmallTarget()
    forward = target.forward_in_room

    def widen(*given: Any) -> tuple[Tensor, Tensor | None, Any]:
        hidden, features, cache = forward(*given)
        return hidden, features, replace(cache, state=cache.state.double())

    monkeypatch.setattr(target, "forward_in_room", widen)
    graphs = graphs_of(target)
    assert run(graphs, SmallCache.of([1]), [1]) is None
    assert graphs.problem is not None
    assert (graphs.problem.id, graphs.problem.field) == ("target-capture-fails", "TypeError")
