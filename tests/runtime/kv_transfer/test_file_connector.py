"""Hand-offs as files: whole or not there, waited for, refused, and every way in which a file can be wrong."""

import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.errors import CapacityError, InvalidHandoff, PeerUnreachable, UsageError
from dflash_runtime.kv_transfer import file_connector
from dflash_runtime.kv_transfer.file_connector import (
    HEADER,
    TENSORS,
    FileConnector,
    list_handoffs,
    read_handoff,
    write_handoff,
)
from dflash_testing.deadline import deadline
from dflash_testing.processes import are_gone
from dflash_testing.transfers import LIMIT_S, Peers, are_same, make_handoff, outcome, transfer_threads


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[FileConnector]:
    with deadline(60):
        one = FileConnector(tmp_path / "handoffs")
        yield one
        one.close()
        one.close()
        assert not transfer_threads()


def test_what_is_saved_is_loaded_as_often_as_it_is_wanted(connector: FileConnector) -> None:
    connector.save(make_handoff("a", 3)).result(LIMIT_S)
    assert [outcome(connector.load("a")) for _ in range(2)] == [3, 3]
    assert list_handoffs(connector.folder) == ["a"]
    assert not [item for item in connector.folder.iterdir() if item.name.startswith(".")]


def test_keys_are_waited_for_in_any_order(connector: FileConnector) -> None:
    keys = [f"key-{number}" for number in range(20)]
    loads = {key: connector.load(key) for key in reversed(keys)}
    time.sleep(0.05)
    assert not any(load.done() for load in loads.values())
    saves = [connector.save(make_handoff(key, number)) for number, key in enumerate(keys)]
    assert [outcome(loads[key]) for key in keys] == list(range(20))
    assert [outcome(save) for save in saves] == [None] * 20


def test_a_load_that_is_cancelled_is_not_read(connector: FileConnector) -> None:
    given_up, wanted = connector.load("a"), connector.load("b")
    assert given_up.cancel()
    for key in "ab":
        connector.save(make_handoff(key))
    assert are_same(wanted.result(LIMIT_S), make_handoff("b"))


def test_a_refusal_ends_the_wait_until_something_is_saved_after_all(connector: FileConnector) -> None:
    waiting = connector.load("a")
    connector.refuse("a", "no page is free")
    assert outcome(waiting) == "PeerUnreachable: hand-off a will not come: no page is free"
    assert outcome(connector.load("a")) == "PeerUnreachable: hand-off a will not come: no page is free"
    connector.save(make_handoff("a", 2)).result(LIMIT_S)
    assert [item.name for item in connector.folder.iterdir()] == ["a"]
    connector.refuse("a", "too late")
    assert outcome(connector.load("a")) == 2


def test_saving_anew_replaces_and_whoever_reads_meanwhile_gets_one_or_the_other(connector: FileConnector) -> None:
    connector.save(make_handoff("a", 0)).result(LIMIT_S)
    saves = [connector.save(make_handoff("a", 1 + number)) for number in range(12)]
    loads = [connector.load("a") for _ in range(12)]
    assert {type(outcome(load)) for load in loads} == {int}
    assert [outcome(save) for save in saves] == [None] * 12
    assert sorted(item.name for item in connector.folder.iterdir()) == ["a"]


def test_what_is_away_for_a_moment_while_it_is_replaced_is_read_after_it(
    connector: FileConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process replaces a hand-off while another one, that has seen the old one, begins to read."""
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


def test_closing_cancels_what_waits_and_refuses_what_comes(tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    waiting = connector.load("a")
    connector.close()
    assert waiting.cancelled()
    assert connector.load("b").cancelled()


@pytest.mark.parametrize("key", ["", ".", "..", ".hidden", "../a", "/etc/passwd", "a/b", "a\\b", "a\0b"])
def test_a_key_leads_nowhere_else(connector: FileConnector, key: str) -> None:
    with pytest.raises(UsageError, match="is no key of a hand-off"):
        connector.load(key)
    with pytest.raises(UsageError, match="is no key of a hand-off"):
        connector.refuse(key, "")
    assert "is no key of a hand-off" in outcome(connector.save(make_handoff(key)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_says_so(connector: FileConnector) -> None:
    connector.save(make_handoff("a")).result(LIMIT_S)
    connector.folder.chmod(0)
    try:
        assert outcome(connector.load("a")).startswith("InvalidHandoff: ")
    finally:
        connector.folder.chmod(0o700)


def test_a_folder_that_cannot_be_looked_into_says_so(connector: FileConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", fail)
    loading = connector.load("a")
    error = loading.exception(LIMIT_S)
    monkeypatch.undo()
    assert str(error) == f"{connector.folder / 'a'}: cannot be read: Permission denied"


class TestWrongFiles:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        write_handoff(tmp_path, make_handoff("a"))
        return tmp_path / "a"

    def refused(self, saved: Path) -> str:
        with pytest.raises(InvalidHandoff) as raised:
            read_handoff(saved)
        assert str(saved) in raised.value.message
        assert raised.value.exit_code == 3
        return raised.value.message.replace(str(saved), "a")

    @pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
    def test_tensors_that_are_cut_short(self, saved: Path, share: float) -> None:
        file = saved / TENSORS
        os.truncate(file, int(file.stat().st_size * share))
        assert self.refused(saved).startswith(f"a/{TENSORS}: cannot be read, it may be cut short: ")

    def test_tensors_that_are_gone(self, saved: Path) -> None:
        (saved / TENSORS).unlink()
        assert self.refused(saved).startswith(f"a/{TENSORS}: cannot be read")

    def test_a_flipped_bit(self, saved: Path) -> None:
        data = bytearray((saved / TENSORS).read_bytes())
        data[-1] ^= 1
        (saved / TENSORS).write_bytes(data)
        assert "damaged, its checksum is not that of the header" in self.refused(saved)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", '{"kind": "handoff", "kind": "handoff"}', "\ufeff{}", "\0"]
    )
    def test_a_header_that_is_no_object(self, saved: Path, text: str) -> None:
        (saved / HEADER).write_text(text)
        assert self.refused(saved).startswith(f"a/{HEADER}: ")

    @pytest.mark.parametrize("field", [*make_handoff("a").to_header()])
    def test_a_header_without_a_field(self, saved: Path, field: str) -> None:
        header = json.loads((saved / HEADER).read_text())
        del header[field]
        (saved / HEADER).write_text(json.dumps(header))
        self.refused(saved)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("kind", "dump"),
            ("key", 7),
            ("seed", "7"),
            ("seed", True),
            ("num_rows", [3]),
            ("state_values", None),
            ("note", "mine"),
            ("version", 2),
            ("version", None),
            ("fingerprint", []),
            ("prompt_token_ids", "abc"),
            ("prompt_token_ids", [1, 2.5]),
            ("prompt_token_ids", [True]),
            ("output_token_ids", None),
            ("params", {}),
            ("params", {"stop_token_ids": [], "top_p": 7}),
            ("params", {"stop_token_ids": [], "unknown": 7}),
            ("finish_reason", "tired"),
            ("tensors", []),
            ("tensors", {"target": None}),
            ("tensors", {"target": {"dtype": "int4", "shape": [64]}}),
            ("tensors", {"target": {"dtype": "bool", "shape": [-1]}}),
            ("tensors", {"target": {"dtype": "bool", "shape": ["64"]}}),
            ("tensors", {"target": {"dtype": "bool", "shape": [65]}}),
            ("tensors", {"another": {"dtype": "bool", "shape": [64]}}),
        ],
    )
    def test_a_header_with_a_wrong_field(self, saved: Path, field: str, value: Any) -> None:
        header = json.loads((saved / HEADER).read_text())
        header[field] = value
        (saved / HEADER).write_text(json.dumps(header))
        message = self.refused(saved)
        assert field in message or field in ("params", "finish_reason")  # there it is the value that is named

    def test_what_a_connector_loads_is_checked_the_same(self, saved: Path) -> None:
        (saved / HEADER).write_text("{}")
        connector = FileConnector(saved.parent)
        assert outcome(connector.load("a")).startswith(f"InvalidHandoff: {saved / HEADER}: kind: found None")
        connector.close()


class TestFullDisk:
    """Whatever cannot be written leaves nothing behind, and what lay there stays."""

    @pytest.mark.parametrize("name", ["save_file", "header_with_checksums"])
    def test_a_step_that_fails(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        write_handoff(tmp_path, make_handoff("a", 1))
        monkeypatch.setattr(file_connector, name, fail)
        with pytest.raises(CapacityError, match="a: hand-off not written: No space left on device"):
            write_handoff(tmp_path, make_handoff("a", 2))
        assert [item.name for item in tmp_path.iterdir()] == ["a"]
        assert are_same(read_handoff(tmp_path / "a"), make_handoff("a", 1))

    def test_a_limit_of_the_system(self, tmp_path: Path) -> None:
        """Files may have no more than 100 kB for a moment, and the payload has more."""
        connector = FileConnector(tmp_path)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            first = outcome(connector.save(make_handoff("a", 0, 1 << 20)))
            second = outcome(connector.save(make_handoff("b", 0, 8)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            connector.close()
        assert first.startswith(f"CapacityError: {tmp_path / 'a'}: hand-off not written: ")
        assert second is None
        assert [item.name for item in tmp_path.iterdir()] == ["b"]

    def test_a_refusal_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        connector = FileConnector(tmp_path / "file")
        with pytest.raises(CapacityError, match="not written"):
            connector.refuse("a", "none")
        connector.close()


@pytest.mark.parametrize("num_kills", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_half(tmp_path: Path, num_kills: int) -> None:
    generator, peers, num_left = random.Random(5), Peers(), 0
    for kill in range(num_kills):
        writer = peers.start(str(tmp_path), "prefill")
        for number in range(30):
            writer.tell("save", f"{kill}-{number}", number, 100_000)
            writer.tell("save", "same", number, 100_000)
        time.sleep(generator.uniform(0, 0.2))
        writer.kill()
        assert are_gone([writer.pid])
        keys = [item.name for item in tmp_path.iterdir() if not item.name.startswith(".")]
        assert all(are_same(found, make_handoff(found.key, found.seed, 100_000)) for found in
                   (read_handoff(tmp_path / key) for key in keys))  # fmt: skip
        num_left += len(keys)
        for key in keys:
            shutil.rmtree(tmp_path / key)
    peers.close()
    assert num_left, "nothing was written before any kill"


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "none", "no such directory"), (tmp_path, "no hand-offs in it")):
        with pytest.raises(UsageError, match=words):
            list_handoffs(folder)


def test_what_connectors_raise_has_an_exit_code() -> None:
    codes: dict[Callable[..., Exception], int] = {CapacityError: 6, InvalidHandoff: 3, PeerUnreachable: 4}
    for kind, code in codes.items():
        assert getattr(kind, "exit_code", None) == code
