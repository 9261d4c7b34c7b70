"""KV pages: their memory layout, and copies out of pages and into pages."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_runtime.device.storage import kv_pages
from dflash_runtime.device.storage.kv import KVCache, bytes_per_token
from dflash_runtime.device.storage.kv_pages import PagePorter
from dflash_runtime.device.storage.state import Uploader
from dflash_testing.pairs import CPU, placement, random_target

TARGET = random_target().config
STATM = Path("/proc/self/statm")


def filled(num_pages: int) -> KVCache:
    """A cache of distinct numbers."""
    cache = KVCache(TARGET, num_pages, 16, placement())
    cache.pages.copy_(torch.arange(cache.pages.numel()).view(cache.pages.shape))
    return cache


def porter(cache: KVCache) -> PagePorter:
    return PagePorter({"target.pages": cache}, CPU, Uploader(CPU))


def test_a_page_is_contiguous() -> None:
    cache = filled(5)
    assert cache.pages.shape == (5, TARGET.num_layers, 2, 16, 16)
    assert cache.page_bytes == cache.pages[0].nbytes == 16 * bytes_per_token(TARGET, torch.float32)
    assert [page.is_contiguous() for page in cache.pages] == [True] * 5
    for layer, tensors in cache.layers.items():
        for kind, (tensor, whole) in enumerate(zip(tensors, (cache.keys, cache.values), strict=True)):
            assert torch.equal(tensor.flatten(2), cache.pages[:, layer, kind])
            assert (tensor.data_ptr(), tensor.stride()) == (whole[layer].data_ptr(), whole[layer].stride())


def test_layers_with_other_kv_heads_share_pages_as_wide_as_the_widest() -> None:
    """2 heads of 8 numbers, and 1 head of 24 numbers: a slot has 24 numbers, and most layers use the first 16."""
    config = replace(TARGET, other_kv_shapes={1: (1, 24)})
    assert config.kv_shapes == ((2, 8), (1, 24), (2, 8), (2, 8))
    cache = KVCache(config, 3, 16, placement())
    assert [tuple(keys.shape) for keys, _ in cache.layers.values()] == [(3, 16, *shape) for shape in config.kv_shapes]
    for layer, (keys, values) in cache.layers.items():
        keys.fill_(layer + 1)
        values.fill_(-layer - 1)
    assert [keys.unique().tolist() for keys, _ in cache.layers.values()] == [[1], [2], [3], [4]]
    assert [values.unique().tolist() for _, values in cache.layers.values()] == [[-1], [-2], [-3], [-4]]
    assert cache.pages[..., 16:].count_nonzero() == 3 * 16 * 2 * 8  # numbers of the widest layer
    assert cache.keys.shape == (4, 3, 16, 1, 24)
    assert cache.pages.nbytes == 48 * bytes_per_token(config, torch.float32)
    assert bytes_per_token(TARGET, torch.float32) == 2 * 4 * 16 * 4


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux, which reports the memory of a process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_pages_take_no_host_memory(dtype: torch.dtype) -> None:
    before = num_resident_bytes()
    cache = KVCache(TARGET, 40_000, 16, placement(dtype))
    assert cache.pages.nbytes >= 128 * 2**20
    assert num_resident_bytes() - before < cache.pages.nbytes / 16
    assert (cache.pages.dtype, cache.values.shape) == (dtype, cache.keys.shape)
    cache.pages[-1] = 1
    assert not cache.pages[:-1:9_973].any()


def num_resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two pages, so that a request has several pieces."""
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", 2 * filled(1).page_bytes)


@pytest.mark.usefixtures("small_pieces")
def test_copied_pages_come_back_unchanged() -> None:
    """Rows past the last token are zeros, and other pages do not change."""
    source, target = filled(9), KVCache(TARGET, 12, 16, placement())
    out = porter(source).begin_out([7, 2, 4, 8, 1, 3], num_tokens=70)
    assert porter(source).advance(out)
    taken = out.tensors["target.pages"]
    assert taken.is_contiguous()
    expected = source.pages[[7, 2, 4, 8, 1]].clone()
    expected[4, :, :, 6:] = 0
    assert torch.equal(taken, expected)
    target.pages.fill_(-1)
    moving = porter(target).begin_in(out.tensors, [5, 6, 0, 11, 2], first=1)
    assert porter(target).advance(moving)
    assert torch.equal(target.pages[[6, 0, 11, 2]], expected[1:])
    assert bool((target.pages[[1, 3, 4, 5, 7, 8, 9, 10]] == -1).all())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("num_layers", [0, 1, 3, 6])
def test_missing_layers_are_zeros(num_layers: int) -> None:
    cache = filled(6)
    before = cache.pages.clone()
    tensors = {"target.pages": torch.ones(3, num_layers, 2, 16, 16, dtype=torch.float16)} if num_layers else {}
    assert porter(cache).advance(porter(cache).begin_in(tensors, [4, 1, 2], first=0))
    assert bool((cache.pages[[4, 1, 2], :num_layers] == 1).all())
    assert not cache.pages[[4, 1, 2], num_layers:].any()
    assert torch.equal(cache.pages[[0, 3, 5]], before[[0, 3, 5]])


def test_payloads_are_pinned_with_the_porters_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector's thread begins with the first GPU as its current device."""
    current: list[object] = []

    @contextmanager
    def as_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        assert current == [CPU]
        return tensor

    carrier = porter(filled(2))
    monkeypatch.setattr(carrier, "_stream", object())
    monkeypatch.setattr(kv_pages, "as_current", as_current)
    monkeypatch.setattr(kv_pages, "_pinned", pinned)
    assert carrier.pin({"target": torch.ones(2)}).keys() == {"target"}
