"""A push uploads a checked draft in one commit, sends nothing twice, and names each reason for a refusal."""

import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_cli
from dflash_cli.checkpoints.checkpoint_identity import identify
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import DFlashError
from dflash_testing import checkpoints as support
from dflash_testing import command_line, gguf_files
from dflash_testing import hub_server as hub
from dflash_testing.command_line import Outcome
from dflash_testing.edits import edited_config
from dflash_testing.evaluations import drawn_evaluation, write_evaluation
from dflash_testing.hub_uploads import WRITER, Uploads

REPO = "acme/new"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return support.make_native(tmp_path / "draft")


@pytest.fixture(scope="module")
def running() -> Iterator[hub.LocalHub]:
    with hub.serving() as started:
        yield started


@pytest.fixture
def server(running: hub.LocalHub) -> hub.LocalHub:
    running.repos, running.uploads = {}, Uploads()
    return running


Push = Callable[..., Outcome]


@pytest.fixture
def push(server: hub.LocalHub, folder: Path, tmp_path: Path) -> Push:
    def run(*options: object, repo: str = REPO, **variables: str) -> Outcome:
        env = hub.environment(server, tmp_path / "home") | {"HF_TOKEN": WRITER} | variables
        done = hub.run("push", folder, repo, "--level", "headers", *options, env=env)
        assert WRITER not in done.out + done.err
        return done

    return run


def read(done: Outcome) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out)  # type: ignore[no-any-return]


def changes(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["change"] for item in document["files"]}


def test_a_draft_is_uploaded_once_and_read_back(push: Push, server: hub.LocalHub, folder: Path) -> None:
    planned = read(push("--dry-run", "--json"))
    names = {item.name for item in folder.iterdir()}
    assert changes(planned) == dict.fromkeys(names, "new")
    assert planned["num_bytes"] == sum(item.stat().st_size for item in folder.iterdir())
    assert (planned["commit"], planned["is_new_repo"], server.repos) == (None, True, {})
    done = read(push("--yes", "--private", "-m", "First", "--json"))
    assert server.repos[REPO] == {item.name: item.read_bytes() for item in folder.iterdir()}
    assert (server.uploads.subjects, server.uploads.private) == (["First"], {REPO})
    assert done["url"].endswith(done["commit"])
    assert done["is_private"] is True
    server.uploads.calls.clear()
    again = read(push("--yes", "--json"))
    assert set(changes(again).values()) == {"same"}
    assert (again["num_bytes"], again["commit"], server.uploads.calls) == (0, None, [])
    checked = hub.run("validate", REPO, "--json", env=hub.environment(server, folder.parent / "other"))
    assert json.loads(checked.out)["passed"] is True


def test_a_folder_with_a_gguf_file_is_uploaded(push: Push, server: hub.LocalHub, folder: Path) -> None:
    for item in folder.iterdir():
        item.unlink()
    file = gguf_files.make_gguf(folder / "draft.gguf")
    assert (left := push("--exclude", "*.gguf", "--dry-run")).code == 2
    assert (left.error_id, left.field) == ("draft-left-out", "--exclude")
    assert changes(read(push("--yes", "--json"))) == {"draft.gguf": "new"}
    assert server.repos[REPO] == {"draft.gguf": file.read_bytes()}


def test_an_interrupted_push_sends_only_what_the_hub_lacks(push: Push, server: hub.LocalHub, folder: Path) -> None:
    server.uploads.fails_at, server.uploads.fails_with = "commit", 400
    assert push("--yes").code == 4
    assert server.uploads.calls.count("upload") == 1
    server.uploads.fails_at = ""
    assert push("--yes").code == 0
    assert server.uploads.calls.count("upload") == 1
    (folder / "README.md").write_text("# A draft\n")
    assert changes(read(push("--yes", "--json")))["README.md"] == "new"
    assert server.uploads.calls.count("upload") == 1
    assert server.repos[REPO]["README.md"] == b"# A draft\n"


def test_branches_and_pull_requests(push: Push, server: hub.LocalHub, folder: Path) -> None:
    read(push("--yes", "--json"))
    before = dict(server.repos[REPO])
    (folder / "README.md").write_text("# A draft\n")
    asked = read(push("--yes", "--create-pr", "--json"))
    assert asked["url"] == asked["pull_request"]
    assert server.repos[REPO] == before
    branched = read(push("--yes", "--revision", "next", "--json"))
    assert server.files_at(REPO, "next").keys() == before.keys() | {"README.md"}
    assert (branched["revision"], server.repos[REPO]) == ("next", before)
    assert set(changes(read(push("--dry-run", "--revision", "next", "--json"))).values()) == {"same"}
    refused = push("--yes", "--create-pr", "--revision", "absent")
    assert (refused.code, refused.error.id) == (4, "no-revision")  # type: ignore[union-attr]


def test_a_draft_of_the_hub_is_refused_with_the_command_that_downloads_it(server: hub.LocalHub, tmp_path: Path) -> None:
    env = hub.environment(server, tmp_path / "home")
    for draft, command in {
        "acme/d": "dflash pull acme/d",
        "acme/d@v2": "dflash pull acme/d@v2",
    }.items():
        refused = hub.refusal("push", draft, REPO, env=env)
        assert refused["code"] == 2
        assert command in refused["hint"]


def test_the_hint_of_another_drafts_result_names_the_target(server: hub.LocalHub, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    write_evaluation(result, drawn_evaluation())
    options = ("--level", "headers", "--result", result, "--target", "tiny", "--yes")
    refused = hub.refusal(
        "push",
        tiny_directory() / "draft",
        REPO,
        *options,
        env=hub.environment(server, tmp_path / "home") | {"HF_TOKEN": WRITER},
    )
    assert (refused["code"], refused["id"]) == (3, "result-of-another-draft")
    assert "--target tiny --json" in refused["hint"]


def test_the_card_and_the_profile_come_from_the_result(push: Push, server: hub.LocalHub, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A draft\n")
    result = folder.parent / "result.json"
    write_evaluation(result, drawn_evaluation())
    refused = push("--yes", "--result", result)
    assert (refused.code, refused.error.id) == (3, "result-of-another-draft")  # type: ignore[union-attr]
    evaluation = drawn_evaluation()
    own = identify(Checkpoint(folder), "")
    write_evaluation(result, replace(evaluation, measured=replace(evaluation.measured, draft=own)))
    done = read(push("--yes", "--result", result, "--target-name", "org/target", "--json"))
    card, profile = (server.repos[REPO][name].decode() for name in ("README.md", "speculation_profile.json"))
    assert "license: mit" in card
    assert "# A draft" in card
    assert "base_model: org/target" in card
    assert f"{evaluation.total.counts.acceptance_len:.3f}" in card
    assert str(folder) not in card + profile
    named = [json.loads(profile)[key]["name"] for key in ("draft_checkpoint", "target_model")]
    assert named == [REPO, "org/target"]
    assert json.loads(profile)["mean_accept_length"] == round(evaluation.total.counts.acceptance_len or 0, 6)
    assert changes(done)["speculation_profile.json"] == "new"
    assert (folder / "README.md").read_text() == "---\nlicense: mit\n---\n# A draft\n"
    assert set(changes(read(push("--yes", "--result", result, "--target-name", "org/target", "--json"))).values()) == {
        "same"
    }


@pytest.mark.parametrize(
    ("name", "content", "code", "id"),
    [
        ("optimizer.pt", b"anything", 5, "pickle"),
        ("notes.txt", pickle.dumps({"a": 1}), 5, "pickle"),
        ("data.json", b"PK\x03\x04rest", 5, "pickle"),
        ("mask_embedding.pt", b"PK\x03\x04rest", 5, "torch-zip-not-an-archive"),
        ("modeling.py", b"raise SystemExit", 2, "surprising-files"),
        ("optimizer/state.json", b"{}", 2, "surprising-files"),
        (".env", b"A=1", 2, "surprising-files"),
        ("other.safetensors", b"{}", 2, "surprising-files"),
        ("README.md", b"log in with hf_abcdefghijklmnopqrstuvwxyz", 2, "secret-in-file"),
    ],
)
def test_files_that_are_not_published(
    name: str, content: bytes, code: int, id: str, push: Push, server: hub.LocalHub, folder: Path
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    done = push("--yes", "--force")
    assert done.error is not None
    assert (done.code, done.error.id) == (code, id)
    assert "abcdefghij" not in done.err
    assert not server.uploads.calls
    if id != "secret-in-file":
        assert name.partition("/")[0] not in changes(
            read(push("--exclude", name.partition("/")[0], "--dry-run", "--json"))
        )
    is_code = name == "modeling.py"
    assert push("--include", name, "--dry-run").code == (
        0 if is_code or name in (".env", "other.safetensors") else code
    )


def test_the_target_on_the_hub_names_the_target_and_the_next_command_is_printed(
    push: Push, server: hub.LocalHub, folder: Path
) -> None:
    server.add("acme/model", tiny_directory() / "target")
    evaluation, result = drawn_evaluation(), folder.parent / "result.json"
    own = identify(Checkpoint(folder), "")
    write_evaluation(result, replace(evaluation, measured=replace(evaluation.measured, draft=own)))
    done = push("--yes", "--force", "--result", result, "--target", "acme/model@main", "--engine", "vllm")
    assert (done.code, done.notices[-1]) == (0, "next-command"), done.err
    assert done.err.endswith("dflash serve-command acme/new --target acme/model --engine vllm\n")
    assert json.loads(server.repos[REPO]["speculation_profile.json"])["target_model"]["name"] == "acme/model"
    assert b"base_model: acme/model" in server.repos[REPO]["README.md"]


def test_links_out_of_the_folder_are_refused(push: Push, folder: Path) -> None:
    (folder.parent / "LICENSE").write_text("secret")
    (folder / "LICENSE").symlink_to(folder.parent / "LICENSE")
    done = push("--yes")
    assert done.error is not None
    assert (done.code, done.error.id) == (3, "link-outside")


def test_a_draft_at_fault_is_uploaded_only_by_force(push: Push, server: hub.LocalHub, folder: Path) -> None:
    with edited_config(folder) as config:
        config["dflash_config"]["target_layer_ids"] = [-1, 2]
    done = push("--yes")
    assert done.error is not None
    assert (done.code, done.error.id) == (3, "draft-fails")
    assert done.error.found
    assert not server.uploads.calls
    assert push("--yes", "--force").code == 0
    assert REPO in server.repos


def test_stale_weights_on_the_hub_are_removed_only_on_request(push: Push, server: hub.LocalHub, folder: Path) -> None:
    server.repos[REPO] = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"kept"}
    done = push("--yes")
    assert done.error is not None
    assert (done.code, done.error.id) == (3, "stale-weights")
    pruned = read(push("--yes", "--prune", "--json"))
    assert changes(pruned)["model-00001-of-00002.safetensors"] == "removed"
    assert server.repos[REPO].keys() == {item.name for item in folder.iterdir()} | {"notes.md"}


SITUATIONS: dict[str, tuple[str, dict[str, str], int, str]] = {
    "no token": (REPO, {"HF_TOKEN": ""}, 4, "no-token"),
    "wrong token": (REPO, {"HF_TOKEN": "hf_" + "x" * 34}, 4, "hub-refused"),
    "offline": (REPO, {"HF_HUB_OFFLINE": "1"}, 4, "offline"),
    "no server": (REPO, {"HF_ENDPOINT": "http://127.0.0.1:9"}, 4, "hub-unreachable"),
    "foreign namespace": ("other/new", {}, 4, "no-right-to-write"),
    "gated": ("acme/gated", {}, 4, "hub-gated"),
    "rate limit": ("acme/limit", {}, 4, "hub-rate-limit"),
    "not a hub": ("acme/login-page", {}, 4, "not-a-hub"),
    "no name": ("draft", {}, 2, "usage-error"),
    "branch in the name": ("acme/new@next", {}, 2, "usage-error"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_of_the_hub_has_its_id(situation: str, push: Push, server: hub.LocalHub) -> None:
    repo, variables, code, id = SITUATIONS[situation]
    done = push("--yes", repo=repo, **variables)
    assert done.error is not None
    assert (done.code, done.error.id) == (code, id)
    assert variables.get("HF_TOKEN", "hf_x")[:8] not in done.err or not variables.get("HF_TOKEN")
    assert not server.uploads.subjects


@pytest.mark.parametrize(
    ("call", "status", "code", "id"),
    [
        ("commit", 412, 3, "hub-conflict"),
        ("commit", 403, 4, "no-right-to-write"),
        ("upload", 403, 4, "no-right-to-write"),
        ("upload", 413, 2, "too-large-for-hub"),
        ("preupload", 400, 4, "hub-refused"),
    ],
)
def test_refusals_while_uploading(call: str, status: int, code: int, id: str, push: Push, server: hub.LocalHub) -> None:
    server.uploads.fails_at, server.uploads.fails_with = call, status
    done = push("--yes")
    assert done.error is not None
    assert (done.code, done.error.id) == (code, id)


def test_a_commit_of_somebody_else_is_not_overwritten(
    push: Push, server: hub.LocalHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the comparison and the commit, the branch gets another commit."""
    from dflash_cli.publishing import hub_upload, push_plan

    assert push("--yes").code == 0
    (folder / "README.md").write_text("# A draft\n")
    make_room = hub_upload.make_room

    def moved(*arguments: Any, **named: Any) -> None:
        make_room(*arguments, **named)
        server.uploads.heads[REPO, "main"] = hub.COMMIT

    monkeypatch.setattr(push_plan, "make_room", moved)
    done = push("--yes")
    assert done.error is not None
    assert (done.code, done.error.id) == (3, "hub-conflict")


def test_metadata_that_the_hub_refuses(push: Push, server: hub.LocalHub, folder: Path) -> None:
    (folder / "README.md").write_text("---\ntags: 7\n---\n# A draft\n")
    done = push("--yes")
    assert done.error is not None
    assert (done.code, done.error.id) == (2, "card-metadata")
    assert not server.uploads.subjects


def test_a_public_repository_is_not_taken_for_a_private_one(push: Push, server: hub.LocalHub) -> None:
    server.repos[REPO] = {}
    done = push("--yes", "--private")
    assert done.error is not None
    assert (done.code, done.error.id) == (2, "repository-is-public")


@pytest.mark.parametrize(("answer", "is_uploaded"), [("y\n", True), ("\n", False), ("", False)])
def test_a_terminal_is_asked(
    answer: str, is_uploaded: bool, push: Push, server: hub.LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = push()
    assert asked.error is not None
    assert (asked.code, asked.error.id, server.repos) == (2, "not-confirmed", {})

    class Terminal(io.StringIO):
        def __init__(self) -> None:
            super().__init__(answer)

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(command_line, "TextIOWrapper", lambda _: Terminal())
    assert push().code == 0
    assert (REPO in server.repos) == is_uploaded


def test_python_plans_unless_told_to_upload(
    server: hub.LocalHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    planned = dflash_cli.push(draft=str(folder), repo=REPO, level="headers")
    assert (planned.commit, server.repos) == (None, {})
    assert "to upload" in repr(planned)
    assert dflash_cli.push(draft=str(folder), repo=REPO, level="headers", yes=True).commit
    with pytest.raises(DFlashError):
        dflash_cli.push(draft=REPO, repo=REPO)
