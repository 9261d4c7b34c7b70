"""The files of a prefix store: lookups without the disk, a bound on bytes, and leftovers of killed processes."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_runtime.kv_transfer import prefix_store, stored_pages
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.prefix_store import PrefixStore
from dflash_runtime.kv_transfer.stored_pages import StoredPages
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams

PAGE = 4
SHAPE = (2, 2, PAGE, 8)
SPECS = {"target": TensorSpec("float32", SHAPE)}
PAGE_BYTES = 4 * 2 * 2 * PAGE * 8
PAIR = "ab" * 16


def page(value: float) -> dict[str, Tensor]:
    return {"target": torch.full(SHAPE, float(value))}


def name(number: int) -> str:
    return f"{number:032x}"


def open_pages(root: Path, max_bytes: int = 10**9, pair: str = PAIR) -> StoredPages:
    pages = StoredPages(root, pair, SPECS, max_bytes)
    pages.list_files()
    return pages


def listed(root: Path) -> set[int]:
    return {int(path.stem, 16) for path in root.rglob("*.safetensors")}


def test_pages_are_found_by_a_listing_and_read_back(tmp_path: Path) -> None:
    first = open_pages(tmp_path)
    first.write(name(1), page(1))
    assert name(1) in first
    again = open_pages(tmp_path)
    assert name(1) in again
    assert name(2) not in again
    found = again.read(name(1))
    assert found is not None
    assert torch.equal(found["target"], page(1)["target"])


def test_lookups_do_not_ask_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = open_pages(tmp_path)
    pages.write(name(1), page(1))
    monkeypatch.setattr(os, "stat", None)
    monkeypatch.setattr(os, "listdir", None)
    assert name(1) in pages
    assert name(2) not in pages
    pages.list_files()  # it was listed less than a minute ago


def test_a_page_that_another_process_removed_counts_as_missing(tmp_path: Path) -> None:
    pages = open_pages(tmp_path)
    pages.write(name(1), page(1))
    (tmp_path / PAIR / f"{name(1)}.safetensors").unlink()
    assert pages.read(name(1)) is None
    assert name(1) not in pages


def test_the_least_recently_used_pages_of_all_pairs_are_removed_above_the_limit(tmp_path: Path) -> None:
    other = open_pages(tmp_path, pair="cd" * 16)
    other.write(name(100), page(0))
    other.mark_used([name(100)], first=10**6)  # long ago
    size = next(tmp_path.rglob("*.safetensors")).stat().st_size
    pages = open_pages(tmp_path, max_bytes=8 * size)
    for number in range(8):
        pages.write(name(number), page(number))
    pages.mark_used([name(number) for number in range(8)])
    assert pages.is_untidy
    pages.tidy()
    assert listed(tmp_path) == set(range(7))  # not the page of the other pair, and not the last page of the text
    assert not (tmp_path / ("cd" * 16)).exists()
    assert name(7) not in pages
    assert not pages.is_untidy


def test_only_partial_files_of_killed_processes_are_swept(tmp_path: Path) -> None:
    pages = open_pages(tmp_path)
    pages.write(name(1), page(1))
    folder = tmp_path / PAIR
    old, new = (folder / f".{name(2)}.safetensors.tmp-0123456{digit}" for digit in "78")
    kept = [tmp_path / "model.safetensors", folder / "notes.txt", tmp_path / f".{name(2)}.safetensors.tmp-01234567"]
    for file in (old, new, *kept):
        file.write_text("")
        if file != new:
            os.utime(file, (1, 1))
    StoredPages(tmp_path, PAIR, SPECS, max_bytes=1).tidy()
    assert not old.exists()
    assert new.exists()
    assert all(file.exists() for file in kept)
    assert not list(folder.glob("*.safetensors"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    found = PrefixStore(tmp_path, lambda: Fingerprint({"of": "a pair"}), PAGE, SPECS, 10**9)
    yield found
    found.close()


def make_request(num_pages: int) -> Request:
    return Request(index=0, prompt_token_ids=tuple(range(num_pages * PAGE)), params=SamplingParams())


def test_pages_wait_for_a_slow_disk_up_to_a_limit(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "UNDER_WAY_BYTES", 6 * PAGE_BYTES)
    monkeypatch.setattr(prefix_store, "PORTION_BYTES", 4 * PAGE_BYTES)
    is_free, writes = threading.Event(), stored_pages.StoredPages.write

    def write_late(pages: StoredPages, digest: str, content: dict[str, Tensor]) -> None:
        is_free.wait(60)
        writes(pages, digest, content)

    monkeypatch.setattr(stored_pages.StoredPages, "write", write_late)
    store.begin_call(1)
    request = make_request(8)
    assert store.room(0) == 4  # a portion
    first = store.keep(request, 0, {"target": torch.zeros(4, *SHAPE)})
    assert store.room(0) == 2
    assert store.room(2) == 0
    second = store.keep(request, 4, {"target": torch.zeros(2, *SHAPE)})
    assert store.room(0) == 0
    is_free.set()
    first.result(60)
    second.result(60)
    assert store.room(0) == 4
    assert store.first_missing(request) == (6, 8)


def test_one_page_may_always_be_written(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "UNDER_WAY_BYTES", 1)
    store.begin_call(1)
    assert store.room(0) == 1
    assert store.room(1) == 0


def test_a_call_forgets_the_lookups_of_earlier_calls(store: PrefixStore) -> None:
    (key,) = store.begin_call(1)
    store.find(key, make_request(2))
    assert store.begin_call(1) != (key,)
    with pytest.raises(KeyError):
        store.load(key)
