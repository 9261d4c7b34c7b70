"""Hand-offs as files: saved completely or not at all, awaited, refused, and damaged in every way."""

import json
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.documents import to_json
from dflash_runtime.errors import (
    MISSING,
    CapacityError,
    InvalidHandoff,
    PeerUnreachable,
    UnsupportedError,
    UsageError,
)
from dflash_runtime.kv_transfer import file_connector
from dflash_runtime.kv_transfer.file_connector import (
    FileConnector,
    read_handoff,
    write_handoff,
)
from dflash_runtime.kv_transfer.handoff_folders import HEADER, TENSORS, list_handoffs
from dflash_runtime.kv_transfer.payload_bytes import header_with_checksums
from dflash_testing.deadline import deadline
from dflash_testing.refusals import refuses
from dflash_testing.transfers import LIMIT_S, Peers, are_same, error_of, make_handoff, outcome, transfer_threads

HEADER_KEYS = {
    "version", "kind", "key", "fingerprint", "prompt_token_ids", "output_token_ids", "params", "seed", "num_rows",
    "state_values", "finish_reason", "note", "tensors", "digest",
}  # fmt: skip
PARAMS = {
    "max_new_tokens": 5, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None, "stop_token_ids": [7],
    "ignore_eos": False, "verify_width": None,
}  # fmt: skip


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[FileConnector]:
    with deadline(60):
        one = FileConnector(tmp_path / "handoffs")
        yield one
        one.close()
        one.close()
        assert not transfer_threads()


def test_a_saved_hand_off_can_be_loaded_any_number_of_times(connector: FileConnector) -> None:
    connector.save(make_handoff("a", 3)).result(LIMIT_S)
    assert [outcome(connector.load("a")) for _ in range(2)] == [3, 3]
    assert list_handoffs(connector.folder) == ["a"]
    assert not [item for item in connector.folder.iterdir() if item.name.startswith(".")]


def test_loads_wait_for_keys_in_any_order(connector: FileConnector) -> None:
    keys = [f"key-{number}" for number in range(20)]
    loads = {key: connector.load(key) for key in reversed(keys)}
    time.sleep(0.05)
    assert not any(load.done() for load in loads.values())
    saves = [connector.save(make_handoff(key, number)) for number, key in enumerate(keys)]
    assert [outcome(loads[key]) for key in keys] == list(range(20))
    assert [outcome(save) for save in saves] == [None] * 20


def test_a_cancelled_load_is_not_read(connector: FileConnector) -> None:
    given_up, wanted = connector.load("a"), connector.load("b")
    assert given_up.cancel()
    for key in "ab":
        connector.save(make_handoff(key))
    assert are_same(wanted.result(LIMIT_S), make_handoff("b"))


def test_a_refusal_ends_loads_until_a_hand_off_is_saved_after_all(connector: FileConnector) -> None:
    waiting = connector.load("a")
    connector.refuse("a", "no page is free")
    for loading in (waiting, connector.load("a")):
        error = error_of(loading)
        assert (type(error), error.id, error.found) == (PeerUnreachable, "handoff-refused", "a")
        assert "no page is free" in error.message
    connector.save(make_handoff("a", 2)).result(LIMIT_S)
    assert [item.name for item in connector.folder.iterdir()] == ["a"]
    connector.refuse("a", "too late")
    assert outcome(connector.load("a")) == 2


def test_saving_again_replaces_and_loads_meanwhile_get_the_old_or_the_new(connector: FileConnector) -> None:
    connector.save(make_handoff("a", 0)).result(LIMIT_S)
    saves = [connector.save(make_handoff("a", 1 + number)) for number in range(12)]
    loads = [connector.load("a") for _ in range(12)]
    assert {type(outcome(load)) for load in loads} == {int}
    assert [outcome(save) for save in saves] == [None] * 12
    assert sorted(item.name for item in connector.folder.iterdir()) == ["a"]


def test_a_hand_off_that_is_absent_while_it_is_replaced_is_read_afterwards(
    connector: FileConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process replaces a hand-off while another process, which has seen the old one, begins to read it."""
    connector.save(make_handoff("a", 1)).result(LIMIT_S)
    found, aside = connector.folder / "a", connector.folder / ".aside"
    looks: list[Path] = []
    identity = file_connector._identity

    def away(path: Path) -> int | None:
        looks.append(path)
        if len(looks) == 1:
            found.rename(aside)
        elif len(looks) == 3:
            aside.rename(found)
        return identity(path)

    monkeypatch.setattr(file_connector, "_identity", away)
    assert outcome(connector.load("a")) == 1
    assert len(looks) >= 3


def test_a_hand_off_that_is_replaced_before_torch_maps_its_file_is_read_again(
    connector: FileConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors opens a file twice, and torch's error at the second time is a RuntimeError."""
    connector.save(make_handoff("a", 1)).result(LIMIT_S)
    is_replaced = threading.Event()

    def replaced(path: Path) -> Any:
        if not is_replaced.is_set():
            is_replaced.set()
            write_handoff(connector.folder, make_handoff("a", 2))
            raise RuntimeError(f"unable to open file <{path}> in read-only mode: No such file or directory (2)")
        return load_file(path)

    monkeypatch.setattr(file_connector, "load_file", replaced)
    assert outcome(connector.load("a")) == 2


def test_closing_cancels_waiting_and_later_loads(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    waiting = connector.load("a")
    connector.close()
    assert waiting.cancelled()
    assert connector.load("b").cancelled()


@pytest.mark.parametrize("key", ["", ".", "..", ".hidden", "../a", "/etc/passwd", "a/b", "a\\b", "a\0b"])
def test_a_key_cannot_name_another_folder(connector: FileConnector, key: str) -> None:
    with refuses(UsageError, field="key of a hand-off", found=key):
        connector.load(key)
    with refuses(UsageError, field="key of a hand-off", found=key):
        connector.refuse(key, "")
    error = error_of(connector.save(make_handoff(key)))
    assert (type(error), error.field, error.found) == (UsageError, "key of a hand-off", key)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_read_permission_is_reported(connector: FileConnector) -> None:
    connector.save(make_handoff("a")).result(LIMIT_S)
    connector.folder.chmod(0)
    try:
        assert outcome(connector.load("a")) == "InvalidHandoff unreadable-handoff"
    finally:
        connector.folder.chmod(0o700)


def test_a_folder_that_cannot_be_listed_is_reported(connector: FileConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", fail)
    error = error_of(connector.load("a"))
    monkeypatch.undo()
    assert (type(error), error.id, error.path) == (InvalidHandoff, "unreadable-handoff", connector.folder / "a")
    assert "Permission denied" in error.message


def sealed(header: dict[str, Any]) -> dict[str, Any]:
    """The header with the digest of its present content."""
    rest = {name: value for name, value in header.items() if name != "digest"}
    return {**rest, "digest": digest_value(rest, digest_size=16)}


class TestWrongFiles:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        write_handoff(tmp_path, make_handoff("a"))
        return tmp_path / "a"

    @pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
    def test_tensors_that_are_cut_short(self, saved: Path, share: float) -> None:
        file = saved / TENSORS
        os.truncate(file, int(file.stat().st_size * share))
        with refuses(InvalidHandoff, "unreadable-handoff", path=file):
            read_handoff(saved)

    def test_tensors_that_are_missing(self, saved: Path) -> None:
        (saved / TENSORS).unlink()
        with refuses(InvalidHandoff, "unreadable-handoff", path=saved / TENSORS):
            read_handoff(saved)

    def test_a_flipped_bit(self, saved: Path) -> None:
        data = bytearray((saved / TENSORS).read_bytes())
        data[-1] ^= 1
        (saved / TENSORS).write_bytes(data)
        with refuses(InvalidHandoff, "damaged", path=saved):
            read_handoff(saved)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", '{"kind": "handoff", "kind": "handoff"}', "\ufeff{}", "\0"]
    )
    def test_a_header_that_is_not_an_object(self, saved: Path, text: str) -> None:
        (saved / HEADER).write_text(text)
        with refuses(InvalidHandoff, "malformed-header", path=saved / HEADER):
            read_handoff(saved)

    def test_the_header_has_the_keys_of_version_2(self, saved: Path) -> None:
        header = json.loads((saved / HEADER).read_text())
        assert header.keys() == HEADER_KEYS
        assert (header["version"], header["kind"], header["params"]) == (2, "handoff", PARAMS)
        assert header["tensors"]["draft"] == {"dtype": "bfloat16", "shape": [2, 3, 2, 4, 8], "crc32": 3412141102}
        assert header == to_json(header_with_checksums(make_handoff("a")))

    def test_a_header_of_a_later_version(self, saved: Path) -> None:
        (saved / HEADER).write_text(json.dumps({"kind": "handoff", "version": 3}))
        with refuses(UnsupportedError, "later-version", path=saved / HEADER, field="version", found=3):
            read_handoff(saved)

    @pytest.mark.parametrize("field", sorted(HEADER_KEYS))
    def test_a_header_without_a_field(self, saved: Path, field: str) -> None:
        header = json.loads((saved / HEADER).read_text())
        del header[field]
        (saved / HEADER).write_text(json.dumps(header))
        with refuses(InvalidHandoff, "missing-key", field=field, found=MISSING) as caught:
            read_handoff(saved)
        assert caught.value.path in (saved, saved / HEADER)

    @pytest.mark.parametrize(
        ("field", "value", "wrong"),
        [
            ("kind", "dump", "kind"),
            ("key", 7, "key"),
            ("seed", "7", "seed"),
            ("seed", True, "seed"),
            ("num_rows", [3], "num_rows"),
            ("num_rows", {"target": -3}, "num_rows.target"),
            ("state_values", None, "state_values"),
            ("note", "mine", "note"),
            ("version", 0, "version"),
            ("version", None, "version"),
            ("fingerprint", [], "fingerprint"),
            ("prompt_token_ids", "abc", "prompt_token_ids"),
            ("prompt_token_ids", [1, 2.5], "prompt_token_ids[1]"),
            ("prompt_token_ids", [True], "prompt_token_ids[0]"),
            ("output_token_ids", None, "output_token_ids"),
            ("params", {}, "params.max_new_tokens"),
            ("params", PARAMS | {"top_p": 7}, "params.top_p"),
            ("params", PARAMS | {"stop_token_ids": [1, None]}, "params.stop_token_ids[1]"),
            ("params", PARAMS | {"unknown": 7}, "params.unknown"),
            ("finish_reason", "tired", "finish_reason"),
            ("tensors", [], "tensors"),
            ("tensors", {"target": None}, "tensors.target"),
            ("tensors", {"target": {"dtype": "int4", "shape": [64]}}, "tensors.target.dtype"),
            ("tensors", {"target": {"dtype": [], "shape": [64]}}, "tensors.target.dtype"),
            ("tensors", {"target": {"dtype": "bool"}}, "tensors.target.shape"),
            ("tensors", {"target": {"dtype": "bool", "shape": [-1]}}, "tensors.target.shape[0]"),
            ("tensors", {"target": {"dtype": "bool", "shape": ["64"]}}, "tensors.target.shape[0]"),
            ("tensors", {"target": {"dtype": "bool", "shape": [65]}}, "tensors.target"),
            ("tensors", {"target": {"dtype": "bool", "shape": [64]}}, "tensors.target.crc32"),
            ("tensors", {"target": {"dtype": "bool", "shape": [2**62, 2**62]}}, "tensors.target.shape"),
            ("tensors", {"target": {"dtype": "bool", "shape": [2**63]}}, "tensors.target.shape"),
            ("tensors", {"target": {"dtype": "bool", "shape": [1] * 99}}, "tensors.target.shape"),
            ("tensors", {"another": {"dtype": "bool", "shape": [64]}}, "tensors.another"),
            ("seed", 2**63, "seed"),
            ("unknown", 7, "unknown"),
        ],
    )
    def test_a_header_with_a_wrong_field(self, saved: Path, field: str, value: Any, wrong: str) -> None:
        header = json.loads((saved / HEADER).read_text())
        header[field] = value
        (saved / HEADER).write_text(json.dumps(sealed(header)))
        with refuses(InvalidHandoff, field=wrong) as caught:
            read_handoff(saved)
        assert caught.value.path in (saved, saved / HEADER)

    @pytest.mark.parametrize("field", ["output_token_ids", "prompt_token_ids", "tensors", "seed", "num_rows", "digest"])
    def test_a_changed_header_differs_from_its_digest(self, saved: Path, field: str) -> None:
        header = json.loads((saved / HEADER).read_text())
        changed = {
            "output_token_ids": [5], "prompt_token_ids": [1, 2, 5], "seed": 1, "num_rows": {"target": 2}, "digest": "",
            "tensors": {name: {**spec, "crc32": None} for name, spec in header["tensors"].items()},
        }  # fmt: skip
        header[field] = changed[field]
        if field == "tensors":
            for spec in header["tensors"].values():
                del spec["crc32"]
        (saved / HEADER).write_text(json.dumps(header))
        with refuses(InvalidHandoff, "header-damaged", path=saved / HEADER, field="digest"):
            read_handoff(saved)

    @pytest.mark.parametrize("field", ["output_token_ids", "prompt_token_ids"])
    def test_rows_of_another_text_are_refused_even_with_a_new_digest(self, saved: Path, field: str) -> None:
        header = json.loads((saved / HEADER).read_text())
        header[field][-1] += 1
        (saved / HEADER).write_text(json.dumps(sealed(header)))
        with refuses(InvalidHandoff, "damaged", path=saved):
            read_handoff(saved)

    @pytest.mark.parametrize("name", [HEADER, TENSORS])
    def test_a_pipe_is_refused_at_once(self, saved: Path, name: str) -> None:
        (saved / name).unlink()
        os.mkfifo(saved / name)
        with deadline(10), refuses(InvalidHandoff, path=saved / name):
            read_handoff(saved)

    def test_a_connector_checks_a_loaded_hand_off_in_the_same_way(self, saved: Path) -> None:
        (saved / HEADER).write_text("{}")
        connector = FileConnector(saved.parent)
        error = error_of(connector.load("a"))
        assert (type(error), error.path, error.field) == (InvalidHandoff, saved / HEADER, "version")
        connector.close()


class TestFullDisk:
    """A failed write leaves no partial files, and the older hand-off stays."""

    @pytest.mark.parametrize("name", ["save_file", "header_with_checksums"])
    def test_a_step_that_fails(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reason = "No space left on device"

        def fail(*arguments: object) -> None:
            raise OSError(28, reason)

        write_handoff(tmp_path, make_handoff("a", 1))
        monkeypatch.setattr(file_connector, name, fail)
        with refuses(CapacityError, "handoff-not-written", path=tmp_path / "a", found=reason):
            write_handoff(tmp_path, make_handoff("a", 2))
        assert [item.name for item in tmp_path.iterdir()] == ["a"]
        assert are_same(read_handoff(tmp_path / "a"), make_handoff("a", 1))

    def test_a_limit_of_the_system(self, tmp_path: Path) -> None:
        """The system limits files to 100 kB, and the payload is larger."""
        connector = FileConnector(tmp_path)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            error = error_of(connector.save(make_handoff("a", 0, 1 << 20)))
            second = outcome(connector.save(make_handoff("b", 0, 8)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            connector.close()
        assert (type(error), error.id, error.path) == (CapacityError, "handoff-not-written", tmp_path / "a")
        assert second is None
        assert [item.name for item in tmp_path.iterdir()] == ["b"]

    def test_a_refusal_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        connector = FileConnector(tmp_path / "file")
        with refuses(CapacityError, "refusal-not-written", path=tmp_path / "file" / ".a.refused"):
            connector.refuse("a", "none")
        connector.close()


@pytest.mark.parametrize("num_kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_process_killed_while_writing_leaves_only_complete_hand_offs(
    peers: Peers, tmp_path: Path, num_kills: int
) -> None:
    generator, num_left = random.Random(5), 0
    for kill in range(num_kills):
        writer = peers.start(str(tmp_path), "prefill")
        for number in range(30):
            writer.tell("save", f"{kill}-{number}", number, 100_000)
            writer.tell("save", "same", number, 100_000)
        time.sleep(generator.uniform(0, 0.2))
        writer.kill()
        keys = [item.name for item in tmp_path.iterdir() if not item.name.startswith(".")]
        assert all(are_same(found, make_handoff(found.key, found.seed, 100_000)) for found in
                   (read_handoff(tmp_path / key) for key in keys))  # fmt: skip
        num_left += len(keys)
        for key in keys:
            shutil.rmtree(tmp_path / key)
    assert num_left, "nothing was written before any kill"


def test_a_missing_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path / "none", "no-handoff-folder"), (tmp_path, "no-handoffs")):
        with refuses(UsageError, problem, path=folder):
            list_handoffs(folder)


def test_errors_of_connectors_have_an_exit_code() -> None:
    codes: dict[Callable[..., Exception], int] = {CapacityError: 6, InvalidHandoff: 3, PeerUnreachable: 4}
    for kind, code in codes.items():
        assert getattr(kind, "exit_code", None) == code
