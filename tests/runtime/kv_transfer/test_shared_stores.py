"""A prefix store that others use, damage or fill at the same time: a page is the right one or is computed again."""

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_runtime.errors import CapacityError
from dflash_runtime.kv_transfer import stored_pages
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.stored_pages import StoredPages
from dflash_testing.deadline import deadline
from dflash_testing.irregular_files import IRREGULAR, make_irregular

SHAPE = (2, 2, 4, 8)
SPECS = {"target": TensorSpec("float32", SHAPE), "draft": TensorSpec("bfloat16", SHAPE)}
PAIR, OTHER_PAIR = "ab" * 16, "cd" * 16
NAME, OTHER_NAME = f"{1:032x}", f"{2:032x}"


def page(value: float) -> dict[str, Tensor]:
    return {name: torch.full(SHAPE, value, dtype=spec.torch_dtype) for name, spec in SPECS.items()}


def open_pages(root: Path, pair: str = PAIR, max_bytes: int = 10**9) -> StoredPages:
    pages = StoredPages(root, pair, SPECS, max_bytes)
    pages.list_files()
    return pages


def file_of(root: Path, name: str = NAME, pair: str = PAIR) -> Path:
    return root / pair / f"{name}.safetensors"


def is_page(found: dict[str, Tensor] | None, value: float) -> bool:
    return found is not None and all(torch.equal(found[name], item) for name, item in page(value).items())


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    header, body = header_of(data)
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def facts(header: dict[str, Any], **changes: Any) -> None:
    known = json.loads(header["__metadata__"]["page"])
    header["__metadata__"]["page"] = json.dumps({**known, **changes})


def cut_to(part: int) -> Callable[[bytes], bytes]:
    return lambda data: data[: len(data) * part // 8]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut to {part} of 8": cut_to(part) for part in range(8)},
    "one byte less": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "a sparse end": lambda data: data + bytes(4096),
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "first byte of a tensor flipped": lambda data: with_header(data, lambda _: None)[:-512] + b"\xff" + data[-511:],
    "another digest": lambda data: with_header(data, lambda header: facts(header, digest=OTHER_NAME)),
    "another fingerprint": lambda data: with_header(data, lambda header: facts(header, fingerprint=OTHER_PAIR)),
    "no checksums": lambda data: with_header(data, lambda header: facts(header, crc32={})),
    "checksums of another type": lambda data: with_header(data, lambda header: facts(header, crc32=7)),
    "a key more": lambda data: with_header(data, lambda header: facts(header, more=1)),
    "no metadata": lambda data: with_header(data, lambda header: header.pop("__metadata__")),
    "deep metadata": lambda data: with_header(data, lambda header: header["__metadata__"].update(page="[" * 9999)),
    "names exchanged": lambda data: with_header(
        data, lambda header: header.update(target=header["draft"], draft=header["target"])
    ),
    "another dtype, same size": lambda data: with_header(data, lambda header: header["target"].update(dtype="I32")),
    "half floats": lambda data: with_header(data, lambda header: header["draft"].update(dtype="F16")),
    "another shape of the same size": lambda data: with_header(
        data, lambda header: header["target"].update(shape=[2, 2, 8, 4])
    ),
    "an endless shape": lambda data: with_header(data, lambda header: header["target"].update(shape=[2**62, 2**62])),
    "an endless header": lambda data: struct.pack("<Q", 2**63) + data[8:],
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_a_harmed_page_is_removed_and_written_again(tmp_path: Path, name: str) -> None:
    open_pages(tmp_path).write(NAME, page(1))
    file = file_of(tmp_path)
    file.write_bytes(HARMS[name](file.read_bytes()))
    pages = open_pages(tmp_path)
    assert pages.read(NAME) is None
    assert not file.exists()
    assert NAME not in pages
    pages.write(NAME, page(1))
    assert is_page(open_pages(tmp_path).read(NAME), 1)


@pytest.mark.parametrize("kind", [kind for kind in IRREGULAR if kind != "directory"])
def test_something_else_under_a_pages_name_is_replaced(tmp_path: Path, kind: str) -> None:
    (tmp_path / PAIR).mkdir()
    make_irregular(file_of(tmp_path), kind)
    pages = open_pages(tmp_path)
    with deadline(10):
        assert pages.read(NAME) is None
        pages.write(NAME, page(1))
        pages.tidy()
    assert is_page(open_pages(tmp_path).read(NAME), 1)


def test_a_directory_under_a_pages_name_is_kept_and_named(tmp_path: Path) -> None:
    """It may hold somebody's files."""
    file_of(tmp_path).mkdir(parents=True)
    (file_of(tmp_path) / "precious").write_text("")
    pages = open_pages(tmp_path)
    assert pages.read(NAME) is None
    with pytest.raises(CapacityError) as caught:
        pages.write(NAME, page(1))
    assert (caught.value.id, caught.value.path) == ("page-not-written", file_of(tmp_path))
    pages.tidy()
    assert (file_of(tmp_path) / "precious").exists()


@pytest.mark.parametrize("kind", ["file", *(kind for kind in IRREGULAR if kind != "directory")])
def test_something_else_in_place_of_a_pairs_folder_is_named(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / PAIR).write_text("")
    else:
        make_irregular(tmp_path / PAIR, kind)
    pages = open_pages(tmp_path)
    with deadline(10):
        assert pages.read(NAME) is None
        pages.tidy()
        with pytest.raises(CapacityError) as caught:
            pages.write(NAME, page(1))
    assert caught.value.id == "page-not-written"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_a_page_keeps_the_old_ones(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = open_pages(tmp_path)
    pages.write(NAME, page(1))

    def refuse(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(stored_pages, "save_file", refuse)
    with pytest.raises(CapacityError):
        pages.write(OTHER_NAME, page(2))
    assert OTHER_NAME not in pages
    assert [item.name for item in (tmp_path / PAIR).iterdir()] == [file_of(tmp_path).name]
    assert is_page(open_pages(tmp_path).read(NAME), 1)


@pytest.mark.parametrize("moment", range(4))
def test_a_writer_that_is_killed_leaves_whole_pages_and_a_swept_rest(
    tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before, in the middle of, or after the write of a page's bytes, or after its rename."""
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        whole = save_file

        def die(tensors: Any, path: Path, metadata: Any) -> None:
            if moment > 0:
                whole(tensors, path, metadata)
            if moment == 1:
                os.truncate(path, 100)
            if moment < 3:
                os._exit(1)

        setattr(stored_pages, "save_file", die)  # noqa: B010
        open_pages(tmp_path).write(NAME, page(1))
        os._exit(0)
    monkeypatch.setattr(stored_pages, "PARTIAL_SECONDS", -1.0)
    pages = open_pages(tmp_path)
    pages.tidy()
    found = pages.read(NAME)
    assert is_page(found, 1) if moment == 3 else found is None
    names = [item.name for item in (tmp_path / PAIR).iterdir()] if (tmp_path / PAIR).exists() else []
    assert all(not name.startswith(".") for name in names)
    pages.write(NAME, page(1))
    assert is_page(open_pages(tmp_path).read(NAME), 1)


def test_processes_write_read_and_tidy_one_folder_at_once(tmp_path: Path) -> None:
    """Four processes with 60 pages each of two pairs, in a store for a third of them: no process fails."""
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            code = 1
            try:
                pair = (PAIR, OTHER_PAIR)[number % 2]
                pages = open_pages(tmp_path, pair, max_bytes=40 * 4096)
                for index in range(60):
                    pages.write(f"{index:032x}", page(index))
                    found = pages.read(f"{(index * 7) % 60:032x}")
                    assert found is None or is_page(found, (index * 7) % 60)
                    if pages.is_untidy:
                        pages.tidy()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    pages = open_pages(tmp_path, max_bytes=40 * 4096)
    pages.tidy()
    assert sum(item.stat().st_size for item in tmp_path.rglob("*.safetensors")) <= 40 * 4096
