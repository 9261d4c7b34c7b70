"""A pull downloads what readers of a draft need, verifies it, continues, and never overwrites in silence."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.hub import download_snapshot
from dflash_cli.publishing import pull_plan
from dflash_testing import checkpoints as support
from dflash_testing import hub_server as hub

REPO = "acme/draft"
OTHERS = {"model.bin": b"\x80\x02", "picture.png": b"x", "train.py": b"", "sub/config.json": b"{}"}
"""Files of the repository that no reader of a draft looks for."""


@pytest.fixture(scope="module")
def running() -> Iterator[hub.LocalHub]:
    with hub.serving() as started:
        yield started


@pytest.fixture
def server(running: hub.LocalHub, tmp_path: Path) -> hub.LocalHub:
    running.repos, running.closed = {}, set()
    running.add(REPO, support.make_native(tmp_path / "original"))
    running.repos[REPO] |= {"README.md": b"# A draft\n", **OTHERS}
    return running


Pull = Callable[..., support.Outcome]


@pytest.fixture
def pull(server: hub.LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pull:
    monkeypatch.chdir(tmp_path)
    return lambda *options: hub.run("pull", *(options or (REPO,)), env=hub.environment(server, tmp_path / "home"))


def read(done: support.Outcome) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out)  # type: ignore[no-any-return]


def changes(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["change"] for item in document["files"]}


def files(folder: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}


def test_a_draft_is_downloaded_once_verified_and_described(pull: Pull, server: hub.LocalHub) -> None:
    wanted = {name: data for name, data in server.repos[REPO].items() if name not in OTHERS}
    planned = read(pull(REPO, "--dry-run", "--json"))
    assert changes(planned) == dict.fromkeys(wanted, "new")
    assert (planned["num_bytes"], planned["is_verified"]) == (sum(map(len, wanted.values())), False)
    assert not Path("draft").exists()
    done = pull()
    assert (done.code, files(Path("draft"))) == (0, wanted)
    assert done.out.startswith("kind ")
    assert "dflash validate draft --target" in done.err
    server.forget()
    again = read(pull(REPO, "--json"))
    assert set(changes(again).values()) == {"same"}
    assert (again["num_bytes"], again["is_verified"]) == (0, True)


def test_a_failed_pull_continues(pull: Pull, server: hub.LocalHub) -> None:
    server.closed = {"README.md"}
    assert pull(f"{REPO}@main", "-o", "own").code == 4
    server.closed = set()
    kept = files(Path("own"))
    assert "README.md" not in kept
    assert changes(read(pull(REPO, "-o", "own", "--json"))) == {
        name: "same" if name in kept else "new" for name in server.repos[REPO] if name not in OTHERS
    }


def test_changed_files_are_replaced_only_by_force(pull: Pull, server: hub.LocalHub) -> None:
    assert pull().code == 0
    Path("draft/README.md").write_text("# Mine\n")
    refused = pull()
    assert (refused.code, refused.error_id) == (2, "output-exists")
    assert Path("draft/README.md").read_text() == "# Mine\n"
    assert changes(read(pull(REPO, "--force", "--json")))["README.md"] == "changed"
    assert files(Path("draft"))["README.md"] == server.repos[REPO]["README.md"]


def test_a_damaged_file_is_named(pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(*given: Any, folder: Path) -> Path:
        found = download_snapshot(*given, folder=folder)
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (folder / "model.safetensors").write_bytes(weights)
        return found

    monkeypatch.setattr(pull_plan, "download_snapshot", damage)
    refused = pull()
    assert (refused.code, refused.error_id) == (3, "download-damaged")
    assert refused.error is not None
    assert str(refused.error.path) == "draft/model.safetensors"


def test_repositories_without_a_draft_are_refused_before_a_download(
    pull: Pull, server: hub.LocalHub, tmp_path: Path
) -> None:
    config = b'{"architectures": ["LlamaForCausalLM"]}'
    server.repos["acme/target"] = server.repos[REPO] | {"config.json": config}
    server.repos["acme/empty"] = {"README.md": b""}
    (tmp_path / "file").touch()
    cases = {("acme/target",): 5, ("acme/empty",): 3, ("acme/none",): 4, ("tiny",): 2, (REPO, "-o", "file"): 2,
             (REPO, "-o", "absent/draft"): 2}  # fmt: skip
    assert {case: pull(*case).code for case in cases} == cases
    assert not [name for name in ("target", "empty", "none", "draft") if Path(name).exists()]
