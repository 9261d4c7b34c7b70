"""Locations of hand-offs: a folder or an address opens a connector, and wrong locations are refused."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.kv_transfer import process_connector
from dflash_runtime.kv_transfer.connector import CONNECTORS, OpenOptions
from dflash_runtime.kv_transfer.connector_locations import names_folder, open_connector
from dflash_runtime.kv_transfer.file_connector import FileConnector
from dflash_testing.refusals import refuses
from dflash_testing.transfers import free_location

KNOWN = "a folder, gloo://HOST:PORT, nccl://HOST:PORT, nixl://HOST:PORT"


@pytest.mark.parametrize("location", ["handoffs", "./a:b", "/tmp/a b", "file"])
def test_a_path_is_a_folder(location: str, tmp_path: Path) -> None:
    assert names_folder(location)
    connector = open_connector(location, "decode")
    assert isinstance(connector, FileConnector)
    assert (connector.name, connector.folder) == ("file", Path(location))
    connector.close()


@pytest.mark.parametrize("location", ["", "tcp://host:1", "file:///tmp", "://", "gloo:host:1", "nixl:/x", "http://a/b"])
def test_an_unknown_location_is_refused_and_the_known_forms_are_listed(location: str) -> None:
    for opened in (lambda: open_connector(location, "prefill"), lambda: names_folder(location)):
        with refuses(UsageError, field="location of hand-offs", found=location, expected=KNOWN):
            opened()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:1/x", "host:99999"])
def test_a_malformed_address_is_refused(address: str) -> None:
    for opened in (lambda: open_connector(f"gloo://{address}", "prefill"), lambda: names_folder(f"gloo://{address}")):
        with refuses(UsageError, field="address", found=address):
            opened()


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with refuses(UsageError, "handoff-folder-is-a-file", path=file):
        open_connector(str(file), "prefill")


def test_an_address_of_another_machine_is_refused() -> None:
    with refuses(UsageError, "cannot-listen", found="192.0.2.1:7654") as caught:
        open_connector("gloo://192.0.2.1:7654", "prefill", 0.2)
    assert os.strerror(errno.EADDRNOTAVAIL) in caught.value.message


def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_connector.dist, "is_backend_available", lambda backend: backend == "gloo")
    with refuses(UnsupportedError, "backend-missing", found="nccl"):
        open_connector(free_location("nccl"), "prefill", 0.2)
    monkeypatch.setattr(process_connector.dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(UnsupportedError, "gpu-missing") as caught:
        open_connector(free_location("nccl"), "prefill", 0.2)
    assert "gloo://" in (caught.value.hint or "")


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with refuses(UnsupportedError, "nixl-missing") as caught:
        open_connector(free_location("nixl"), "prefill", 0.2)
    assert caught.value.hint == "pip install 'dflash-cli[nixl]'"


def test_a_connector_is_added_by_registering_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, OpenOptions]] = []

    def open_pigeon(location: str, options: OpenOptions) -> Any:
        opened.append((location, options))

    monkeypatch.setattr(CONNECTORS, "_items", dict(CONNECTORS._items))
    CONNECTORS.register("pigeon")(open_pigeon)
    open_connector("pigeon://loft:1", "decode", 5.0)
    assert opened == [("loft:1", OpenOptions("decode", 5.0))]
