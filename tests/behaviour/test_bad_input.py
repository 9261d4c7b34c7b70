"""Bad input: each kind has its own message and exit code, through the real entry point."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.terminal.safe_text import CONTROLS
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke, launch, run_main
from dflash_testing.deadline import deadline
from dflash_testing.families import dflash2_native, write_draft


@dataclass(frozen=True)
class Case:
    """How to make the input, what is said about it, and with which exit code."""

    name: str
    make: Callable[[Path], object]
    message: str
    code: int = 3
    validate_code: int = 3


def edit(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A sound native draft, then one fault."""

    def make(path: Path) -> None:
        support.make_native(path)
        change(path)

    return make


def config(text: str) -> Callable[[Path], object]:
    return edit(lambda path: (path / "config.json").write_text(text, encoding="utf-8"))


def weights(data: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(data(file.read_bytes()))

    return edit(change)


def pickle_only(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def eagle(path: Path) -> None:
    changed = support.native_config(architectures=["LlamaForCausalLMEagle3"])
    support.write_checkpoint(path, changed, {"midlayer.hidden_norm.weight": np.ones(4, np.float32)})


def link(name: str, target: str) -> Callable[[Path], object]:
    """A file of the checkpoint that is a link to somewhere."""

    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return edit(change)


def pipe(name: str) -> Callable[[Path], object]:
    """Replace the file by a named pipe. A reader of the pipe would never return."""

    def change(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return edit(change)


def directory(name: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return edit(change)


def header(text: bytes) -> Callable[[Path], object]:
    return weights(lambda data: struct.pack("<Q", len(text)) + text)


def index(weight_map: dict[str, str]) -> Callable[[Path], object]:
    text = json.dumps({"weight_map": weight_map})
    return edit(lambda path: (path / "model.safetensors.index.json").write_text(text))


def entry(**fields: Any) -> Callable[[Path], object]:
    """Write a file of one tensor. `fields` change the tensor's entry in the header."""
    return header(json.dumps({"fc.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}}).encode())


CASES = [
    Case("absent", lambda path: None, "no such directory", 4, 4),
    Case("a file", lambda path: path.write_text("x"), "not a directory", 4, 4),
    Case("an empty directory", lambda path: path.mkdir(), "config.json: not found", 4, 4),
    Case("no weights", edit(lambda path: (path / "model.safetensors").unlink()), "no *.safetensors file"),
    Case("pickle weights", edit(pickle_only), "only pickle weights (pytorch_model.bin)"),
    Case("broken json", config("{"), "not valid JSON"),
    Case("a json list", config("[]"), "expected an object"),
    Case("duplicate keys", config('{"a": 1, "a": 2}'), "duplicate key 'a'"),
    Case("not a number", config(json.dumps(support.native_config(block_size=float("nan")))), "block_size"),
    Case("another encoding", edit(lambda path: (path / "config.json").write_bytes(b"\xff{}")), "not UTF-8"),
    Case("empty weights", weights(lambda data: b""), "not a safetensors file"),
    Case("truncated header", weights(lambda data: data[:20]), "truncated: header of"),
    Case("truncated data", weights(lambda data: data[:-1]), "truncated:"),
    Case("trailing data", weights(lambda data: data + b"\x00"), "oversized:"),
    Case("a huge header", weights(lambda data: struct.pack("<Q", 2**40) + data[8:]), "header length 1099511627776"),
    Case("a link outside", link("config.json", "/etc/passwd"), "outside the checkpoint"),
    Case("weights linked outside", link("model.safetensors", "/dev/zero"), "outside the checkpoint"),
    Case("a loop of links", link("config.json", "config.json"), "config.json"),
    Case("a dangling link", link("model.safetensors", "nowhere"), "model.safetensors"),
    Case("a config that is a pipe", pipe("config.json"), "not a regular file"),
    Case("weights that are a pipe", pipe("model.safetensors"), "not a regular file"),
    Case("a config that is a directory", directory("config.json"), "config.json"),
    Case("half a surrogate pair", config('{"a": "\\ud800"}'), "not valid JSON"),
    Case("deep nesting", config("[" * 100_000), "nested too deeply"),
    Case("a huge integer", config('{"a": ' + "9" * 5000 + "}"), "not valid JSON"),
    Case("a dtype that is a list", entry(dtype=[]), "unknown dtype"),
    Case("offsets past the end", entry(data_offsets=[2**62, 2**62 + 4]), "leaves a hole"),
    Case("negative offsets", entry(data_offsets=[-4, 0]), "expected [begin, end]"),
    Case("offsets backwards", entry(data_offsets=[4, 0]), "expected [begin, end]"),
    Case("too many tensors", header(b'"data_offsets"' * 50_001), "more than 50000 tensors"),
    Case("a shard above", index({"a": "../x.safetensors"}), "expected a file beside the index"),
    Case("an absolute shard", index({"a": "/etc/passwd"}), "expected a file beside the index"),
    Case("a shard with a null", index({"a": "x\0y"}), "expected a file beside the index"),
    Case("a shard with a long name", index({"a": "x" * 4000}), "expected a file beside the index"),
    Case("100,000 shards", index({f"t{n}": f"s{n}.safetensors" for n in range(100_000)}), "which is not there"),
    Case("unknown dialect", config('{"model_type": "bert"}'), "not a DFlash draft", 5, 5),
    Case("a target", lambda path: support.make_target(path), "not a DFlash draft", 5, 5),
    Case(
        "no block size", lambda path: support.make_native(path, block_size=support.REMOVED), "block_size: missing"
    ),
    Case(
        "layers out of range",
        lambda path: support.make_native(path, dflash_config={"mask_token_id": 31, "target_layer_ids": [0, 9]}),
        "target_layer_ids: found [0, 9], expected layers in 0..3",
    ),
    Case(
        "a null mask id",
        lambda path: support.make_native(path, dflash_config={"mask_token_id": None, "target_layer_ids": [0, 2]}),
        "mask_token_id: found None, expected an integer",
    ),
    Case(
        "anchor sampling",
        lambda path: support.make_speculators(path, sample_from_anchor=True),
        "sample_from_anchor true",
        5,
    ),
    Case("dflash 2", lambda path: write_draft(path, dflash2_native(attention_mode="mla")), "attention_mode", 5),
    Case("dflash 2 beam", lambda path: support.make_native(path, architectures=["DFlash2BeamDraftModel"]), "DFlash 2",
         5, 3),
    Case("dspark", lambda path: support.make_native(path, architectures=["Gemma4DSparkModel"]), "DSpark", 5, 5),
    Case("domino", lambda path: support.make_native(path, architectures=["DominoDraftModel"]), "Domino", 5, 5),
    Case("eagle 3", eagle, "EAGLE-3", 3, 3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """No input may keep a command waiting."""
    with deadline(30):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestEachKind:
    def test_convert(self, case: Case, tmp_path: Path) -> None:
        case.make(tmp_path / "draft")
        path = tmp_path / "draft" if case.name != "absent" else tmp_path / "no such draft"
        outcome = invoke("convert", path, tmp_path / "out", "--to", "speculators", "--target-name", "a/b")
        assert outcome.code == case.code
        assert case.message in outcome.err
        assert not (tmp_path / "out").exists()

    def test_validate(self, case: Case, tmp_path: Path) -> None:
        case.make(tmp_path / "draft")
        path = tmp_path / "draft" if case.name != "absent" else tmp_path / "no such draft"
        outcome = invoke("validate", path)
        assert outcome.code == case.validate_code
        if case.code != 4:
            assert " error " in outcome.out

    def test_the_real_entry(self, case: Case, tmp_path: Path) -> None:
        """Exit codes are mapped in main(), which the runner above goes around; twice in a process of its own."""
        case.make(tmp_path / "draft")
        path = tmp_path / "draft" if case.name != "absent" else tmp_path / "no such draft"
        run = launch if case.name in ("absent", "pickle weights") else run_main
        outcome = run("convert", path, tmp_path / "out", "--to", "speculators", "--target-name", "a/b")
        assert outcome.code == case.code, outcome.err
        assert outcome.out == ""
        first, *rest = outcome.err.splitlines()
        assert first.startswith("error: ")
        assert case.message in first
        assert all(line.startswith("hint: ") for line in rest)


def test_a_target_that_does_not_fit(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    target = support.make_target(tmp_path / "target", support.Shape(hidden=24, vocab=40, draft_vocab=40))
    report = run_main("validate", draft, "--target", target, "--json")
    assert report.code == 3
    errors = {item["id"] for item in json.loads(report.out)["findings"] if item["severity"] == "error"}
    assert {"P01", "P02"} <= errors
    outcome = run_main(
        "convert", draft, tmp_path / "out", "--to", "speculators", "--target", target, "--target-name", "a/b"
    )
    assert outcome.code == 3
    assert outcome.error is not None
    assert "vocab_size" in outcome.error.found


def test_a_target_that_is_a_draft(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    outcome = invoke("validate", draft, "--target", draft)
    assert outcome.code == 5
    assert "is a draft, expected a target" in outcome.err


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["validate"], ["serve-command", "--engine", "vllm", "--target", "tiny"], ["diagnose"],
     ["eval-acceptance"], ["generate", "x", "--draft"], ["convert"]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_the_same_absent_input_has_one_code_in_every_command(command: list[str], tmp_path: Path) -> None:
    """A file, a folder of checkpoints and nothing at all: exit 4, and a hint that says what to pass."""
    support.make_native(tmp_path / "run" / "checkpoint_best")
    file = tmp_path / "run" / "checkpoint_best" / "config.json"
    rest = ["out", "--to", "speculators", "--target-name", "a/b"] if command == ["convert"] else []
    for path, message, hint in (
        (file, f"{file}: not a directory", f"pass its folder: {file.parent}"),
        (tmp_path / "run", f"{tmp_path / 'run' / 'config.json'}: not found", "checkpoints beneath it: "),
        (tmp_path, f"{tmp_path / 'config.json'}: not found", f"checkpoints beneath it: {file.parent}"),
        (tmp_path / "absent", "absent: no such directory", "pass a directory, org/repo"),
    ):
        done = run_main(*command, path, *rest)
        assert done.code == 4, done.err
        assert message in done.err
        assert f"hint: {hint}" in done.err
        assert done.out == ""


@pytest.mark.parametrize("option", ["--output", "out"])
def test_a_missing_folder_of_an_output_has_one_code(option: str, tmp_path: Path) -> None:
    path = tmp_path / "absent" / "out"
    command = {
        "--output": ["generate", "x", "--output", path],
        "out": ["convert", "tiny", path, "--to", "speculators", "--target-name", "a/b"],
    }.get(option, ["eval-acceptance", option, path])
    done = run_main(*command)
    assert done.code == 2
    assert f"error: {tmp_path / 'absent'}: no such directory" in done.err.splitlines()
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["convert", "tiny", "out"], "error: --to is missing: dialect to write: "),
        (
            ["convert", "tiny", "out", "--to", "speculator"],
            "error: unknown dialect 'speculator'; did you mean speculators?",
        ),
        (
            ["validate", "tiny", "--engine", "trtllm"],
            "error: --engine: unknown engine 'trtllm'; did you mean tensorrt-llm?",
        ),
        (["validate", "tiny", "--engine", "vlm"], "error: --engine: unknown engine 'vlm'; did you mean vllm?"),
        (["generate", "x", "-n", "0"], "error: --max-new-tokens: found 0, "),
    ],
    ids=["no --to", "--to", "trtllm", "engine", "-n 0"],
)
def test_wrong_use_is_one_line(arguments: list[str], line: str) -> None:
    done = run_main(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(line)
    assert len([text for text in done.err.splitlines() if not text.startswith("hint: ")]) == 1


@pytest.mark.parametrize("options", [["--device", "cuda:99"], ["--device", "meta"]])
def test_hardware_that_is_not_there_is_unsupported(options: list[str]) -> None:
    assert run_main("generate", "x", *options).code == 5


def test_usage_errors_are_typers() -> None:
    assert launch("validate").code == 2
    assert launch("convert", "tiny", "out", "--to", "onnx").code == 2


HOSTILE = "x\nerror: forged\x1b]0;t\x07\x9b2J\u202e"


@pytest.mark.parametrize("command", [("inspect", "--tensors"), ("validate",), ("inspect", "--json")])
def test_names_of_a_checkpoint_forge_no_lines_and_no_escapes(command: tuple[str, ...], tmp_path: Path) -> None:
    changed = support.native_config(model_type=HOSTILE, verifier=HOSTILE, extra_key=HOSTILE)
    support.write_checkpoint(tmp_path, changed, {**support.body_arrays(), HOSTILE: np.ones(4, np.float32)})
    outcome = run_main(command[0], tmp_path, *command[1:])
    text = outcome.out + outcome.err
    assert "forged" in text
    assert not CONTROLS.search(text.replace("\n", ""))
    assert not [line for line in text.splitlines() if line.startswith("error: forged")]
