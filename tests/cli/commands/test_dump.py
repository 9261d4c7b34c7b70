"""`dflash dump`, and `eval-acceptance --mode replay` on its dump, which gives the same figures as a run."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_testing.command_line import run_main
from dflash_testing.edits import edit_tensors

TARGET, DRAFT = fetch_directory(TINY, Role.TARGET), fetch_directory(TINY, Role.DRAFT)
SMALL = ["--num-prompts", "8", "-n", "16"]
DUMP = ["dump", "tiny", "--taps-from", "tiny", *SMALL, "--output"]
REPLAY = ["eval-acceptance", "tiny", "--mode", "replay", "--num-resamples", "0"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps") / "dump"
    done = run_main(*DUMP, folder)
    assert (done.code, done.out) == (0, f"{folder}\n")
    return folder


@pytest.fixture
def copied(dump: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(dump, tmp_path / "copied"))


def replay(*arguments: object) -> Any:
    done = run_main(*REPLAY, *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def refuse(code: int, *arguments: object) -> str:
    done = run_main(*arguments)
    assert done.code == code, done.err
    return done.err[done.err.index("error: ") :]


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix == ".safetensors"}


def test_a_replay_has_the_figures_of_a_run(dump: Path, tmp_path: Path) -> None:
    live_rows, rows = tmp_path / "live.jsonl", tmp_path / "replay.jsonl"
    live = run_main("eval-acceptance", "tiny", *SMALL, "--num-resamples", "0", "--json", "--output", live_rows)
    run, found = json.loads(live.out), replay("--dump", dump, "--head-from", "tiny", "--json", "--output", rows)
    assert run["num_drafts"] > 20
    same = ("num_drafts", "per_pos_accepted", "histogram", "definitions", "categories", "num_tokens", "acceptance_len")
    assert {name: found[name] for name in same} == {name: run[name] for name in same}
    assert run["anchors"] is None
    answers = [row["token_ids"] for row in map(json.loads, live_rows.read_text().splitlines()[1:])]
    assert {len(ids) for ids in answers} > {16}, "some answer ends at a stop token"
    assert found["anchors"]["num_anchors"] == sum(len(ids) - 1 for ids in answers)
    assert found["settings"]["target_digest"] == run["settings"]["target_digest"]
    assert found["settings"]["draft_digest"] == run["settings"]["draft_digest"]
    assert found["measured"]["prompts_digest"] == run["measured"]["prompts_digest"]
    assert found["prompts"] == run["prompts"]
    keys = ("index", "digest", "token_ids", "acceptance_lengths", "committed_lengths")
    one, other = (
        sorted([row[key] for key in keys] for row in map(json.loads, path.read_text().splitlines()[1:]))
        for path in (rows, live_rows)
    )
    assert one == other


def test_the_mean_over_anchors_states_its_count(dump: Path) -> None:
    done = run_main(*REPLAY, "--dump", dump, "--head-from", "tiny")
    assert done.out.startswith("acceptance length ")
    said = re.search(r"\nmean over (\d+) anchors ", done.out)
    assert said is not None
    assert re.search(rf"^{said[1]} blocks .* 8 answers", done.err, re.MULTILINE)
    none = run_main(*REPLAY, "--dump", dump, "--head-from", "tiny", "--every", "0")
    assert none.out.splitlines()[0] == done.out.splitlines()[0]
    assert "mean over" not in none.out
    assert refuse(3, *REPLAY, "--dump", dump, "--head-from", "tiny", "--min-acceptance", "7")


def test_the_manifest_describes_the_dump(dump: Path) -> None:
    manifest = json.loads((dump / "manifest.json").read_text())
    assert (manifest["kind"], manifest["schema_version"], manifest["is_complete"]) == ("dump", 1, True)
    assert (manifest["taps"], manifest["dtype"]) == ([0, 2, 3, 4], "float32")
    assert manifest["taps_convention"]
    assert manifest["target"]["name"] == "tiny"
    assert len(manifest["tokenizer_digest"]) == len(manifest["template_digest"]) == 16
    assert len(manifest["requests"]) == 8
    for request in manifest["requests"]:
        tensors = load_file(dump / request["file"])
        num_rows = request["prompt_len"] + request["answer_len"] - 1
        assert tensors["hidden_states"].shape == (num_rows, 4, 192)
        assert tensors["token_ids"].shape == (request["num_tokens"],) == (num_rows + 1 + 32,)
    assert str(Path.cwd()) not in json.dumps({**manifest, "measured": None})


def test_an_interrupted_dump_resumes(copied: Path) -> None:
    whole = files_of(copied)
    first, second = list(whole)[:2]
    (copied / first).unlink()
    (copied / second).write_bytes(whole[second][:-100])
    (copied / f".{first}.tmp-123").write_bytes(b"x")
    kept = [file.stat().st_mtime_ns for file in sorted(copied.glob("*.safetensors"))[1:]]
    done = run_main(*DUMP, copied, "--resume")
    assert done.err.splitlines()[-1].startswith("2 answers written, 8 in all")
    assert files_of(copied) == whole
    assert [file.stat().st_mtime_ns for file in sorted(copied.glob("*.safetensors"))[2:]] == kept
    assert len(list(copied.iterdir())) == 9


def test_a_dump_with_other_settings_is_not_resumed(copied: Path) -> None:
    before = files_of(copied)
    longer = run_main(*DUMP, copied, "--resume", "-n", "17")
    other_taps = run_main("dump", "tiny", "--taps", "1,2", *SMALL, "--output", copied, "--resume")
    for done, field, found in ((longer, "max_new_tokens", 16), (other_taps, "taps", [0, 2, 3, 4])):
        assert (done.code, done.error_id, done.field) == (2, "settings-differ", field)
        assert done.error is not None
        assert (done.error.path, done.error.found) == (copied, found)
    again = run_main(*DUMP, copied)
    assert (again.code, again.error_id) == (2, "output-exists")
    assert again.error is not None
    assert {"--resume", "--force"} <= set(str(again.error.hint).split())
    assert files_of(copied) == before
    assert run_main(*DUMP, copied, "--force", "-n", "8").code == 0
    assert files_of(copied).keys() == before.keys()


def test_a_folder_that_is_no_dump_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").write_text("mine")
    assert run_main(*DUMP, tmp_path, "--force").error_id == "output-not-a-dump"
    (tmp_path / "manifest.json").write_text('{"kind": "other"}')
    assert run_main(*DUMP, tmp_path, "--force").error_id == "output-not-a-dump"
    assert (tmp_path / "notes.safetensors").read_text() == "mine"
    assert run_main(*DUMP, tmp_path / "a" / "b").error_id == "no-parent-directory"
    assert run_main(*DUMP, tmp_path / "manifest.json").error_id == "output-is-a-file"


def test_a_full_disk_is_named_and_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_bytes, []

    def fill(self: Path, data: bytes) -> int:
        if ".safetensors" in self.name:
            written.append(self)
            if len(written) == 3:
                write(self, data[:100])
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", fill)
    folder = tmp_path / "dump"
    full = run_main(*DUMP, folder)
    assert (full.code, full.error_id) == (6, "disk-full")
    assert full.error is not None
    path = Path(str(full.error.path))
    assert (path.parent, path.suffix) == (folder, ".safetensors")
    assert len(files_of(folder)) == 2
    assert len(list(folder.iterdir())) == 3
    assert "--resume" in str(full.error.hint)
    done = run_main(*REPLAY, "--dump", folder, "--head-from", "tiny")
    assert "incomplete-dump" in done.notices
    assert run_main(*DUMP, folder, "--resume").err.splitlines()[-1].startswith("6 answers written, 8 in all")


def test_a_full_disk_at_the_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_cli.acceptance.dumps.dump_writer._write_manifest", fill)
    assert run_main(*DUMP, tmp_path / "dump").error_id == "disk-full"
    assert not (tmp_path / "dump").exists()


def test_an_interrupted_dump_keeps_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_bytes, []

    def interrupt(self: Path, data: bytes) -> int:
        written.append(self)
        if len(written) == 3:
            raise KeyboardInterrupt
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", interrupt)
    folder = tmp_path / "dump"
    done = run_main(*DUMP, folder)
    assert (done.code, done.error_id) == (130, "interrupted")
    assert done.error is not None
    assert (done.error.found, done.error.path) == (2, folder)
    assert "--resume" in str(done.error.hint)
    assert len(files_of(folder)) == 2
    assert len(list(folder.iterdir())) == 3


def test_a_prompt_that_cannot_be_served_is_named_and_the_others_are_dumped(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    long = json.dumps({"prompt_token_ids": [5] * 3000})
    prompts.write_text(f'{{"prompt": "def f():"}}\n{long}\n')
    error = refuse(2, "dump", "tiny", "--taps", "1", "-p", prompts, "-n", "4", "--output", tmp_path / "dump")
    assert f"{prompts}:2: " in error
    manifest = json.loads((tmp_path / "dump" / "manifest.json").read_text())
    assert (manifest["is_complete"], len(manifest["requests"])) == (False, 1)


def test_turns_are_answers_of_their_own(tmp_path: Path) -> None:
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "dump"
    prompts.write_text('{"turns": ["def f():", "def g():"], "category": "a"}\n{"prompt": "import os"}\n')
    options = ["-p", prompts, "-n", "12"]
    assert run_main("dump", "tiny", "--taps-from", "tiny", *options, "--output", folder).code == 0
    assert list(files_of(folder)) == ["00000-0.safetensors", "00000-1.safetensors", "00001-0.safetensors"]
    found = replay("--dump", folder, "--head-from", "tiny", "--json")
    run = json.loads(run_main("eval-acceptance", "tiny", *options, "--num-resamples", "0", "--json").out)
    assert (found["num_requests"], found["num_conversations"]) == (3, 2)
    assert found["histogram"] == run["histogram"]


@pytest.mark.parametrize(
    ("arguments", "error_id", "field"),
    [
        (["dump", "tiny", "--output", "x"], "missing-option", "--taps"),
        (["dump", "tiny", "--taps", "1,x", "--output", "x"], "usage-error", "--taps"),
        (["dump", "tiny", "--taps", "6", "--output", "x"], "usage-error", "--taps"),
        (["dump", "tiny", "--taps", "1", "-k", "3", "--output", "x"], "unknown-option", "-k"),
        (["dump", "tiny", "--taps", "1"], "missing-option", "--output"),
        ([*REPLAY], "option-needs-another", "--dump"),
        (["eval-acceptance", "--head-from", "tiny"], "option-needs-another", "--head-from"),
        (["eval-acceptance", "--tree", "4,8"], "several-trees", "--tree"),
        ([*REPLAY, "--dump", "x", "-p", "y"], "options-exclude-each-other", "--prompts"),
        ([*REPLAY, "--dump", "x", "--dump-layer-ids", "1;2"], "usage-error", "--dump-layer-ids"),
    ],
)
def test_missing_and_contradicting_options_are_refused(arguments: list[str], error_id: str, field: str) -> None:
    done = run_main(*arguments)
    assert (done.code, done.error_id, done.field) == (2, error_id, field)
    assert not Path("x").exists()


def test_a_missing_or_unknown_dump_is_refused(tmp_path: Path) -> None:
    assert f"error: {tmp_path / 'x'}: " in refuse(4, *REPLAY, "--dump", tmp_path / "x")
    refusal = refuse(5, *REPLAY, "--dump", tmp_path)
    assert all(name in refusal for name in ("dflash", "sglang", "vllm"))


def change_tensors(file: Path, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors of a file and keep its metadata."""
    with safe_open(file, framework="pt") as reader:
        metadata = reader.metadata()
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name]) for name, change in changes.items()}, file, metadata)


def flip_a_byte(file: Path) -> None:
    """Change the last byte, which belongs to a tensor."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def without_digests(file: Path, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors of a dump, and remove its digests, as in a dump of an earlier release."""
    change_tensors(file, **changes)
    manifest = json.loads((file.parent / "manifest.json").read_text())
    for item in manifest["requests"]:
        del item["sha256"]
    (file.parent / "manifest.json").write_text(json.dumps(manifest))


def edit_facts(file: Path, **changes: Any) -> None:
    """Change facts in the metadata of a file."""
    with safe_open(file, framework="pt") as reader:
        facts = json.loads(reader.metadata()["dflash"])
    save_file(load_file(file), file, {"dflash": json.dumps(facts | changes)})


@pytest.mark.parametrize(
    ("harm", "id", "field"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "file-truncated", "file size"),
        (
            lambda file: change_tensors(file, hidden_states=lambda rows: rows[:-1].clone()),
            "wrong-shape",
            "hidden_states",
        ),
        (lambda file: change_tensors(file, token_ids=lambda ids: ids[:-1].clone()), "wrong-shape", "token_ids"),
        (lambda file: change_tensors(file, token_ids=lambda ids: ids + 2048), None, "token_ids"),
        (lambda file: change_tensors(file, hidden_states=lambda rows: rows / 0), "file-changed", "sha256"),
        (lambda file: flip_a_byte(file), "file-changed", "sha256"),
        (lambda file: change_tensors(file, token_ids=lambda ids: ids.flip(0)), "file-changed", "sha256"),
        (lambda file: without_digests(file, hidden_states=lambda rows: rows / 0), "not-finite", "hidden_states"),
        (lambda file: save_file(load_file(file), file), None, "dflash"),
        (lambda file: save_file(load_file(file), file, {"dflash": "{}"}), "missing-key", "row"),
        (lambda file: save_file(load_file(file), file, {"dflash": "mine"}), "not-json", None),
        (lambda file: edit_facts(file, turn="0"), "wrong-value", "turn"),
        (lambda file: edit_facts(file, prompt_len=0), "wrong-value", "prompt_len"),
        (lambda file: edit_facts(file, finish_reason="tired"), "wrong-value", "finish_reason"),
        (lambda file: edit_facts(file, length=1), "unknown-key", "length"),
        (lambda file: save_file({"x": torch.zeros(1)}, file), "missing-tensor", "hidden_states"),
    ],
)
def test_files_that_were_harmed_are_named(
    harm: Callable[[Path], object], id: str | None, field: str | None, copied: Path
) -> None:
    file = next(copied.glob("*.safetensors"))
    harm(file)
    done = run_main(*REPLAY, "--dump", copied, "--head-from", "tiny")
    assert (done.code, done.field) == (3, field)
    assert id in (None, done.error_id)
    assert done.error is not None
    assert str(done.error.path) == str(file)


def test_a_file_that_the_manifest_does_not_list_is_refused(copied: Path) -> None:
    file = next(copied.glob("*.safetensors"))
    (copied / "99999-0.safetensors").write_bytes(file.read_bytes())
    done = run_main(*REPLAY, "--dump", copied, "--head-from", "tiny")
    assert (done.code, done.error_id) == (3, "unlisted-file")


GONE = {"file": "gone.safetensors", "index": 0, "turn": 0, "prompt_len": 1, "answer_len": 1, "num_tokens": 2}


@pytest.mark.parametrize(
    ("changes", "code", "id", "field"),
    [
        ({"kind": "other"}, 3, "wrong-value", "kind"),
        ({"schema_version": 2}, 5, "later-version", "schema_version"),
        ({"taps": []}, 3, "wrong-value", "taps"),
        ({"taps": [True]}, 3, "wrong-value", "taps[0]"),
        ({"vocab_size": None}, 3, "wrong-value", "vocab_size"),
        ({"hidden_size": 1.5}, 3, "wrong-value", "hidden_size"),
        ({"target": {"name": "a", "commit": None, "modified_ns": None}}, 3, "missing-key", "target.digest"),
        ({"tap": 1}, 3, "unknown-key", "tap"),
        ({"requests": [{"file": "gone.safetensors"}]}, 3, "missing-key", "requests[0].index"),
        ({"requests": [GONE]}, 3, "missing-file", None),
    ],
)
def test_malformed_manifests_are_refused(
    changes: dict[str, Any], code: int, id: str, field: str | None, copied: Path
) -> None:
    file = copied / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    done = run_main(*REPLAY, "--dump", copied, "--head-from", "tiny")
    assert (done.code, done.error_id, done.field) == (code, id, field), done.err


def test_a_dump_of_other_taps_is_refused_with_both_named(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    assert run_main("dump", "tiny", "--taps", "0,2", "--num-prompts", "1", "-n", "4", "--output", folder).code == 0
    done = run_main(*REPLAY, "--dump", folder, "--head-from", "tiny")
    assert (done.code, done.error_id, done.field) == (3, "dump-lacks-layers", "target_layer_ids")
    assert done.error is not None
    assert (done.error.path, done.error.found) == (DRAFT, (0, 2, 3, 4))
    assert str(folder) in done.err


def test_another_target_is_refused_with_both_named(dump: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(TARGET, tmp_path / "other"))
    name = "model.embed_tokens.weight"
    change_tensors(other / "model.safetensors", **{name: lambda rows: rows * 2})
    error = refuse(3, *REPLAY, "--dump", dump, "--head-from", other)
    assert error.startswith(f"error: {other}: {dump} was made with tiny (")


def test_only_embedding_and_head_of_the_target_are_read(dump: Path, tmp_path: Path) -> None:
    """The folder lacks all other weights."""
    ends = tmp_path / "ends"
    ends.mkdir()
    shutil.copy(TARGET / "config.json", ends)
    tensors = load_file(TARGET / "model.safetensors")
    borrowed = {name: rows for name, rows in tensors.items() if "embed_tokens" in name or "lm_head" in name}
    assert 0 < len(borrowed) <= 2
    save_file(borrowed, ends / "model.safetensors")
    found = replay("--dump", dump, "--head-from", ends, "--json")
    assert found["histogram"] == replay("--dump", dump, "--head-from", "tiny", "--json")["histogram"]


def test_packed_ends_are_refused(copied: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(TARGET, tmp_path / "other"))
    change_tensors(
        other / "model.safetensors", **{"model.embed_tokens.weight": lambda rows: rows.to(torch.float8_e4m3fn)}
    )
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(manifest | {"ends_digest": None}))
    done = run_main(*REPLAY, "--dump", copied, "--head-from", other)
    assert (done.code, done.error_id, done.field) == (5, "packed-tensor", "model.embed_tokens.weight")


def test_a_draft_with_copies_needs_no_target(dump: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(DRAFT, tmp_path / "own"))
    target = load_file(TARGET / "model.safetensors")
    embedding = target["model.embed_tokens.weight"]
    head = target.get("lm_head.weight", embedding).clone()
    edit_tensors(own, **{"embed_tokens.weight": embedding, "lm_head.weight": head})
    done = run_main("eval-acceptance", own, *REPLAY[2:], "--dump", dump, "--json")
    assert done.code == 0, done.err
    expected = replay("--dump", dump, "--head-from", "tiny", "--json")["histogram"]
    assert json.loads(done.out)["histogram"] == expected
    done = run_main(*REPLAY, "--dump", dump)
    assert (done.code, done.error_id, done.field) == (2, "head-from-missing", "--head-from")


def test_a_target_that_transformers_runs_is_dumped_alike(dump: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hosted"
    done = run_main(*DUMP, folder, "--target-runtime", "transformers")
    assert done.code == 0, done.err
    for name in files_of(folder):
        found, expected = load_file(folder / name), load_file(dump / name)
        assert torch.equal(found["token_ids"], expected["token_ids"])
        torch.testing.assert_close(found["hidden_states"], expected["hidden_states"], rtol=1e-3, atol=1e-3)
    document = replay("--dump", folder, "--head-from", "tiny", "--json")
    assert document["histogram"] == replay("--dump", dump, "--head-from", "tiny", "--json")["histogram"]
