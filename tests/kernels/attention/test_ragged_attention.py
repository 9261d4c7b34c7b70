"""Ragged attention: the reference against block attention, and the kernel against the float64 reference."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels import launch_config
from dflash_kernels.attention import ragged_attention as module
from dflash_kernels.attention import ragged_config
from dflash_kernels.attention.attention_config import MAX_SPLITS
from dflash_kernels.attention.block_attention import block_attention_ref
from dflash_kernels.attention.ragged_attention import (
    RaggedPlan,
    Segment,
    plan_ragged,
    ragged_attention,
    ragged_attention_ref,
    room_for_plans,
)
from dflash_kernels.attention.ragged_config import (
    DESCRIBED_SHAPES,
    FEW_ROWS_SHAPE,
    LONG_CONTEXT,
    LONG_SHAPE_BYTES,
    LONG_SHAPES,
    RaggedShape,
    ragged_shape,
)
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.launch import FLOATS
from dflash_kernels.products.tile_loads import describe
from dflash_testing.tensors import (
    DEVICE,
    DTYPES,
    SAMPLED_DTYPES,
    SOFTMAXES,
    Pages,
    assert_rows_close,
    normal,
    random_pages,
    random_softmax,
    sampled,
)

PAGE = 16
ROWS = (1, 15, 16, 17, 63, 64, 65)
CONTEXTS = (0, 1, 15, 16, 17)
SHAPE = RaggedShape(rows=128, keys=64, num_warps=8, num_stages=2)


def lay_out(rows: list[int], contexts: list[int]) -> tuple[Segment, ...]:
    """Return adjacent segments. Their rows of the page table are in reverse order."""
    firsts = [sum(rows[:index]) for index in range(len(rows))]
    table_rows = range(len(rows) - 1, -1, -1)
    return tuple(Segment(*values) for values in zip(firsts, rows, contexts, table_rows, strict=True))


def place(plan: RaggedPlan) -> Tensor:
    return torch.tensor(plan.ints, dtype=torch.int64, device=DEVICE)


def pages_of(
    segments: tuple[Segment, ...], num_kv: int, head_dim: int, dtype: torch.dtype, page_size: int = PAGE,
    arrangement: str = "between layers",
) -> Pages:  # fmt: skip
    """Return pages with a random context for each segment. Every other slot is NaN."""
    lens = [segment.context_len for segment in sorted(segments, key=lambda item: item.table_row)]
    longest = max(segment.context_len + segment.num_rows for segment in segments)
    spare = -(-longest // page_size) - -(-max(lens) // page_size)
    return random_pages(lens, num_kv, head_dim, page_size, dtype, 0, spare_pages=spare, arrangement=arrangement)


def check(
    segments: tuple[Segment, ...], num_heads: int, num_kv: int, head_dim: int, dtype: torch.dtype,
    window: int | None = None, shape: RaggedShape | None = None, softmax: Softmax = PLAIN, pages: Pages | None = None,
) -> RaggedPlan:  # fmt: skip
    pages = pages or pages_of(segments, num_kv, head_dim, dtype)
    num_rows = sum(segment.num_rows for segment in segments)
    query = normal(num_rows, num_heads, head_dim, dtype=dtype, seed=1)
    heads = normal(num_rows, 2 * num_kv, head_dim, dtype=dtype, seed=2)  # views of one projection
    keys, values = heads[:, :num_kv], heads[:, num_kv:]
    shape = shape or ragged_shape(head_dim, query.element_size(), 0, query.device)
    plan = plan_ragged(segments, num_heads, num_kv, shape, DEVICE)
    out = ragged_attention(
        query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, plan, place(plan),
        window=window, softmax=softmax,
    )  # fmt: skip
    expected = ragged_attention_ref(
        query.double(), keys.double(), values.double(), *pages.clean(), pages.page_table, plan, place(plan),
        window=window, softmax=softmax,
    )  # fmt: skip
    assert_rows_close(out, expected, dtype)
    return plan


@pytest.mark.reference
@pytest.mark.parametrize("window", [None, 9])
def test_the_reference_equals_block_attention(window: int | None) -> None:
    """Segments of one length equal a batch of blocks, and each segment equals its block to the last bit."""
    segments = lay_out([7, 7, 7], [0, 40, 5])
    pages = pages_of(segments, 2, 16, torch.float64)
    query, keys, values = (normal(21, heads, 16, dtype=torch.float64, seed=heads) for heads in (4, 2, 2))
    plan = plan_ragged(segments, 4, 2, SHAPE, DEVICE)
    flat = ragged_attention_ref(
        query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, plan, place(plan),
        window=window,
    )  # fmt: skip
    for segment in segments:
        rows = slice(segment.first_row, segment.first_row + 7)
        num_pages = -(-(segment.context_len + 7) // PAGE)
        alone = block_attention_ref(
            query[None, rows], keys[None, rows], values[None, rows], pages.key_cache, pages.value_cache,
            pages.page_table[segment.table_row, :num_pages][None], torch.tensor([segment.context_len], device=DEVICE),
            is_causal=True, window=window,
        )  # fmt: skip
        assert torch.equal(flat[rows], alone[0])
    together = block_attention_ref(
        query.view(3, 7, -1, 16), keys.view(3, 7, -1, 16), values.view(3, 7, -1, 16),
        pages.key_cache, pages.value_cache, pages.page_table.flip(0), pages.context_lens.flip(0),
        is_causal=True, window=window,
    )  # fmt: skip
    assert torch.allclose(flat, together.flatten(0, 1), atol=1e-12)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 9, 40])
def test_every_length_after_every_context(window: int | None, dtype: torch.dtype) -> None:
    """One launch has all combinations."""
    pairs = list(product(ROWS, CONTEXTS))[:: 1 if window is None else 3]
    check(lay_out([rows for rows, _ in pairs], [context for _, context in pairs]), 2, 1, 16, dtype, window)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv"), [(1, 1), (4, 4), (6, 2), (5, 1), (8, 1)])
def test_groups(num_heads: int, num_kv: int, dtype: torch.dtype) -> None:
    check(lay_out([65, 1, 30], [33, 0, 17]), num_heads, num_kv, 16, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("arrangement", ["alone", "between layers"])
def test_page_sizes(arrangement: str, page_size: int, dtype: torch.dtype) -> None:
    segments = lay_out([30, 1, 17], [2 * page_size + 1, page_size, page_size - 1])
    check(segments, 4, 2, 16, dtype, pages=pages_of(segments, 2, 16, dtype, page_size, arrangement))


def test_page_offsets_above_32_bits() -> None:
    segments = lay_out([3, 17], [40, 17])
    pages = pages_of(segments, 2, 16, torch.float16, arrangement="far apart")
    check(segments, 4, 2, 16, torch.float16, pages=pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 80, 128, 256, 512])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    check(lay_out([5, 40], [40, 3]), 2, 1, head_dim, dtype)


SINGLE, HALF = torch.float32, torch.float16
PART_SHAPES = (RaggedShape(16, 16, 4, 2), RaggedShape(64, 32, 4, 2), RaggedShape(64, 32, 4, 2, has_descriptors=True))


@pytest.mark.parametrize(
    ("dtype", "window", "shape"),
    sampled(
        product(FLOATS, (None, 20), PART_SHAPES),
        [(dtype, window, shape) for dtype, window in ((SINGLE, None), (HALF, 20)) for shape in PART_SHAPES],
    ),
)
def test_long_segments_are_cut_into_parts(
    shape: RaggedShape, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short segments of the launch stay whole. With a window, most parts and some rows of a part see no key."""
    monkeypatch.setattr(module, "MIN_PART", 1)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 8)
    plan = check(lay_out([3, 20, 1], [600, 2, 333]), 2, 1, 16, dtype, window, shape)
    assert plan.num_parts > len(plan.sums) > 1
    assert len(plan.tiles) > plan.num_parts  # the short ones are not cut


@pytest.mark.parametrize(
    ("dtype", "kind", "rows", "keys"),
    sampled(
        ((dtype, kind, *tile) for dtype in FLOATS for kind in SOFTMAXES for tile in ((16, 16), (64, 32))),
        [(SINGLE, "both", 16, 16), (HALF, "sinks", 64, 32), (HALF, "cap", 64, 32), (SINGLE, "wide cap", 64, 32)],
    ),
)
def test_descriptors_load_the_segments_own_keys(
    rows: int, keys: int, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For segments of any length, whole and in parts, with two adjacent KV heads and with one."""
    monkeypatch.setattr(module, "MIN_PART", 1)
    described: list[Tensor] = []

    def watched(side: Tensor, tile_rows: int, tile_columns: int) -> Any:
        described.append(side)
        return describe(side, tile_rows, tile_columns)

    monkeypatch.setattr(module, "describe", watched)
    shape, segments = RaggedShape(rows, keys, 4, 2, has_descriptors=True), lay_out([3, 170, 1, 70], [0, 17, 300, 0])
    for num_heads, num_kv in ((4, 2), (3, 1)):
        check(segments, num_heads, num_kv, 16, dtype, None, shape, random_softmax(kind, num_heads, dtype))
    assert [side.shape for side in described] == [(244, 32), (244, 32), (244, 16), (244, 16)]


@pytest.mark.parametrize("has_descriptors", [False, True])
def test_rows_of_the_next_segment_are_not_seen(has_descriptors: bool) -> None:
    """They are not even multiplied by a weight of zero: NaN of one segment would reach the other."""
    shape, segments = RaggedShape(64, 32, 4, 2, has_descriptors=has_descriptors), lay_out([70, 33], [5, 0])
    query, keys, values = (normal(103, heads, 16, seed=heads) for heads in (4, 2, 2))
    pages, plan = pages_of(segments, 2, 16, torch.float32), plan_ragged(segments, 4, 2, shape, DEVICE)
    caches = (pages.key_cache, pages.value_cache, pages.page_table)
    before = ragged_attention(query, keys, values, *caches, plan, place(plan), window=None)
    values[70:] = torch.nan
    after = ragged_attention(query, keys, values, *caches, plan, place(plan), window=None)
    assert torch.equal(after[:70], before[:70])
    assert after[70:].isnan().all()


def test_misaligned_rows_are_read_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "describe", None)
    shape, segments = RaggedShape(64, 32, 4, 2, has_descriptors=True), lay_out([70, 33], [5, 0])
    query, rows = normal(103, 4, 16), normal(103, 65, seed=1)[:, 1:]
    keys, values = rows.view(103, 4, 16).split(2, dim=1)
    pages, plan = pages_of(segments, 2, 16, torch.float32), plan_ragged(segments, 4, 2, shape, DEVICE)
    out = ragged_attention(
        query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, plan, place(plan), window=None
    )
    expected = ragged_attention_ref(
        query.double(), keys.double(), values.double(), *pages.clean(), pages.page_table, plan, place(plan), window=None
    )
    assert_rows_close(out, expected, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "window", "kind"),
    sampled(
        product(FLOATS, (None, 20), SOFTMAXES),
        [(dtype, window, kind) for dtype, window in ((SINGLE, 20), (HALF, None)) for kind in SOFTMAXES],
    ),
)
def test_sinks_and_caps(kind: str, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole tiles and with parts. Some rows may see no key of the last part."""
    monkeypatch.setattr(module, "MIN_PART", 1)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 8)
    segments, softmax = lay_out([3, 70, 1, 17], [300, 2, 0, 16]), random_softmax(kind, 4, dtype)
    plan = check(segments, 4, 2, 16, dtype, window, RaggedShape(16, 16, 4, 2), softmax)
    assert len(plan.tiles) > plan.num_parts > 0


def store(pages: Pages, segments: tuple[Segment, ...], keys: Tensor, values: Tensor) -> None:
    """Store keys and values of the segments' own rows in their pages, after the contexts, as a model does."""
    page_size = pages.key_cache.shape[1]
    for segment in segments:
        for index in range(segment.num_rows):
            position = segment.context_len + index
            page = int(pages.page_table[segment.table_row, position // page_size])
            pages.key_cache[page, position % page_size] = keys[segment.first_row + index]
            pages.value_cache[page, position % page_size] = values[segment.first_row + index]


ROOMS = (("plain", None, 2), ("both", 40, 40), ("both", 9, 2), ("plain", 9, 40))


@pytest.mark.parametrize(
    ("dtype", "kind", "window", "num_multiprocessors"),
    sampled(
        ((dtype, *room) for dtype in FLOATS for room in ROOMS),
        [(dtype, *room) for dtype, room in zip((SINGLE, HALF, HALF, SINGLE), ROOMS, strict=True)],
    ),
)
def test_one_launch_serves_all_plans_that_fit(
    kind: str, num_multiprocessors: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of one, several and no segments, padded to one size, with all keys in pages. Unused rows stay unwritten."""
    monkeypatch.setattr(module, "MIN_PART", 1)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: num_multiprocessors)
    shape, num_rows, softmax = RaggedShape(16, 16, 4, 2), 40, random_softmax(kind, 4, dtype)
    room = room_for_plans(num_rows, 4, 4, 2, shape, DEVICE)
    query, keys, values = (normal(num_rows, heads, 16, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    for segments in (lay_out([40], [33]), lay_out([3, 1, 17, 5], [300, 0, 16, 31]), lay_out([1], [7]), ()):
        plan = plan_ragged(segments, 4, 2, shape, DEVICE)
        pages = pages_of(segments or lay_out([1], [1]), 2, 16, dtype)
        filled = sum(segment.num_rows for segment in segments)
        expected = ragged_attention_ref(
            query[:filled].double(), keys[:filled].double(), values[:filled].double(), *pages.clean(),
            pages.page_table, plan, place(plan), window=window, softmax=softmax,
        )  # fmt: skip
        store(pages, segments, keys, values)
        out = torch.full_like(query, 7.0)
        ragged_attention(
            query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, room, place(plan.padded(room)),
            window=window, softmax=softmax, out=out,
        )  # fmt: skip
        assert (out[filled:] == 7).all()
        assert_rows_close(out[:filled], expected, dtype)
        assert len(plan.ints) <= len(room.ints) == len(plan.padded(room).ints)


@pytest.mark.reference
def test_a_plan_that_does_not_fit_is_refused() -> None:
    device = torch.device("cpu")  # few multiprocessors: a GPU with more of them leaves more room
    room = room_for_plans(40, 4, 4, 2, SHAPE, device)
    for segments, shape in ((lay_out([4000], [0]), SHAPE), (lay_out([1] * 40, [0] * 40), SHAPE), ((), FEW_ROWS_SHAPE)):
        with pytest.raises(ValueError, match=r"^plan: "):
            plan_ragged(segments, 4, 2, shape, device).padded(room)


@pytest.mark.reference
def test_only_long_work_is_cut_into_equal_parts() -> None:
    device = torch.device("cpu")  # counts 8 multiprocessors: 8 programs at once for each of 2 KV heads
    alone = plan_ragged(lay_out([16], [5000]), 8, 2, SHAPE, device)
    assert [tile[5:] for tile in alone.tiles] == [(part, 8, part) for part in range(8)]
    assert len(alone.sums) == 1
    (long,) = lay_out([2048], [0])
    seen = [(tile[4] + SHAPE.rows - 1) // 4 // SHAPE.keys for tile in plan_ragged([long], 8, 2, SHAPE, device).tiles]
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 32
    many = plan_ragged(lay_out([512] * 32, [0] * 32), 8, 2, SHAPE, device)
    assert not many.sums
    assert len(many.tiles) == 32 * 16
    assert plan_ragged(lay_out([200], [0]), 8, 2, SHAPE, device).num_parts == 0
    longest = plan_ragged(lay_out([1], [100_000]), 8, 1, SHAPE, device)
    assert len(longest.tiles) == MAX_SPLITS
    assert (longest.ints[5], longest.ints[6]) == (0, MAX_SPLITS)


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^query: "):
        check(lay_out([3], [2]), 3, 2, 16, torch.float32)
    with pytest.raises(ValueError, match=r"^window: "):
        check(lay_out([3], [2]), 4, 2, 16, torch.float32, 0)
    query, cache = normal(4, 1, 16), normal(1, 4, 1, 16)
    plan = plan_ragged(lay_out([3], [0]), 1, 1, SHAPE, DEVICE)
    with pytest.raises(ValueError, match=r"^plan: "):
        ragged_attention(query, query, query, cache, cache, place(plan)[None], plan, place(plan), window=None)


def patch(monkeypatch: pytest.MonkeyPatch, name: str, stand_in: Callable[[torch.device], Any]) -> None:
    for config in (launch_config, ragged_config):
        monkeypatch.setattr(config, name, stand_in)


@pytest.mark.reference
def test_long_contexts_use_long_tiles_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    patch(monkeypatch, "shared_memory", lambda device: LONG_SHAPE_BYTES)
    usual = {size: ragged_shape(size, 2, LONG_CONTEXT - 1, device) for size in (64, 128, 256)}
    found = {size: ragged_shape(size, 2, LONG_CONTEXT, device) for size in usual}
    assert found == {**usual, **LONG_SHAPES}
    assert all(usual[size] != shape for size, shape in LONG_SHAPES.items())
    patch(monkeypatch, "shared_memory", lambda device: LONG_SHAPE_BYTES - 1)
    assert {size: ragged_shape(size, 2, LONG_CONTEXT, device) for size in usual} == usual


@pytest.mark.reference
def test_descriptors_are_used_for_measured_head_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    patch(monkeypatch, "shared_memory", lambda device: 99 * 1024)
    patch(monkeypatch, "has_tile_loads", lambda device: True)
    assert ragged_shape(128, 2, 0, device) == replace(DESCRIBED_SHAPES[128], num_stages=2)
    assert not any(ragged_shape(*head, 0, device).has_descriptors for head in ((64, 2), (96, 2), (512, 2), (128, 4)))
    patch(monkeypatch, "has_tile_loads", lambda device: False)
    assert not ragged_shape(128, 2, 0, device).has_descriptors
