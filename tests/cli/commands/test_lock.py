"""`dflash lock`, and --lock of other commands, which run the locked pair or stop."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.lock import read_lock
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.checkpoints.remote_headers import RemoteRepo
from dflash_runtime.errors import MISSING, CheckpointNotFound, GateFailed, UnsupportedError, UsageError
from dflash_testing.command_line import run_main
from dflash_testing.refusals import refuses

EVALUATE = ["eval-acceptance", "mine", "--target", "tiny", "--num-prompts", "1", "-n", "8"]
VALIDATE = ["validate", "mine", "--target", "tiny"]


@pytest.fixture(autouse=True)
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A draft in `mine`, and its lock in dflash.lock."""
    shutil.copytree(tiny_directory() / "draft", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert run_main("lock", "mine", "--target", "tiny").code == 0
    document: dict[str, Any] = json.loads(Path("dflash.lock").read_text())
    return document


def change(name: str = "model.safetensors") -> None:
    """Change the last byte of the weights."""
    file = Path("mine", name)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def test_a_lock_has_both_checkpoints_and_every_deciding_file(locked: dict[str, Any]) -> None:
    assert (locked["kind"], locked["schema_version"]) == ("lock", 1)
    assert (locked["draft"]["name"], locked["target"]["name"], locked["draft"]["commit"]) == ("mine", "tiny", None)
    assert set(locked["draft"]["sha256"]) == {"config.json", "model.safetensors"}
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors"} <= set(locked["target"]["sha256"])
    shown = run_main("lock", "mine", "--target", "tiny", "-o", "other.lock", "--json")
    assert json.loads(shown.out)["draft"] == locked["draft"]


def test_a_lock_is_replaced_only_by_force() -> None:
    assert run_main("lock", "mine", "--target", "tiny").code == 2
    change()
    assert run_main("lock", "mine", "--target", "tiny", "--force").code == 0
    assert run_main(*VALIDATE, "--lock", "dflash.lock").code == 0


@pytest.mark.parametrize("command", [VALIDATE, EVALUATE])
def test_a_changed_file_is_named_with_both_hashes(command: list[str], locked: dict[str, Any]) -> None:
    assert run_main(*command, "--lock", "dflash.lock").code == 0
    change()
    done = run_main(*command, "--lock", "dflash.lock")
    assert (done.code, done.out) == (3, "")
    was = locked["draft"]["sha256"]["model.safetensors"][:12]
    (error, hint) = done.err.splitlines()[-2:]
    assert error.startswith("error: dflash.lock: draft: model.safetensors: ")
    assert f" {was}..." in error
    assert "--force" in hint


def test_added_and_removed_files_are_noticed() -> None:
    found = read_lock(Path("dflash.lock"))
    Path("mine", "generation_config.json").write_text("{}")
    with refuses(GateFailed) as caught:
        found.check({"draft": Path("mine")})
    assert "generation_config.json" in caught.value.message
    Path("mine", "README.md").write_text("a card decides nothing")
    Path("mine", "generation_config.json").unlink()
    found.check({"draft": Path("mine")})


def test_a_repository_is_known_by_its_commit(locked: dict[str, Any]) -> None:
    """Headers that are read from the hub belong to a commit."""
    locked["draft"] |= {"name": "org/draft", "commit": "a" * 40}
    Path("hub.lock").write_text(json.dumps(locked))
    found = read_lock(Path("hub.lock"))
    found.check({"draft": RemoteRepo("org/draft", "a" * 40, frozenset())})
    for role, repo, expected in (("draft", "org/draft", "a" * 40), ("target", "org/model", "directory")):
        with refuses(GateFailed) as caught:
            found.check({role: RemoteRepo(repo, "b" * 40, frozenset())})
        assert all(text in caught.value.message for text in (role, repo, "b" * 40, expected))


def test_a_result_names_its_lock() -> None:
    done = run_main(*EVALUATE, "--lock", "dflash.lock", "--json")
    assert json.loads(done.out)["measured"]["lock_sha256"] == read_lock(Path("dflash.lock")).sha256
    assert json.loads(run_main(*EVALUATE, "--json").out)["measured"]["lock_sha256"] is None


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "another kind": ({"kind": "env"}, "wrong-value", "kind"),
    "no target": ({"target": MISSING}, "missing-key", "target"),
    "a list": ({"draft": []}, "wrong-value", "draft"),
    "no commit": ({"draft": {"name": "a", "sha256": {}}}, "missing-key", "draft.commit"),
    "a number": ({"draft": {"name": 1, "commit": None, "sha256": {}}}, "wrong-value", "draft.name"),
    "no hashes": ({"draft": {"name": "a", "commit": None, "sha256": []}}, "wrong-value", "draft.sha256"),
    "a wrong hash": ({"draft": {"name": "a", "commit": None, "sha256": {"f": 1}}}, "wrong-value", "draft.sha256.f"),
    "an unknown key": ({"draft_model": "a"}, "unknown-key", "draft_model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_lock_is_refused_with_the_field(name: str, locked: dict[str, Any]) -> None:
    changes, id, field = WRONG[name]
    document = {key: value for key, value in (locked | changes).items() if value is not MISSING}
    Path("x.lock").write_text(json.dumps(document))
    with refuses(UsageError, id, path="x.lock", field=field):
        read_lock(Path("x.lock"))


def test_a_lock_of_a_later_release_is_unsupported(locked: dict[str, Any]) -> None:
    Path("x.lock").write_text(json.dumps(locked | {"schema_version": 2}))
    with refuses(UnsupportedError, "later-version", path="x.lock", found=2):
        read_lock(Path("x.lock"))


@pytest.mark.parametrize("text", ["mine", "[]", '{"date": NaN}', '{"kind": "lock", "kind": "lock"}', "[" * 100_000])
def test_a_file_that_is_not_a_lock_is_refused(text: str) -> None:
    Path("x.lock").write_text(text)
    with refuses(UsageError, path="x.lock", field=None):
        read_lock(Path("x.lock"))


def test_an_absent_lock_is_not_found() -> None:
    with refuses(CheckpointNotFound) as caught:
        read_lock(Path("absent.lock"))
    assert caught.value.message.startswith("absent.lock: ")
