"""Mistakes of a first day: each message has a hint or the expected form, and the documented exit code."""

import errno
import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.acceptance.journal import Journal, JournalHead
from dflash_cli.acceptance.prompt_choice import choose_prompts
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.commands.eval_acceptance import EvaluationRequest
from dflash_cli.documents import reading
from dflash_cli.documents.atomic_file import Output, naming_output
from dflash_cli.generation.loaded_pair import open_pair
from dflash_cli.main import _foreseen
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import FileUnreadable, UsageError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import recorded_notices, run_main
from dflash_testing.refusals import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files and folders that a user may confuse, as the current directory."""
    path = tmp_path_factory.mktemp("mistakes")
    before = Path.cwd()
    os.chdir(path)
    support.make_native(path / "draft")
    shutil.copytree(tiny_directory() / "draft", path / "bin")
    (path / "bin" / "model.safetensors").rename(path / "bin" / "pytorch_model.bin")
    (path / "lora").mkdir()
    (path / "lora" / "adapter_config.json").write_text("{}")
    (path / "lora" / "adapter_model.safetensors").touch()
    (path / "packed").mkdir()
    config = json.loads((tiny_directory() / "target" / "config.json").read_text())
    packed = config | {"quantization_config": {"quant_method": "quip"}}
    (path / "packed" / "config.json").write_text(json.dumps(packed))
    for name, changes in (("negative", {"num_hidden_layers": -3}), ("headless", {"num_key_value_heads": 0})):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config | changes))
        shutil.copy(tiny_directory() / "target" / "model.safetensors", path / name)
    shutil.copytree(path / "draft", path / "integers")
    weights = (path / "integers" / "model.safetensors").read_bytes()
    begin = weights.index(b'"F32"', weights.index(b"self_attn.k_proj.weight"))
    (path / "integers" / "model.safetensors").write_bytes(weights[:begin] + b'"U32"' + weights[begin + 5 :])
    (path / "lines.txt").write_text("one\ntwo\n")
    (path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}' * 99)[:-9])
    (path / "list.json").write_text("[]")
    (path / "rows.jsonl").write_text('{"kind": "answers"}\n{"index": 0}\n')
    yield path
    os.chdir(before)


MISTAKES: dict[str, tuple[list[str], int, str, str | None]] = {
    "a target after the draft": (["validate", "tiny", "draft"], 2, "unexpected-argument", "--target draft"),
    "a level after the draft": (["validate", "tiny", "headers"], 2, "unexpected-argument", "--level headers"),
    "a dialect after the folders": (
        ["convert", "tiny", "out", "speculators"],
        2,
        "unexpected-argument",
        "--to speculators",
    ),
    "engines after the draft": (
        ["validate", "tiny", "sglang,vllm@0.33"],
        2,
        "unexpected-argument",
        "--engine sglang,vllm@0.33",
    ),
    "a dataset after the draft": (["bench", "tiny", "gsm8k"], 2, "unexpected-argument", "--dataset gsm8k"),
    "a repository left out": (["push", "draft"], 2, "missing-argument", None),
    "a draft as the target": (["generate", "x", "-d", "tiny", "-t", "draft"], 5, "draft-as-target", "a target"),
    "pickled weights": (["inspect", "bin"], 3, "pickle-weights", None),
    "an adapter as the target": (["bench", "tiny", "-t", "lora"], 4, "config-missing", "a checkpoint's config"),
    "an adapter as the draft": (["inspect", "lora"], 4, "config-missing", "a checkpoint's config"),
    "an unknown quantisation": (["tune", "tiny", "-t", "packed"], 5, "quantization-unknown", None),
    "prompts as plain text": (["generate", "-p", "lines.txt"], 2, "not-json", None),
    "prompts in another encoding": (["generate", "-p", "latin.jsonl"], 2, "not-utf-8", None),
    "an address as prompts": (["bench", "-p", "https://a.b/c.jsonl"], 4, "no-such-file", None),
    "a folder as prompts": (["bench", "-p", "draft"], 2, "not-a-regular-file", "a file"),
    "a cut off gzip file": (["bench", "-p", "cut.jsonl.gz"], 2, "not-gzip", "a whole gzip file"),
    "a folder as a result": (["report", "draft"], 2, "result-is-directory", "a file with a result"),
    "a file of answers as a result": (["card", "rows.jsonl"], 2, "rows-instead-of-result", "one JSON object"),
    "a folder as a server": (["probe", "draft"], 2, "usage-error", "a server's address, such as http://localhost:8000"),
    "too few tokens to time": (["bench", "-n", "4"], 2, "usage-error", None),
    "a port that does not exist": (
        ["probe", "http://localhost:99999"],
        2,
        "usage-error",
        "a server's address, such as http://localhost:8000",
    ),
    "an output in a file": (["convert", "draft", "list.json/out", "--to", "native"], 2, "parent-is-a-file", None),
    "a file as hand-offs": (
        ["generate", "--handoff-in", "list.json"],
        2,
        "handoff-folder-is-a-file",
        "a folder of hand-offs",
    ),
    "a target with a wrong number": (["inspect", "negative"], 3, "invalid-config", "1 to 10000 layers"),
    "a target without heads": (["inspect", "headless"], 3, "invalid-config", "an integer of at least 1"),
    "a draft of integers": (["convert", "integers", "out", "--to", "native"], 3, "tensor-mismatch", None),
    "a list as a device map": (["generate", "x", "--device-map", "list.json"], 2, "json-not-an-object", "an object"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_a_way_out(name: str, folder: Path) -> None:
    arguments, code, id, expected = MISTAKES[name]
    done = run_main(*arguments)
    assert done.error is not None
    assert (done.code, done.error_id, done.out) == (code, id, "")
    assert done.error.hint or done.error.expected
    if expected is not None:
        assert done.error.expected == expected
    assert ("adapter_config.json" in str(done.error.hint)) == ("adapter" in name)


def denied(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_file_that_this_user_may_not_read_is_input_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is asked for nothing, because root may read everything."""
    draft = support.make_native(tmp_path / "draft")
    monkeypatch.setattr(reading, "regular_size", denied)
    with refuses(FileUnreadable, "file-unreadable", path="result.json") as raised:
        reading.read_input(Path("result.json"))
    assert (raised.value.exit_code, raised.value.hint is not None) == (4, True)
    for name, path in (("open", draft / "config.json"), ("iterdir", draft)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, name, denied)
            done = run_main("inspect", str(draft))
        assert (done.code, done.error_id) == (4, "file-unreadable")
        assert done.error is not None
        assert str(done.error.path) == str(path)


def test_a_file_that_this_user_may_not_write_is_wrong_use(tmp_path: Path) -> None:
    with refuses(UsageError, "permission-denied", path=tmp_path / "out"), naming_output(tmp_path / "out"):
        denied()


def test_a_full_disk_names_the_way_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Output) -> None:
        with naming_output(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "rows.jsonl"
    with Journal(path, {}, [], resume=False) as journal:
        monkeypatch.setattr(Output, "flush", fill)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as raised:
            journal._write(JournalHead({}))
    told = _foreseen(raised.value)
    assert told is not None
    assert (told.exit_code, told.id, told.path) == (6, "disk-full", str(path))
    assert "--resume" in str(told.hint)


def test_a_folder_with_the_name_of_a_bundled_draft_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, notices in (("tiny", ("hides-bundled-pair",)), ("other", ())):
        assert run_main("convert", "tiny:reduced", name, "--to", "speculators").notices == notices


def test_fewer_prompts_than_asked_for_are_told() -> None:
    pair = open_pair(None, None, EngineConfig())
    for count, notices in ((65, ["fewer-prompts"]), (64, [])):
        with recorded_notices() as found:
            choose_prompts(EvaluationRequest(num_prompts=count), pair, None)
        assert found == notices


def test_a_check_of_a_bundled_draft_names_it_as_the_user_did() -> None:
    assert run_main("validate", "tiny").out.startswith("tiny: ")
