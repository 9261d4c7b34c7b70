"""`dflash generate --handoff-out` and `--handoff-in`: two runs give the text of one run, or a named fault."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.errors import DFlashError, PeerUnreachable, UsageError
from dflash_testing.command_line import IMPORT_PATHS, run_main
from dflash_testing.deadline import deadline
from dflash_testing.engine_kv import BLOCK_SIZE, prefill_layers, save_as_vllm
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts

LENGTHS = (1, 15, 16, 17, 33)
"""Lengths of prompts: their last page of 16 has 1, 15, 16, 1 and 1 rows."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = zip(LENGTHS, bundled_prompts(), strict=False)
    rows = [{"prompt_token_ids": text[:length], "id": f"p{length}", "category": "code"} for length, text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


SAMPLED = ["-n", "12", "--temperature", "0.8", "--seed", "3"]


@pytest.fixture(scope="module")
def handed_off(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sampled text, because sampling continues from the seeds as well."""
    folder = tmp_path_factory.mktemp("handoffs") / "ho"
    done = run_main("generate", "-p", prompts, *SAMPLED, "--handoff-out", folder)
    assert (done.code, done.out) == (0, f"{folder}\n")
    assert "5 prompts handed off" in done.err
    return folder


@pytest.fixture
def copied(handed_off: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(handed_off, tmp_path / "ho"))


def rows_of(*arguments: object) -> list[dict[str, Any]]:
    done = run_main("generate", *arguments, "-o", "-")
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def refuse(code: int, *arguments: object) -> DFlashError:
    """The error of a run without a result. It is printed once."""
    done = run_main("generate", *arguments)
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.count("error: ") == 1
    assert done.error is not None
    return done.error


def test_two_runs_over_a_folder_answer_like_one(prompts: Path, handed_off: Path) -> None:
    """Rows, traces, numbers, ids and text are equal. Each row states how many tokens were handed off."""
    one, two = rows_of("-p", prompts, *SAMPLED, "--trace", "9"), rows_of("--handoff-in", handed_off, "--trace", "9")
    assert [row.pop("num_loaded", 0) for row in two] == list(LENGTHS)
    assert two == one


def test_documents_say_what_was_handed_off(prompts: Path, tmp_path: Path) -> None:
    place = tmp_path / "ho"
    sent = json.loads(run_main("generate", "-p", prompts, "-n", 9, "--handoff-out", place, "--json").out)
    size = sum(file.stat().st_size for file in place.rglob("kv.safetensors"))
    assert (sent["handoffs"]["num_sent"], sent["num_tokens"]) == (5, 5)
    assert 0.9 * size < sent["handoffs"]["num_bytes"] < size
    loaded = json.loads(run_main("generate", "--handoff-in", place, "--check-lossless", "--json").out)
    assert loaded["handoffs"] == {**sent["handoffs"], "is_sending": False, "num_sent": 0, "num_loaded": 5}
    assert (loaded["num_tokens"], loaded["lossless"]["is_lossless"]) == (45, True)


@pytest.mark.slow
def test_an_address_joins_two_processes(prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"gloo://127.0.0.1:{free.getsockname()[1]}"
    asked = ["-p", str(prompts), "-n", "12"]
    sender = subprocess.Popen(
        [sys.executable, "-m", "dflash_cli", "generate", *asked, "--handoff-out", place],
        env={**os.environ, **IMPORT_PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    two = rows_of(*asked, "--handoff-in", place)
    out, err = sender.communicate(timeout=60)
    assert (sender.returncode, out) == (0, f"{place}\n"), err
    assert [row.pop("num_loaded", 0) for row in two] == list(LENGTHS)
    assert two == rows_of(*asked)


def test_a_peer_that_never_answers_is_said_to_be_gone(prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"gloo://127.0.0.1:{free.getsockname()[1]}"
    for option in ("--handoff-in", "--handoff-out"):
        error = refuse(4, "-p", prompts, option, place, "--handoff-timeout", "0.2")
        assert isinstance(error, PeerUnreachable)
        assert "0.2 s" in error.message


def test_damaged_handoffs_are_refused_before_models_are_loaded(copied: Path) -> None:
    tensors, header = copied / "00001" / "kv.safetensors", copied / "00001" / "handoff.json"
    whole, text = tensors.read_bytes(), header.read_text()
    tensors.write_bytes(whole[:-100])
    cut = refuse(3, "--draft", "absent", "--target", "absent", "--handoff-in", copied)
    assert (cut.id, cut.path, cut.found) == ("unreadable-handoff", tensors, len(whole) - 100)
    assert str(len(whole)) in str(cut.expected)
    tensors.unlink()
    gone = refuse(3, "--handoff-in", copied)
    assert (gone.id, gone.path) == ("unreadable-handoff", tensors)
    header.write_text(text[:50])
    assert refuse(3, "--handoff-in", copied).message.startswith(f"{header}: ")
    header.write_text(text.replace('"00001"', '"00002"'))
    assert refuse(3, "--handoff-in", copied).id == "header-damaged"
    os.mkfifo(tensors)
    header.write_text(text)
    with deadline(20):
        assert refuse(3, "--handoff-in", copied).id == "unreadable-handoff"
    shutil.rmtree(copied / "00001")
    (copied / "00002").rename(copied / "00001")
    renamed = refuse(3, "--handoff-in", copied)
    assert (renamed.path, renamed.field, renamed.found) == (header, "key", "00002")


@pytest.mark.parametrize("field", ["output_token_ids", "prompt_token_ids"])
@pytest.mark.parametrize("token", [-5, 1_000_000])
def test_token_ids_outside_the_vocabulary_are_refused(copied: Path, field: str, token: int) -> None:
    header = copied / "00001" / "handoff.json"
    value = {**json.loads(header.read_text()), field: [token]}
    value["digest"] = digest_value({key: item for key, item in value.items() if key != "digest"}, digest_size=16)
    header.write_text(json.dumps(value))
    error = refuse(3, "--handoff-in", copied)
    assert (error.id, error.field, error.found) == ("token-id-out-of-range", field, token)
    assert str(error.path) == str(copied / "00001")


def test_a_damaged_page_is_prefilled_again_with_one_warning(copied: Path, prompts: Path) -> None:
    tensors = copied / "00004" / "kv.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-9] ^= 1
    tensors.write_bytes(content)
    done = run_main("generate", "--handoff-in", copied, "-o", "-")
    assert done.err.count("warning: ") == 1
    assert done.notices.count("prompts-prefilled-here") == 1
    assert "damaged" in done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row.get("num_loaded") for row in rows] == [1, 15, 16, 17, None]
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in rows_of("-p", prompts, *SAMPLED)]


def test_a_hand_off_of_another_pair_is_refused_by_name_or_taken_by_force(handed_off: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    asked = ["--draft", "tiny:reduced", "--handoff-in", handed_off, "-o", output]
    error = refuse(3, *asked)
    assert (error.id, str(error.path), error.found) == ("handoff-does-not-fit", str(handed_off), "00000")
    assert "draft weights: " in error.message
    assert not output.exists()
    done = run_main("generate", *asked, "--force-mismatch")
    assert done.code == 0, done.err
    (warning,) = (line for line in done.err.splitlines() if line.startswith("warning: "))
    assert done.notices.count("acceptance-may-be-lower") == 1
    assert " 0." in warning, "the acceptance of position 1"
    assert "draft weights: " in warning
    wrong = run_main("generate", "--page-size", "8", "--handoff-in", handed_off, "--force-mismatch")
    assert wrong.notices.count("text-may-be-wrong") == 1
    text = [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]
    assert text == [row["token_ids"] for row in rows_of("--handoff-in", handed_off)]


def test_a_full_disk_ends_the_run_in_one_line(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_saved = 0

    def fill_up(*arguments: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        if num_saved > 2:
            raise OSError(28, "No space left on device")
        save_file(*arguments)

    monkeypatch.setattr("dflash_runtime.kv_transfer.file_connector.save_file", fill_up)
    error = refuse(6, "-p", prompts, "--handoff-out", tmp_path / "ho", "--concurrency", "1")
    assert error.path is None or str(error.path).endswith("ho/00002")
    assert "ho/00002" in error.message
    assert error.message.endswith(os.strerror(errno.ENOSPC))
    assert sorted(item.name for item in (tmp_path / "ho").iterdir()) == ["00000", "00001"]


def test_a_folder_that_is_not_empty_is_replaced_only_by_force(copied: Path) -> None:
    (copied / "notes.txt").write_text("mine")
    assert refuse(2, "x", "--handoff-out", copied).id == "output-exists"
    assert run_main("generate", "x", "--handoff-out", copied, "--force").code == 0
    assert sorted(item.name for item in copied.iterdir()) == ["00000", "notes.txt"]


def test_force_removes_the_link_to_a_hand_off_and_not_the_hand_off(copied: Path, handed_off: Path) -> None:
    (copied / "linked").symlink_to(handed_off / "00001")
    assert run_main("generate", "x", "--handoff-out", copied, "--force").code == 0
    assert sorted(item.name for item in copied.iterdir()) == ["00000"]
    assert (handed_off / "00001" / "handoff.json").is_file()


TURNS = '{"turns": ["a", "b"]}\n'


@pytest.mark.parametrize(
    ("arguments", "code", "error_id", "field"),
    [
        (["--handoff-in", "HO", "x"], 2, "options-exclude-each-other", "PROMPT"),
        (["--handoff-in", "HO", "-p", "y"], 2, "options-exclude-each-other", "--prompts"),
        (["--handoff-in", "HO", "-n", "4"], 2, "options-exclude-each-other", "--max-new-tokens"),
        (["--handoff-in", "HO", "--temperature", "1"], 2, "options-exclude-each-other", "--temperature"),
        (["--handoff-in", "HO", "--seed", "1"], 2, "options-exclude-each-other", "--seed"),
        (["--handoff-in", "HO", "-n", "256"], 2, "options-exclude-each-other", "--max-new-tokens"),
        (["--handoff-in", "HO", "--raw"], 2, "options-exclude-each-other", "--chat"),
        (["--handoff-in", "HO", "--handoff-out", "x"], 2, "options-exclude-each-other", "--handoff-in"),
        (["--handoff-in", "absent"], 4, "no-handoff-folder", None),
        (["--handoff-in", "."], 2, "no-handoffs", None),
        (["--handoff-in", "HO", "--handoff-timeout", "0"], 2, "usage-error", "--handoff-timeout"),
        (["x", "--handoff-in", "smoke://a:1"], 2, "usage-error", "location of hand-offs"),
        (["x", "--handoff-out", "gloo://127.0.0.1"], 2, "usage-error", "address"),
        (["x", "--handoff-out", "no/such/dir"], 2, "no-parent-directory", None),
        (["x", "--handoff-out", "out", "-o", "-"], 2, "options-exclude-each-other", "--output"),
        (["x", "--handoff-out", "out", "--trace", "1"], 2, "options-exclude-each-other", "--trace"),
        (["x", "--force-mismatch"], 2, "option-needs-another", "--force-mismatch"),
        (["-p", "turns.jsonl", "--handoff-out", "out"], 2, "handoff-of-several-turns", "turns.jsonl:1"),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str],
    code: int,
    error_id: str,
    field: str | None,
    handed_off: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("turns.jsonl").write_text(TURNS)
    error = refuse(code, *[str(handed_off) if item == "HO" else item for item in arguments])
    assert (error.id, error.field) == (error_id, field)
    assert not Path("out").exists()


def test_samples_are_not_judged_token_by_token(handed_off: Path) -> None:
    assert refuse(2, "--handoff-in", handed_off, "--check-lossless").field == "--check-lossless"


@pytest.fixture(scope="module")
def prefilled(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same prompts in the form of vLLM's ExampleConnector."""
    folder = tmp_path_factory.mktemp("vllm") / "prefilled"
    llm = bundled_llm(bundled_draft_model(), 7)
    for line in prompts.read_text().splitlines():
        ids = json.loads(line)["prompt_token_ids"]
        if len(ids) > BLOCK_SIZE:
            save_as_vllm(prefill_layers(llm, ids), ids, folder)
    return folder


def test_prompts_begin_with_what_vllm_has_prefilled(prompts: Path, prefilled: Path) -> None:
    """Whole blocks without the last token. Other prompts are prefilled here, with a notice."""
    given = ("-p", prompts, *SAMPLED)
    wanted = rows_of(*given)
    done = run_main("generate", *given, "--handoff-in", prefilled, "-o", "-")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [row.pop("num_loaded", 0) for row in found] == [0, 0, 0, 16, 32]
    assert [row.pop("num_loaded", 0) for row in wanted] == [0] * 5
    assert found == wanted
    assert "2 prompts " in done.err
    assert done.notices.count("prompts-prefilled-here") == 1
    assert "3 prompts " in done.err


def test_prefills_of_vllm_are_refused_by_name(prompts: Path, prefilled: Path, tmp_path: Path) -> None:
    assert isinstance(refuse(2, "--handoff-in", prefilled), UsageError)
    force = refuse(2, "-p", prompts, "--handoff-in", prefilled, "--force-mismatch")
    assert (force.id, force.field) == ("options-exclude-each-other", "--force-mismatch")
    cut = Path(shutil.copytree(prefilled, tmp_path / "cut"))
    for file in cut.glob("*/model.layers.[678].*"):
        file.unlink()
    missing = refuse(3, "-p", prompts, "--handoff-in", cut)
    assert "layers 6 to 8" in missing.message


def test_prompts_are_kept_over_runs(prompts: Path, tmp_path: Path) -> None:
    given = ("-p", prompts, *SAMPLED, "--prefix-store", tmp_path / "store")
    first, again = rows_of(*given), rows_of(*given)
    assert [row.pop("num_loaded", 0) for row in first] == [0] * 5
    assert [row.pop("num_loaded", 0) for row in again] == [0, 0, 0, 16, 32]
    assert first == again
    (tmp_path / "file").touch()
    refused = refuse(2, "-p", prompts, "--prefix-store", tmp_path / "file")
    assert str(tmp_path / "file") in refused.message
