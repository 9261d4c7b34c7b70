"""What a user types for a place, and what a place that cannot be had is answered with."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.kv_transfer import process_connector
from dflash_runtime.kv_transfer.connector import CONNECTORS, OpenOptions
from dflash_runtime.kv_transfer.file_connector import FileConnector
from dflash_runtime.kv_transfer.places import open_connector
from dflash_testing.transfers import free_place

KNOWN = "expected a folder, gloo://HOST:PORT, nccl://HOST:PORT, nixl://HOST:PORT"


@pytest.mark.parametrize("place", ["handoffs", "./a:b", "/tmp/a b", "file"])
def test_a_path_is_a_folder(place: str, tmp_path: Path) -> None:
    connector = open_connector(place, "decode")
    assert isinstance(connector, FileConnector)
    assert (connector.name, connector.folder) == ("file", Path(place))
    connector.close()


@pytest.mark.parametrize("place", ["", "tcp://host:1", "file:///tmp", "://", "gloo:host:1", "nixl:/x", "http://a/b"])
def test_what_is_no_place_is_told_which_there_are(place: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_connector(place, "prefill")
    assert raised.value.message == f"{place!r} is no place for hand-offs, {KNOWN}"


@pytest.mark.parametrize("place", ["gloo://", "gloo://host", "gloo://:1", "gloo://host:1/x", "gloo://host:99999"])
def test_what_is_no_address(place: str) -> None:
    with pytest.raises(UsageError, match="is no address, expected HOST:PORT"):
        open_connector(place, "prefill")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="file: a file, expected a folder for hand-offs"):
        open_connector(str(file), "prefill")


def test_a_host_that_is_not_this_machine() -> None:
    with pytest.raises(UsageError) as raised:
        open_connector("gloo://192.0.2.1:7654", "prefill", 0.2)
    assert raised.value.message == "cannot listen at 192.0.2.1:7654: Cannot assign requested address"


def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_connector.dist, "is_backend_available", lambda backend: backend == "gloo")
    with pytest.raises(UnsupportedError, match="nccl:// needs a torch that has nccl") as raised:
        open_connector(free_place("nccl"), "prefill", 0.2)
    assert raised.value.exit_code == 5
    monkeypatch.setattr(process_connector.dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="nccl:// needs a GPU, and there is none here") as raised:
        open_connector(free_place("nccl"), "prefill", 0.2)
    assert raised.value.hint == "gloo:// does without"


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UnsupportedError, match=r"nixl:// needs nixl, which is not installed") as raised:
        open_connector(free_place("nixl"), "prefill", 0.2)
    assert (raised.value.hint, raised.value.exit_code) == ("pip install 'dflash-cli[nixl]'", 5)


def test_a_connector_is_added_by_registering_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, OpenOptions]] = []

    def open_pigeon(place: str, options: OpenOptions) -> Any:
        opened.append((place, options))

    monkeypatch.setattr(CONNECTORS, "_items", dict(CONNECTORS._items))
    CONNECTORS.register("pigeon")(open_pigeon)
    open_connector("pigeon://loft:1", "decode", 5.0)
    assert opened == [("loft:1", OpenOptions("decode", 5.0))]
