"""The header of a GGUF file: kinds of values, refusals of damaged and hostile files, and of files without a draft."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf import MAX_LISTED, shortest
from dflash_runtime.checkpoint.stored.gguf_checkpoint import GgufCheckpoint, gguf_name, nested, open_stored
from dflash_runtime.checkpoint.stored.gguf_files import find_gguf, read_gguf, refuse_gguf
from dflash_runtime.errors import CheckpointError, UnknownFormat, UnsupportedError, UsageError
from dflash_testing import checkpoints as support
from dflash_testing import gguf_files
from dflash_testing.command_line import invoke
from dflash_testing.gguf_files import ARRAY, STRING, UINT32, entry, make_gguf, make_split, text
from dflash_testing.refusals import refuses

ARCHITECTURE = entry("general.architecture", "dflash")


def header(*entries: bytes, count: int | None = None, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    start = struct.pack("<IQQ", 3, num_tensors, len(entries) if count is None else count)
    return b"GGUF" + start + b"".join(entries) + tensors


def tensor(name: str, *shape: int, kind: int = gguf_files.F32, offset: int = 0) -> bytes:
    """An entry of the table, with the innermost dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def read(folder: Path, data: bytes) -> dict[str, Any]:
    path = folder / "a.gguf"
    path.write_bytes(data)
    return {name: key.value for name, key in read_gguf(path).keys.items()}


def test_values_of_every_kind(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQB", 0, 1, 7)
    long = [*range(MAX_LISTED + 1)]
    found = read(
        tmp_path,
        header(
            ARCHITECTURE, entry("flag", True), entry("eps", 1e-6), entry("taps", [2, 10]), entry("words", ["a", "b"]),
            text("nested") + struct.pack("<I", ARRAY) + inner, text("double") + struct.pack("<Id", 12, 0.1),
            text("small") + struct.pack("<Ib", 1, -3), entry("long", long), entry("tokenizer.ggml.tokens", ["x"]),
        ),
    )  # fmt: skip
    assert found == {
        "general.architecture": "dflash", "flag": True, "eps": 1e-6, "taps": [2, 10], "words": ["a", "b"],
        "nested": [[7]], "double": 0.1, "small": -3, "long": {"count": MAX_LISTED + 1},
        "tokenizer.ggml.tokens": {"count": 1},
    }  # fmt: skip


@pytest.mark.parametrize("value", [1e-6, 10000000.0, 0.1, 1 / 3, 16777216.0, 3.4e38, 0.0, -2.5])
def test_a_float_reads_back_as_the_number_that_was_written(value: float) -> None:
    (stored,) = struct.unpack("<f", struct.pack("<f", value))
    assert struct.pack("<f", shortest(stored)) == struct.pack("<f", value)
    assert len(repr(shortest(stored))) <= len(repr(stored))
    if value != 1 / 3:
        assert shortest(stored) == value


NAME = struct.pack("<Q", 3) + b"abc"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"GGUF", "gguf-truncated"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "gguf-version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "gguf-version"),
    "very many keys": (header(ARCHITECTURE, count=2**60), "gguf-count"),
    "very many tensors": (header(num_tensors=2**40), "gguf-count"),
    "missing keys": (header(ARCHITECTURE, count=9), "gguf-truncated"),
    "long name": (header(struct.pack("<Q", 2**63)), "gguf-count"),
    "long text": (header(NAME + struct.pack("<IQ", STRING, 2**62)), "gguf-truncated"),
    "unknown kind": (header(NAME + struct.pack("<I", 99)), "gguf-key"),
    "long list": (header(NAME + struct.pack("<IIQ", ARRAY, UINT32, 2**40)), "gguf-count"),
    "list past the end": (header(NAME + struct.pack("<IIQ", ARRAY, UINT32, 1000)), "gguf-truncated"),
    "list of texts past the end": (header(NAME + struct.pack("<IIQ", ARRAY, STRING, 3_000_000)), "gguf-truncated"),
    "deep list": (header(NAME + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10_000), "gguf-key"),
    "list of unknown kind": (header(NAME + struct.pack("<IIQ", ARRAY, 77, 0)), "gguf-key"),
    "not UTF-8": (header(NAME + struct.pack("<IQ", STRING, 2) + b"\xff\xfe"), "gguf-text"),
    "key twice": (header(ARCHITECTURE, ARCHITECTURE), "gguf-key"),
    "alignment 0": (header(entry("general.alignment", 0)), "gguf-alignment"),
    "alignment 24": (header(entry("general.alignment", 24)), "gguf-alignment"),
    "alignment as text": (header(entry("general.alignment", "32")), "gguf-alignment"),
    "many dimensions": (header(tensors=tensor("a", 1, 1, 1, 1, 1), num_tensors=1), "gguf-tensor"),
    "no elements": (header(tensors=tensor("a", 0), num_tensors=1), "gguf-tensor"),
    "huge": (header(tensors=tensor("a", 2**31, 2**31, 2**31), num_tensors=1), "gguf-tensor"),
    "unknown type": (header(tensors=tensor("a", 8, kind=99), num_tensors=1), "gguf-tensor"),
    "part of a block": (header(tensors=tensor("a", 33, kind=gguf_files.Q8_0), num_tensors=1), "gguf-tensor"),
    "unaligned": (header(tensors=tensor("a", 8, offset=4), num_tensors=1) + bytes(200), "gguf-tensor"),
    "past the end": (header(tensors=tensor("a", 8, offset=2**62), num_tensors=1), "file-truncated"),
    "truncated": (header(tensors=tensor("a", 800), num_tensors=1) + bytes(200), "file-truncated"),
    "overlapping": (
        header(tensors=tensor("a", 16) + tensor("b", 16, offset=32), num_tensors=2) + bytes(400), "gguf-tensor"
    ),
    "tensor twice": (header(tensors=tensor("a", 8) + tensor("a", 8, offset=32), num_tensors=2) + bytes(400),
                     "gguf-tensor"),
}  # fmt: skip
"""Files that break a rule of the format, and the id of the refusal."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_before_memory_is_used(name: str, tmp_path: Path) -> None:
    data, id = HOSTILE[name]
    path = tmp_path / "draft.gguf"
    path.write_bytes(data)
    with refuses(CheckpointError, id, path=path):
        read_gguf(path)
    assert invoke("inspect", path).error_id == id
    assert invoke("validate", path).code == 3


def test_two_tensors_that_stand_for_one_are_refused(tmp_path: Path) -> None:
    stored = gguf_files.tensors()
    stored["hidden_norm.weight"] = stored["enc.output_norm.weight"]
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.metadata(), stored)
    with refuses(CheckpointError, "tensor-stored-twice", field="hidden_norm.weight"):
        _ = open_stored(path).tensors


def test_a_folder_with_a_gguf_file_and_no_other_weights_is_a_draft(tmp_path: Path) -> None:
    path = gguf_files.make_gguf(tmp_path / "a.gguf")
    support.write_config(tmp_path, support.native_config())  # a config does not matter without its weights
    for where in (path, tmp_path):
        found = open_stored(where)
        assert isinstance(found, GgufCheckpoint)
        assert (found.path, found.config_path, len(found.tensors)) == (where, path, 25)


def test_a_gguf_file_does_not_hide_safetensors_weights(tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source")
    gguf_files.make_gguf(source / "draft.gguf")
    assert type(open_stored(source)) is Checkpoint
    manifest = support.convert(source, tmp_path / "out", "native")
    assert ("draft.gguf", None, "dropped") in [(item["from"], item["to"], item["change"]) for item in manifest["files"]]


@pytest.mark.parametrize("architecture", ["llama", None])
def test_a_model_that_is_no_draft_is_refused_by_its_architecture(architecture: str | None, tmp_path: Path) -> None:
    keys = {} if architecture is None else {"general.architecture": architecture}
    path = gguf_files.write(tmp_path / "model.gguf", keys, {})
    with refuses(UnknownFormat, "gguf", path=path, field="general.architecture", found=architecture):
        open_stored(path)
    outcome = invoke("convert", path, tmp_path / "out", "--to", "native")
    assert (outcome.code, outcome.error_id) == (5, "gguf")


def test_another_file_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not GGUF")
    assert find_gguf(path) is None
    refuse_gguf(path)
    with refuses(CheckpointError, "not-gguf", path=path):
        read_gguf(path)
    named = path.rename(tmp_path / "model.gguf")
    with refuses(CheckpointError, "not-gguf", path=named):
        open_stored(named)


def test_dotted_keys_become_objects_unless_another_key_is_in_the_way() -> None:
    found = nested({"a.b": 1, "a.c.d": 2, "x": 3, "x.y": 4, "." * 40: 5})
    assert (found["a"], found["x"], found["x.y"]) == ({"b": 1, "c": {"d": 2}}, 3, 4)


def test_a_tensor_that_llama_cpp_does_not_know_has_no_name() -> None:
    with refuses(UnsupportedError, "tensor-not-in-gguf", field="markov_head.markov_w1.weight"):
        gguf_name("markov_head.markov_w1.weight")


def test_a_split_draft_reads_like_one_file(tmp_path: Path) -> None:
    whole, parts = open_stored(make_gguf(tmp_path / "whole.gguf")), make_split(tmp_path / "split")
    for path in (tmp_path / "split", parts[0], parts[2]):
        found = open_stored(path)
        assert found.config == whole.config
        assert found.weight_files == parts
        assert set(found.tensors) == set(whole.tensors)
    for name in whole.tensors:
        assert found.load(name).equal(whole.load(name))


@pytest.mark.parametrize(
    ("spoil", "id", "at"),
    [
        (lambda parts: parts[0].unlink(), "gguf-part-missing", 0),
        (lambda parts: parts[1].unlink(), "gguf-part-missing", 1),
        (lambda parts: parts[2].write_bytes(parts[1].read_bytes()), "gguf-tensor", 2),
        (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-1]), "file-truncated", 2),
    ],
    ids=["first", "second", "twice", "short"],
)
def test_a_split_draft_needs_all_its_files(
    spoil: Callable[[list[Path]], object], id: str, at: int, tmp_path: Path
) -> None:
    parts = make_split(tmp_path)
    spoil(parts)
    with refuses(CheckpointError, id, path=parts[at]):
        open_stored(tmp_path)


def test_a_part_under_another_name_tells_how_to_merge(tmp_path: Path) -> None:
    part = make_split(tmp_path / "split")[0].rename(tmp_path / "draft.gguf")
    with refuses(CheckpointError, "gguf-split", path=part, field="split.count", found=3) as raised:
        open_stored(part)
    assert "llama-gguf-split --merge" in str(raised.value.hint)


def test_a_folder_with_several_drafts_names_none_of_them(tmp_path: Path) -> None:
    make_split(tmp_path)
    make_gguf(tmp_path / "other.gguf")
    names = ["draft-Q8_0-00001-of-00003.gguf", "other.gguf"]
    with refuses(UsageError, "several-gguf-files", path=tmp_path, found=names):
        open_stored(tmp_path)
    assert open_stored(tmp_path / "other.gguf").tensors
