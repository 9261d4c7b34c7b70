"""Keys and values in FP8: stored and read like the reference, in every kernel that stores or reads them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention import block_attention as module
from dflash_kernels.attention.block_attention import block_attention, block_attention_ref
from dflash_kernels.attention.ragged_attention import Segment, plan_ragged, ragged_attention, ragged_attention_ref
from dflash_kernels.attention.ragged_config import DESCRIBED_SHAPES, RaggedShape, ragged_shape
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.fp8.fp8_config import has_fp8
from dflash_kernels.fp8.fp8_weight import FP8
from dflash_kernels.kv.context_kv import context_kv_store, context_kv_store_ref
from dflash_kernels.kv.kv_format import UNSCALED, KVScales, as_readable, check_formats, stored_ref
from dflash_kernels.kv.kv_store import kv_store, kv_store_ref
from dflash_kernels.kv.rope_store import KVPlace, rope_store, rope_store_ref
from dflash_kernels.kv.slot_mapping import PAD
from dflash_testing.tensors import (
    ARRANGEMENTS,
    DEVICE,
    DTYPES,
    Pages,
    assert_mostly_equal,
    assert_rows_close,
    between_layers,
    normal,
    random_pages,
    random_softmax,
    whole,
)

PAGE = 16
SLOTS = [5, PAD, 0, 17, PAD, 3, 16]
SCALES = [UNSCALED, KVScales(0.037, 2.5)]


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def every_number() -> Tensor:
    """Return each finite number of e4m3, numbers between neighbours and ties, and numbers outside of the range."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    close = torch.cat((ties * (1 + 2**-20), ties * (1 - 2**-20)))
    found = torch.cat((numbers, ties, close, torch.tensor([449.0, 464.0, 465.0, -1e9, 1e38, 2**-10, -(2**-11)])))
    return torch.nn.functional.pad(found, (0, -len(found) % 8)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("arrangement", ["alone", "between layers"])
def test_rows_are_stored_and_returned_as_the_reference_rounds_them(
    arrangement: str, scales: KVScales, dtype: torch.dtype
) -> None:
    projected = normal(len(SLOTS), 7, 24, dtype=dtype) * 40
    keys, values = projected[:, 3:5], projected[:, 5:]
    found = []
    for store in (kv_store, kv_store_ref):
        empty = torch.zeros(5, 4, 2, 24, device=DEVICE).to(FP8)
        caches = ARRANGEMENTS[arrangement](empty, empty.clone())
        found.append((caches, store(keys, values, *caches, whole(*SLOTS), scales)))
    (caches, rows), (wanted_caches, wanted_rows) = found
    assert all(map(equal_bytes, caches, wanted_caches))
    assert all(map(torch.equal, rows, wanted_rows))
    kept = [index for index, slot in enumerate(SLOTS) if slot != PAD]
    for cache, row in zip(caches, rows, strict=True):
        assert torch.equal(cache.flatten(0, 1)[[SLOTS[index] for index in kept]].to(dtype), row[kept])


def test_every_number_is_rounded_to_nearest_and_limited() -> None:
    """The nearest of all numbers of the format, with ties to the even byte."""
    rows = every_number().view(-1, 1, 8)
    table = torch.arange(128, dtype=torch.uint8).view(FP8).double()[:127].to(DEVICE)  # sizes, without NaN
    distance = (rows.double().abs().clamp(max=448)[..., None] - table).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    first = is_nearest.int().argmax(-1)
    wanted = table[torch.where((is_nearest.sum(-1) > 1) & (first % 2 == 1), first + 1, first)] * rows.sign()
    for store in (kv_store, kv_store_ref):
        cache = torch.zeros(len(rows), 1, 1, 8, device=DEVICE).to(FP8)
        stored, _ = store(rows, rows, cache, cache.clone(), torch.arange(len(rows), device=DEVICE))
        assert torch.equal(stored.double(), wanted)
        assert torch.equal(cache.double().flatten(0, 1), wanted)


def test_rows_of_another_cache_are_returned_unchanged() -> None:
    keys, values = normal(3, 2, 8), normal(3, 2, 8, seed=1)
    for store in (kv_store, kv_store_ref):
        found = store(keys, values, normal(2, 4, 2, 8), normal(2, 4, 2, 8), whole(0, PAD, 5))
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_value_norm", [True, False])
@pytest.mark.parametrize("scales", SCALES)
def test_rotated_heads_are_stored_in_fp8(scales: KVScales, has_value_norm: bool, dtype: torch.dtype) -> None:
    """Queries are not rounded. Keys and values of the result are the stored numbers."""
    num_heads, num_kv, size = 5, 2, 24
    parts = normal(2, len(SLOTS), (num_heads + 2 * num_kv) * size) * 3
    norms = normal(num_heads + num_kv * (1 + has_value_norm), size, dtype=dtype, seed=3)
    angles = normal(len(SLOTS), size // 2, seed=4).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    empty = torch.zeros(5, 4, num_kv, size, device=DEVICE).to(FP8)
    places = [KVPlace(*between_layers(empty, empty.clone()), whole(*SLOTS), scales) for _ in range(2)]
    arguments = (parts, norms, 1e-6, cos, sin, num_kv)
    found, wanted = rope_store(*arguments, places[0]), rope_store_ref(*arguments, places[1])
    plain = rope_store(*arguments, None)
    assert torch.equal(found[:, :num_heads], plain[:, :num_heads])
    keys, values = plain[:, num_heads:-num_kv], plain[:, -num_kv:]
    exact = [stored_ref(rows, empty, scale).to(dtype) for rows, scale in zip((keys, values), scales, strict=True)]
    assert torch.equal(found[:, num_heads:], torch.cat(exact, 1))
    assert_mostly_equal(found[:, num_heads:], wanted[:, num_heads:])
    kept = [index for index, slot in enumerate(SLOTS) if slot != PAD]
    for cache, rows in zip(places[0][:2], exact, strict=True):
        stored = cache.flatten(0, 1).to(dtype)
        assert torch.equal(stored[[SLOTS[index] for index in kept]], rows[kept])
        assert int(stored.flatten(1).any(1).sum()) == len(kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_context_kv_is_stored_in_fp8(dtype: torch.dtype) -> None:
    layers, num_kv, size = 3, 2, 16
    projected = normal(len(SLOTS), layers, 2, num_kv, size, dtype=dtype) * 30
    weights = normal(layers, size, dtype=dtype, seed=2)
    angles = normal(len(SLOTS), size // 2, seed=4).repeat(1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    caches = []
    for store in (context_kv_store, context_kv_store_ref):
        empty = torch.zeros(layers, 5, 4, num_kv, size, device=DEVICE).to(FP8)
        caches.append(between_layers(empty, empty.clone()))
        store(projected, weights, 1e-6, *tables, *caches[-1], whole(*SLOTS))
    assert_mostly_equal(caches[0][0].float(), caches[1][0].float())
    assert equal_bytes(caches[0][1], caches[1][1])


def in_fp8(pages: Pages, scales: KVScales) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return caches in FP8 with NaN outside the context, and their numbers in float64 with zeros there."""
    caches = between_layers(
        stored_ref(pages.key_cache, torch.empty(0, dtype=FP8), scales.key),
        stored_ref(pages.value_cache, torch.empty(0, dtype=FP8), scales.value),
    )
    hole = ~pages.is_context[:, :, None, None]
    keys, values = (cache.double().masked_fill(hole, 0) for cache in caches)
    return caches, (keys * scales.key, values * scales.value)


def rounded(rows: Tensor, scale: float) -> Tensor:
    """Return rows as `kv_store` returns them."""
    return stored_ref(rows, torch.empty(0, dtype=FP8), scale).to(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("is_causal", "window", "kind"), [(True, None, None), (False, 9, None), (True, None, "both"), (False, None, "cap")]
)
def test_blocks_attend_to_pages_in_fp8(
    is_causal: bool, window: int | None, kind: str | None, scales: KVScales, is_balanced: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not is_balanced:
        monkeypatch.setattr(module, "balanced_shape", lambda *_: None)
    pages = random_pages([0, 1, PAGE - 1, PAGE + 1, 130], 2, 16, PAGE, dtype, 0)
    softmax = PLAIN if kind is None else random_softmax(kind, 4, dtype)
    check_block(pages, scales, softmax, dtype, is_causal=is_causal, window=window)


@pytest.mark.parametrize("head_dim", [24, 128, 256])
def test_head_sizes_of_pages_in_fp8(head_dim: int) -> None:
    pages = random_pages([40, 3], 1, head_dim, PAGE, torch.float32, 2)
    check_block(pages, SCALES[1], PLAIN, torch.float32, is_causal=True, window=None)


def check_block(
    pages: Pages, scales: KVScales, softmax: Softmax, dtype: torch.dtype, *, is_causal: bool, window: int | None
) -> None:
    caches, exact = in_fp8(pages, scales)
    num_kv, head_dim = pages.key_cache.shape[2:]
    query, kv = (normal(len(pages.context_lens), 7, heads, head_dim, dtype=dtype, seed=heads) for heads in (4, 2))
    keys = rounded(kv[:, :, :1].repeat(1, 1, num_kv, 1), scales.key)
    values = rounded(kv[:, :, 1:].repeat(1, 1, num_kv, 1), scales.value)
    options: dict[str, Any] = {"is_causal": is_causal, "window": window, "softmax": softmax}
    table = (pages.page_table, pages.context_lens)
    expected = block_attention_ref(
        query.double(), keys.double() * scales.key, values.double() * scales.value, *exact, *table, **options
    )
    for attend in (block_attention, block_attention_ref):
        assert_rows_close(attend(query, keys, values, *caches, *table, scales=scales, **options), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("window", [None, 20])
def test_prompts_attend_to_pages_in_fp8(
    window: int | None, scales: KVScales, is_paged: bool, dtype: torch.dtype
) -> None:
    """With `is_paged` the pages also hold the rows of the segments."""
    check_prompts(ragged_shape(16, dtype.itemsize, 0, DEVICE), 16, window, scales, is_paged, dtype)


def test_prompts_with_descriptors_attend_to_pages_in_fp8() -> None:
    check_prompts(DESCRIBED_SHAPES[128], 128, None, SCALES[1], False, torch.float16)


def check_prompts(
    shape: RaggedShape, head_dim: int, window: int | None, scales: KVScales, is_paged: bool, dtype: torch.dtype
) -> None:
    segments = (Segment(0, 70, 90, 1), Segment(70, 9, 0, 0))
    lens = [9, 160] if is_paged else [0, 90]
    pages = random_pages(lens, 2, head_dim, PAGE, dtype, 3, spare_pages=5)
    caches, exact = in_fp8(pages, scales)
    query = normal(79, 6, head_dim, dtype=dtype, seed=1)
    keys, values = (rounded(normal(79, 2, head_dim, dtype=dtype, seed=2 + i), scales[i]) for i in (0, 1))
    if is_paged:
        for segment in segments:
            at = segment.context_len + torch.arange(segment.num_rows, device=DEVICE)
            where = pages.page_table[segment.table_row, at // PAGE], at % PAGE
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            keys[rows], values[rows] = (cache[where].to(dtype) for cache in caches)
    plan = plan_ragged(segments, 6, 2, shape, DEVICE)
    plan = type(plan)(plan.segments, plan.tiles, plan.sums, plan.num_parts, plan.shape, is_paged)
    placed = torch.tensor(plan.ints, dtype=torch.int64, device=DEVICE)
    wide = query.double(), keys.double() * scales.key, values.double() * scales.value
    expected = ragged_attention_ref(*wide, *exact, pages.page_table, plan, placed, window=window)
    for attend in (ragged_attention, ragged_attention_ref):
        found = attend(query, keys, values, *caches, pages.page_table, plan, placed, window=window, scales=scales)
        assert_rows_close(found, expected, dtype)


def test_caches_of_other_formats_are_refused() -> None:
    rows, half = normal(2, 1, 1, 8), normal(2, 1, 1, 8, dtype=torch.float16)
    fp8 = rows.to(FP8)
    for caches in ((fp8, rows), (half, half), (rows.to(torch.float8_e5m2),) * 2):
        with pytest.raises(TypeError):
            check_formats(*caches, rows)
        with pytest.raises(ValueError, match="keys, values, caches"):
            kv_store(rows[:, 0], rows[:, 0], *caches, whole(0, 1))
    check_formats(fp8, fp8, rows)


@pytest.mark.gpu
def test_a_gpu_with_fp8_reads_pages_without_decoding_bytes() -> None:
    assert (as_readable(torch.zeros(1, device=DEVICE).to(FP8)).dtype == FP8) == has_fp8(DEVICE)


@pytest.mark.gpu
def test_bytes_and_numbers_give_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without conversions of FP8 computes the same numbers."""
    from dflash_kernels.kv import kv_format

    pages = random_pages([130, 7], 2, 128, PAGE, torch.bfloat16, 0)
    caches, _ = in_fp8(pages, SCALES[1])
    query, kv = (normal(2, 8, heads, 128, dtype=torch.bfloat16, seed=heads) for heads in (8, 4))
    keys, values = rounded(kv[:, :, :2], SCALES[1].key), rounded(kv[:, :, 2:], SCALES[1].value)

    def outputs() -> list[Tensor]:
        stores = [torch.zeros(1, 16, 2, 128, device=DEVICE).to(FP8) for _ in range(2)]
        slots = torch.arange(8, device=DEVICE)
        stored = kv_store(kv[0, :, :2] * 50, kv[0, :, 2:], stores[0], stores[1], slots, SCALES[1])
        attended = block_attention(
            query, keys, values, *caches, pages.page_table, pages.context_lens, is_causal=True, window=None,
            scales=SCALES[1],
        )  # fmt: skip
        return [attended, *stored, *(cache.view(torch.uint8) for cache in stores)]

    wanted = outputs()
    monkeypatch.setattr(kv_format, "has_fp8", lambda device: False)
    assert all(map(torch.equal, outputs(), wanted))
