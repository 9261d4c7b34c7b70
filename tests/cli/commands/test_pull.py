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
from dflash_testing.command_line import Outcome, invoke
from dflash_testing.gguf_files import make_gguf, make_split

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


Pull = Callable[..., Outcome]


@pytest.fixture
def pull(server: hub.LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pull:
    monkeypatch.chdir(tmp_path)
    return lambda *options: hub.run("pull", *(options or (REPO,)), env=hub.environment(server, tmp_path / "home"))


def read(done: Outcome) -> dict[str, Any]:
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


GGUF = "acme/draft-GGUF"
Q8, BF16 = "draft-Q8_0.gguf", "draft-BF16.gguf"


@pytest.fixture
def quantised(server: hub.LocalHub, tmp_path: Path) -> hub.LocalHub:
    """Two GGUF files of one draft, and the target's beside them."""
    (tmp_path / "gguf").mkdir()
    sound = make_gguf(tmp_path / "gguf" / Q8).read_bytes()
    target = make_gguf(tmp_path / "gguf" / "target.gguf", general__architecture="qwen3").read_bytes()
    server.repos[GGUF] = {Q8: sound, BF16: sound + b"\0" * 32, "target.gguf": target, "README.md": b"# x\n", **OTHERS}
    return server


@pytest.mark.parametrize("word", ["Q8_0", "q8_0", Q8])
def test_a_gguf_file_is_chosen_and_its_folder_is_a_draft(pull: Pull, quantised: hub.LocalHub, word: str) -> None:
    assert changes(read(pull(GGUF, "--gguf", word, "--json"))) == {Q8: "new", "README.md": "new"}
    kept = files(Path("draft-GGUF"))
    assert kept == {name: quantised.repos[GGUF][name] for name in (Q8, "README.md")}
    assert invoke("inspect", "draft-GGUF").code == 0
    assert invoke("validate", "draft-GGUF", "--engine", "llama.cpp").code == 0
    other = pull(GGUF, "--gguf", BF16, "--force")
    assert (other.code, other.error_id, files(Path("draft-GGUF"))) == (2, "other-weights-here", kept)


def test_one_gguf_file_needs_no_choice(pull: Pull, quantised: hub.LocalHub) -> None:
    quantised.repos[GGUF] = {Q8: quantised.repos[GGUF][Q8]}
    assert changes(read(pull(GGUF, "--json"))) == {Q8: "new"}


@pytest.mark.parametrize("word", ["q8", "Q8/draft-Q8_0-00002-of-00003.gguf"])
def test_a_split_draft_in_a_folder_is_pulled_whole(
    pull: Pull, quantised: hub.LocalHub, word: str, tmp_path: Path
) -> None:
    parts = {f"Q8/{file.name}": file.read_bytes() for file in make_split(tmp_path / "split")}
    quantised.repos[GGUF] = {BF16: quantised.repos[GGUF][BF16], **parts, "README.md": b"# x\n"}
    done = pull(GGUF, "--gguf", word)
    assert done.code == 0
    assert files(Path("draft-GGUF/Q8")) == {name.removeprefix("Q8/"): data for name, data in parts.items()}
    assert f"validate {Path('draft-GGUF/Q8')}" in done.err
    assert invoke("inspect", "draft-GGUF/Q8").code == 0


def test_a_split_draft_without_a_part_is_refused_before_a_download(
    pull: Pull, quantised: hub.LocalHub, tmp_path: Path
) -> None:
    quantised.repos[GGUF] = {file.name: file.read_bytes() for file in make_split(tmp_path / "split")[:2]}
    refused = pull(GGUF)
    assert (refused.code, refused.error_id, Path("draft-GGUF").exists()) == (3, "gguf-part-missing", False)


@pytest.mark.parametrize(
    ("options", "code", "id", "found"),
    [
        ((), 2, "several-gguf-files", [BF16, Q8, "target.gguf"]),
        (("--gguf", "draft"), 2, "several-gguf-files", [BF16, Q8]),
        (("--gguf", "Q4_K_M"), 2, "gguf-not-in-repo", "Q4_K_M"),
        (("--gguf", "target"), 5, "gguf", "qwen3"),
    ],
)
def test_an_unclear_gguf_file_is_refused_before_a_download(
    pull: Pull, quantised: hub.LocalHub, options: tuple[str, ...], code: int, id: str, found: object
) -> None:
    refused = pull(GGUF, *options)
    assert refused.error is not None
    assert (refused.code, refused.error_id, refused.error.found) == (code, id, found)
    assert refused.error.hint is not None
    assert not Path("draft-GGUF").exists()


def test_only_the_header_of_a_gguf_file_is_read_before_a_download(pull: Pull, quantised: hub.LocalHub) -> None:
    quantised.repos[GGUF][Q8] += bytes(8 << 20)
    quantised.forget()
    assert pull(GGUF, "--gguf", "Q8_0", "--dry-run").code == 0
    assert quantised.num_bytes < 2 << 20


@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_commands_that_take_a_repository_name_pull_for_gguf(
    quantised: hub.LocalHub, command: str, tmp_path: Path
) -> None:
    refused = hub.run(command, GGUF, env=hub.environment(quantised, tmp_path / "home"))
    assert (refused.code, refused.error_id) == (3, "config-missing")
    assert refused.error is not None
    assert f"dflash pull {GGUF}" in (refused.error.hint or "")
