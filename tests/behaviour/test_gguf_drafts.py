"""Drafts in GGUF files: as llama.cpp's own writer stores them, there and back, quantised, and with a tokenizer."""

import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.conversion.verify import differing_fields
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.checkpoint.stored.gguf import GgufHeader
from dflash_runtime.checkpoint.stored.gguf_files import read_gguf
from dflash_testing import checkpoints as support
from dflash_testing import gguf_files
from dflash_testing.command_line import invoke
from dflash_testing.paths import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "gguf_file.json").read_text(encoding="utf-8"))
WINDOWED = support.Shape(windows=(16, None))
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def golden_file(folder: Path) -> Path:
    path = folder / "golden.gguf"
    path.write_bytes(base64.b64decode(GOLDEN["file"]))
    return path


def golden_native(folder: Path) -> Path:
    """The draft of the recorded file in safetensors. Its numbers count up, so that any permutation is seen."""
    arrays = {}
    for name, shape in support.body_shapes(WINDOWED).items():
        numbers = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(np.float32) / 256
        cut = (numbers.view(np.uint32) >> 16 << 16).view(np.float32)
        arrays[name] = torch.from_numpy(cut if len(shape) > 1 else numbers).to(torch.bfloat16)
    folder.mkdir()
    support.write_config(folder, support.native_config(WINDOWED, dtype="bfloat16"))
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def convert(source: Path, out: Path, to: str, *more: str | Path) -> Path:
    outcome = invoke("convert", source, out, "--to", to, *more)
    assert outcome.code == 0, outcome.err
    return out


def entries(header: GgufHeader) -> dict[str, bytes]:
    data = header.file.read_bytes()
    return {name: data[key.begin : key.end] for name, key in header.keys.items()}


def contents(header: GgufHeader) -> dict[str, tuple[Any, ...]]:
    data = header.file.read_bytes()
    return {name: (at.type.name, at.shape, data[at.begin : at.end]) for name, at in header.tensors.items()}


def test_a_written_file_has_the_keys_and_tensors_of_llama_cpps_writer(tmp_path: Path) -> None:
    """Key by key and tensor by tensor: names, kinds, values, dimensions, types, and the order of the elements."""
    golden = read_gguf(golden_file(tmp_path))
    out = convert(golden_native(tmp_path / "native"), tmp_path / "out", "gguf")
    assert sorted(item.name for item in out.iterdir()) == ["conversion.json", "draft.gguf"]
    written = read_gguf(out / "draft.gguf")
    own = {name: entry for name, entry in entries(written).items() if not name.startswith("dflash_cli.")}
    assert own == entries(golden)
    assert contents(written) == contents(golden)
    changes = json.loads((out / "conversion.json").read_text())["tensors"]
    assert {item["from"]: item["to"] for item in changes} == GOLDEN["names"]


def test_a_file_of_llama_cpps_writer_is_read(tmp_path: Path) -> None:
    native = golden_native(tmp_path / "native")
    found, expected = open_draft(golden_file(tmp_path)), open_draft(native)
    assert differing_fields(expected.config, found.config) == ["num_target_layers"]
    for name in expected.checkpoint.tensors:
        assert torch.equal(found.checkpoint.load(name).float(), expected.checkpoint.load(name).float()), name
    target = support.make_target(tmp_path / "target", WINDOWED)
    out = convert(found.checkpoint.config_path, tmp_path / "out", "native", "--target", target)
    assert differing_fields(expected.config, open_draft(out).config) == []
    assert_same_bytes(native, out)  # norms are bfloat16 again, because their values allow it


def assert_same_bytes(one: Path, other: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def sources(work: Path) -> Iterator[Path]:
    """The bundled draft, and drafts of each type, rope, causality and choice of windows."""
    yield tiny_directory() / "draft"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    cases: list[tuple[str, tuple[int | None, ...], dict[str, Any]]] = [
        ("bfloat16", (16, None), {"use_cache": True}),
        ("float16", (16, 16), {"is_causal": True}),
        ("float32", (None, 16), {"rope_scaling": yarn}),
        ("bfloat16", (None, None), {"rope_scaling": linear, "rms_norm_eps": 1e-5}),
    ]
    for at, (dtype, windows, changes) in enumerate(cases):
        folder, shape = work / f"source{at}", support.Shape(windows=windows)
        folder.mkdir()
        config = support.native_config(shape, dtype=dtype, **changes)
        config["dflash_config"]["future_setting"] = [1]
        support.write_config(folder, config)
        arrays = {name: torch.from_numpy(array).to(TYPES[dtype]) for name, array in support.body_arrays(shape).items()}
        save_file(arrays, folder / "model.safetensors")
        yield folder


def test_there_and_back_keeps_every_field_key_and_byte(tmp_path: Path) -> None:
    for at, source in enumerate(sources(tmp_path)):
        there = convert(source, tmp_path / f"there{at}", "gguf")
        back = convert(there, tmp_path / f"back{at}", "native")
        before, after = open_draft(source), open_draft(back)
        assert differing_fields(before.config, open_draft(there).config) == []
        described = json.loads(invoke("inspect", there, "--json").out)
        assert not [key for key in described["carried"] if "rope" in key]
        assert differing_fields(before.config, after.config) == []
        assert {**after.parsed.carried, **before.parsed.carried} == after.parsed.carried
        assert_same_bytes(source, back)
        ids = {item.id for item in validate_draft(ValidationPlan(draft=there)).findings}
        assert ids <= {"S44", *(item.id for item in validate_draft(ValidationPlan(draft=source)).findings)}


def test_float32_norms_beside_bfloat16_matrices_stay_float32(tmp_path: Path) -> None:
    """Norms of one would fit into bfloat16, so that only the stated type tells."""
    source = golden_native(tmp_path / "source")
    arrays = load_file(source / "model.safetensors")
    save_file(
        {name: torch.ones_like(item.float()) if item.dim() == 1 else item for name, item in arrays.items()},
        source / "model.safetensors",
    )
    assert_same_bytes(source, convert(convert(source, tmp_path / "there", "gguf"), tmp_path / "back", "native"))


@pytest.mark.parametrize(
    ("shape", "changes", "id", "field"),
    [
        (support.Shape(bias=True), {}, "cannot-state", "attention_bias"),
        (support.Shape(windows=(16, None)), {"is_causal": support.REMOVED}, "several-causalities", None),
        (support.SMALL, {"rope_theta": 1234567.891}, "number-rounded", "rope_theta"),
        (support.SMALL, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "cannot-state", "rope_scaling"),
        (support.SMALL, {"logit_scale": 0.5}, "scale-ignored", "logit_scale"),
        (support.SMALL, {"hidden_act": "gelu"}, "cannot-state", "hidden_act"),
    ],
)
def test_a_draft_that_llama_cpp_would_compute_otherwise_is_refused(
    shape: support.Shape, changes: dict[str, Any], id: str, field: str | None, tmp_path: Path
) -> None:
    source = support.make_native(tmp_path / "source", shape, **changes)
    outcome = invoke("convert", source, tmp_path / "out", "--to", "gguf")
    assert (outcome.code, outcome.error_id) == (5, id), outcome.err
    assert field is None or outcome.field == field
    assert not (tmp_path / "out").exists()


def pack_q8_0(values: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Blocks of 32 numbers as Q8_0, one number after the other, and the numbers that they stand for."""
    data, found = b"", []
    for block in values.reshape(-1, 32):
        scale = np.float16(np.abs(block).max() / 127)
        codes = np.clip(np.round(block / np.float64(scale)), -127, 127).astype(np.int8)
        data += scale.tobytes() + b"".join(int(code).to_bytes(1, "little", signed=True) for code in codes)
        found += [float(scale) * int(code) for code in codes]
    return data, np.array(found).reshape(values.shape)


def pack_q4_0(values: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Blocks of 32 numbers as Q4_0: byte i holds code i below and code i + 16 above."""
    data, found = b"", []
    for block in values.reshape(-1, 32):
        scale = np.float16(np.abs(block).max() / 7)
        codes = [int(code) + 8 for code in np.clip(np.round(block / np.float64(scale)), -8, 7)]
        data += scale.tobytes() + bytes(codes[at] | codes[at + 16] << 4 for at in range(16))
        found += [float(scale) * (code - 8) for code in codes]
    return data, np.array(found).reshape(values.shape)


PACKS = {gguf_files.Q8_0: pack_q8_0, gguf_files.Q4_0: pack_q4_0}
WIDE = support.Shape(hidden=32, inner=64, heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("kind", list(PACKS))
def test_quantised_matrices_become_the_numbers_they_stand_for(kind: int, tmp_path: Path) -> None:
    arrays, stored, meant = support.body_arrays(WIDE), {}, {}
    for name, array in arrays.items():
        data, meant[name] = PACKS[kind](array) if array.ndim > 1 else (array.tobytes(), array)
        stored[gguf_files.stored_name(name)] = (array.shape, kind if array.ndim > 1 else gguf_files.F32, data)
    path = gguf_files.write(tmp_path / "draft.gguf", gguf_files.metadata(WIDE), stored)
    target = support.make_target(tmp_path / "target", WIDE)
    args = ("convert", path, tmp_path / "out", "--to", "native", "--target", target)
    assert (invoke(*args).error_id, (tmp_path / "out").exists()) == ("quantised-weights", False)
    report = validate_draft(ValidationPlan(draft=path, target=target, target_reference=str(target), level="weights"))
    assert [item.id for item in report.findings if item.severity == "error"] == []
    assert invoke(*args, "--dequantize", "--verify", "logits").code == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in meant.items():
        kept = torch.from_numpy(np.asarray(values, dtype=np.float64))
        assert torch.equal(written[name], kept.to(torch.float32).to(written[name].dtype)), name
    assert {item.dtype for item in written.values() if item.dim() > 1} == {torch.bfloat16}
    assert open_draft(tmp_path / "out").config.dtype == "bfloat16"
    again = convert(path, tmp_path / "again", "gguf")  # to GGUF, blocks are copied as they are
    assert contents(read_gguf(again / "draft.gguf")) == contents(read_gguf(path))


def test_a_type_that_only_the_package_gguf_unpacks_is_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    name, shape = gguf_files.stored_name("fc.weight"), replace(WIDE, hidden=256, taps=(0,))
    stored = gguf_files.tensors(support.body_arrays(shape))
    stored[name] = ((256, 256), gguf_files.Q4_K, bytes(256 * 144))
    path = gguf_files.write(tmp_path / "draft.gguf", gguf_files.metadata(shape), stored)
    inspected = invoke("inspect", path, "--json")
    assert (inspected.code, json.loads(inspected.out)["dtypes"]) == (0, {"F32": 24, "Q4_K": 1})
    outcome = invoke("convert", path, tmp_path / "out", "--to", "native", "--dequantize")
    assert outcome.error_id == "type-needs-gguf"


def test_the_tokenizer_of_the_target_is_copied_byte_for_byte(tmp_path: Path) -> None:
    model = gguf_files.write(
        tmp_path / "target.gguf",
        {**gguf_files.metadata(tokenizer__ggml__merges=["a b", "c d"]), "general.architecture": "qwen3"},
        {},
    )
    source = support.make_native(tmp_path / "source")
    bare = invoke("convert", source, tmp_path / "bare", "--to", "gguf")
    assert (bare.code, "no-tokenizer" in bare.notices) == (0, True)
    out = convert(source, tmp_path / "out", "gguf", "--tokenizer", model)
    expected, found = entries(read_gguf(model)), entries(read_gguf(out / "draft.gguf"))
    tokenizer = {name: entry for name, entry in expected.items() if name.startswith("tokenizer.")}
    assert len(tokenizer) == 4
    assert {name: found.get(name) for name in tokenizer} == tokenizer
    assert validate_draft(ValidationPlan(draft=out)).findings == ()
    again = convert(out, tmp_path / "again", "gguf")  # a copy keeps the tokenizer
    assert entries(read_gguf(again / "draft.gguf")) == found


@pytest.mark.parametrize(
    ("tokens", "to", "id"),
    [
        (31, "gguf", "tokenizer-of-other-size"),
        (None, "gguf", "tokenizer-not-gguf"),
        (32, "native", "tokenizer-not-written"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tokens: int | None, to: str, id: str, tmp_path: Path) -> None:
    model = tmp_path / "target.gguf"
    model.write_bytes(b"not GGUF")
    if tokens is not None:
        gguf_files.write(model, gguf_files.metadata(support.Shape(vocab=tokens)), {})
    source = support.make_native(tmp_path / "source")
    outcome = invoke("convert", source, tmp_path / "out", "--to", to, "--tokenizer", model)
    assert (outcome.code, outcome.error_id, outcome.field) == (2, id, "--tokenizer")


def test_a_size_may_be_stated_for_each_layer(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dflash__attention__head_count_kv": [2, 2], "dflash__feed_forward_length": [24, 24]}
    per_layer = gguf_files.make_gguf(tmp_path / "lists.gguf", **sizes)
    plain = gguf_files.make_gguf(tmp_path / "plain.gguf", dflash__logit_scale=1.0)
    assert differing_fields(open_draft(plain).config, open_draft(per_layer).config) == []
    for path in (plain, per_layer):
        assert validate_draft(ValidationPlan(draft=path)).findings == ()


def test_llama_cpp_stops_at_a_missing_tensor(tmp_path: Path) -> None:
    stored = gguf_files.tensors()
    del stored["blk.1.attn_v.weight"]
    path = gguf_files.write(tmp_path / "draft.gguf", gguf_files.metadata(), stored)
    outcome = invoke("validate", path, "--engine", "llama.cpp", "--json")
    found = {item["id"] for item in json.loads(outcome.out)["findings"]}
    assert {"N01", "S32"} <= found


@pytest.mark.parametrize("is_folder", [False, True])
def test_llama_cpp_serves_the_file_without_a_conversion(is_folder: bool, tmp_path: Path) -> None:
    path = gguf_files.make_gguf(tmp_path / "draft.gguf")
    target = support.make_target(tmp_path / "target")
    draft = tmp_path / "draft" if is_folder else path
    if is_folder:
        draft.mkdir()
        path = path.rename(draft / path.name)
    outcome = invoke("serve-command", draft, "--target", target, "--engine", "llama.cpp")
    assert outcome.code == 0, outcome.err
    assert f"llama-server -m target.gguf -md {path} --spec-type draft-dflash --spec-draft-n-max 3" in outcome.out
    assert outcome.out.count("convert_hf_to_gguf.py") == 1


def test_a_gguf_draft_is_not_a_target(tmp_path: Path) -> None:
    draft = gguf_files.make_gguf(tmp_path / "draft.gguf")
    outcome = invoke("validate", "tiny", "--target", draft)
    assert (outcome.code, outcome.error_id) == (5, "draft-as-target")


@pytest.mark.parametrize(
    ("change", "name"),
    [({"dflash__selector_rank": 4}, "gguf-dflash2"), ({"general__architecture": "dspark"}, "gguf-dspark")],
)
def test_other_families_in_gguf_are_refused_by_name(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    path = gguf_files.make_gguf(tmp_path / "draft.gguf", **change)
    outcome = invoke("convert", path, tmp_path / "out", "--to", "native")
    assert (outcome.code, outcome.error_id) == (5, "relative-of-dflash"), outcome.err
    (finding,) = validate_draft(ValidationPlan(draft=path)).findings
    assert (finding.id, validate_draft(ValidationPlan(draft=path)).dialect) == ("C01", name)
