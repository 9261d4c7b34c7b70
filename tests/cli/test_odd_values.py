"""Odd values of options, and odd rows of prompts: the error names the option or the field, and the value."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.command_line import run_main

EMPTY: dict[str, tuple[str, ...]] = {
    "--output": ("generate", "x", "-o", ""),
    "--gate-out": ("eval-acceptance", "tiny", "--min-acceptance", "1", "--gate-out", ""),
    "--prompts": ("diagnose", "tiny", "-p", ""),
    "--prefix-store": ("generate", "x", "--prefix-store", ""),
    "--handoff-out": ("generate", "x", "--handoff-out", ""),
    "--tools": ("generate", "x", "--tools", ""),
    "--lock": ("validate", "tiny", "--lock", ""),
    "--step-times": ("tune", "tiny", "--step-times", ""),
    "--tokenizer": ("convert", "tiny", "out", "--to", "gguf", "--tokenizer", ""),
    "--fix-out": ("validate", "tiny", "--fix-out", ""),
    "DST": ("convert", "tiny", "", "--to", "native"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("field", EMPTY)
def test_an_empty_path_is_no_folder(field: str) -> None:
    """`Path("")` is the working directory."""
    done = run_main(*EMPTY[field])
    assert (done.code, done.field) == (2, field), done
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("place", [".", "folder", "/"])
def test_a_gate_is_written_to_a_file(place: str) -> None:
    Path("folder").mkdir()
    done = run_main("eval-acceptance", "tiny", "--min-acceptance", "1", "--gate-out", place)
    assert (done.code, done.error_id) == (2, "output-is-directory"), done


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31m"])
def test_a_target_has_a_name_of_one_line(name: str) -> None:
    done = run_main("convert", "tiny", "out", "--to", "speculators", "--target-name", name)
    assert (done.code, done.field) == (2, "--target-name"), done
    assert not Path("out").exists()


KINDS: list[tuple[Any, str]] = [
    (None, "null"),
    ("a", "string"),
    (3, "number"),
    (1.5, "number"),
    (True, "boolean"),
    ([], "list"),
]


@pytest.mark.parametrize(("value", "kind"), KINDS)
def test_json_has_names_of_its_own(value: Any, kind: str) -> None:
    Path("rows.jsonl").write_text(json.dumps(value) + "\n")
    done = run_main("generate", "-p", "rows.jsonl")
    assert done.code == 2, done
    assert f"rows.jsonl:1: found a JSON {kind}, expected an object" in done.err


@pytest.mark.parametrize("field", ["prompt", "messages", "turns", "prompt_token_ids"])
def test_a_field_that_is_null_is_named(field: str) -> None:
    Path("rows.jsonl").write_text(json.dumps({field: None}) + "\n")
    done = run_main("generate", "-p", "rows.jsonl")
    assert (done.code, done.field) == (2, field), done
    assert f"{field}: found null, expected a" in done.err


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"producer": 1, "quantization": "x"}'])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_malformed_file_of_model_optimizer(engine: str, text: str) -> None:
    source = support.make_native(Path("source"))
    (source / "hf_quant_config.json").write_text(text)
    done = run_main("validate", source, "--engine", engine)
    assert done.code in (0, 3), done


@pytest.mark.parametrize("block", [[0, 128], [128, 0], [-1, 128]])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_block_without_rows_or_columns(engine: str, block: list[int]) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    source = support.make_native(Path("source"), quantization_config=settings)
    done = run_main("validate", source, "--engine", engine)
    assert done.code == 3, done
    assert "S32" in done.out
