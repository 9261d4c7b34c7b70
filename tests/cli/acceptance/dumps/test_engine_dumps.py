"""Dumps of vLLM and SGLang give the same steps as our own dump. `dflash_testing.engine_dumps` writes their layouts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.acceptance.dumps.dump_format import Dump, open_dump
from dflash_runtime.errors import MISSING, CheckpointError, CheckpointNotFound, UnknownFormat, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.dumps import bundled_rows, dump_to, replayed, request_for
from dflash_testing.engine_dumps import save_as_sglang, save_as_vllm
from dflash_testing.refusals import refuses

ROWS, CACHED = "meta_info.hidden_states", "meta_info.cached_tokens"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump without tokens after its answers: engines do not write them."""
    folder = tmp_path_factory.mktemp("own") / "dump"
    return dump_to(folder, bundled_rows(3), SamplingParams(max_new_tokens=24), num_overhang=0)


@pytest.fixture(scope="module")
def responses(own: Dump, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The dump as responses of SGLang, with the ids of its layers."""
    file = tmp_path_factory.mktemp("sglang") / "responses.jsonl"
    return file, save_as_sglang(own, file)


def same_steps(one: Dump, other: Dump) -> None:
    """Require equal texts with equal steps at all anchors."""
    for found, expected in zip(replayed(request_for(one)), replayed(request_for(other)), strict=True):
        assert found.text.token_ids == expected.text.token_ids
        assert len(expected.sampled) > 10
        assert found.sampled == expected.sampled
        assert found.walked == expected.walked


def test_files_of_vllm_give_the_same_steps(own: Dump, tmp_path: Path) -> None:
    ids = save_as_vllm(own, tmp_path / "vllm")
    assert ids == [1, 3, 4, 5]
    dump = open_dump(tmp_path / "vllm", ids)
    assert (dump.format, dump.taps, dump.hidden_size, dump.note) == ("vllm", own.taps, 192, None)
    same_steps(dump, own)


def test_responses_of_sglang_give_the_same_steps(own: Dump, responses: tuple[Path, list[int]]) -> None:
    file, ids = responses
    assert ids == [0, 2, 3, 4]
    dump = open_dump(file, ids)
    assert (dump.format, dump.taps, dump.hidden_size) == ("sglang", own.taps, 192)
    assert dump.texts[1].row.id == "rid-1"
    # The file has float64 numbers as text, and the reader makes them float32.
    for found, expected in zip(dump.texts, own.texts, strict=True):
        assert torch.equal(found.read(), expected.read().float())
    same_steps(dump, own)


def test_prefill_chunks_lose_the_last_rows_and_shift_no_row(own: Dump, tmp_path: Path) -> None:
    ids = save_as_sglang(own, tmp_path / "responses.jsonl", chunk_len=5)
    dump = open_dump(tmp_path / "responses.jsonl", ids)
    for text, whole in zip(dump.texts, own.texts, strict=True):
        num_chunks = -(-whole.prompt_len // 5)
        assert text.num_rows == whole.num_rows - (num_chunks - 1)
        assert torch.equal(text.read(), whole.read()[: text.num_rows].float())
    for found, expected in zip(replayed(request_for(dump)), replayed(request_for(own)), strict=True):
        text = found.text
        known = [step for step in expected.sampled if text.prompt_len + step.start - 1 <= text.num_rows]
        assert 0 < len(known) < len(expected.sampled)
        assert list(found.sampled) == known


def test_without_vllms_responses_prompts_are_judged_too_with_a_notice(own: Dump, tmp_path: Path) -> None:
    ids = save_as_vllm(own, tmp_path / "vllm", responses=False)
    dump = open_dump(tmp_path / "vllm", ids)
    assert isinstance(dump.note, Notice)
    assert dump.note.id == "prompts-judged"
    for text, whole in zip(dump.texts, own.texts, strict=True):
        assert (text.prompt_len, text.num_rows) == (1, whole.num_rows)
        assert text.token_ids == whole.token_ids[:-1]


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the first line of JSON Lines."""
    first, *rest = file.read_text().splitlines()
    line = json.loads(first)
    change(line)
    file.write_text("\n".join([json.dumps(line), *rest]))


@pytest.mark.parametrize(
    ("change", "id", "fields"),
    [
        (lambda line: line.pop("prompt_token_ids"), "not-token-ids", {"field": "prompt_token_ids", "found": MISSING}),
        (lambda line: line.update(output_ids="x"), "not-token-ids", {"field": "output_ids", "found": "x"}),
        (lambda line: line["meta_info"].pop("hidden_states"), "no-hidden-states", {"field": ROWS, "found": MISSING}),
        (lambda line: line["meta_info"].update(cached_tokens=3), "cached-tokens", {"field": CACHED, "found": 3}),
        (lambda line: line["meta_info"]["hidden_states"].pop(0), "wrong-number-of-rows", {"field": ROWS, "found": 23}),
        (lambda line: line["meta_info"]["hidden_states"][2].pop(), "ragged-rows", {"field": ROWS}),
    ],
)
def test_a_malformed_response_is_refused_with_its_line_and_field(
    change: Callable[[dict[str, Any]], object],
    id: str,
    fields: dict[str, Any],
    responses: tuple[Path, list[int]],
    tmp_path: Path,
) -> None:
    file, ids = Path(shutil.copy(responses[0], tmp_path)), responses[1]
    edit(file, change)
    with refuses(CheckpointError, id, path=f"{file}:1", **fields):
        open_dump(file, ids)


def test_a_cut_off_file_of_responses_is_refused_with_its_line(own: Dump, tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    ids = save_as_sglang(own, file)
    file.write_bytes(file.read_bytes()[:-20])
    with refuses(CheckpointError, "invalid-json", path=f"{file}:3"):
        open_dump(file, ids)


def shift(file: Path) -> None:
    """Replace the first token by another than the response's."""
    tensors = load_file(file)
    tensors["token_ids"][0] += 1
    save_file(tensors, file)


def flatten(file: Path) -> None:
    tensors = load_file(file)
    save_file(tensors | {"hidden_states": tensors["hidden_states"].flatten(1)}, file)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shift, {"id": "response-differs", "field": "token_ids"}),
        (flatten, {"id": "wrong-tensor", "field": "hidden_states"}),
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), {"path": "cmpl-0-0.safetensors"}),
        (lambda file: file.rename(file.with_name("a.safetensors")), {"id": "missing-response"}),
    ],
)
def test_a_malformed_file_is_refused_with_its_field(
    change: Callable[[Path], object], expected: dict[str, Any], own: Dump, tmp_path: Path
) -> None:
    ids = save_as_vllm(own, tmp_path / "vllm")
    change(tmp_path / "vllm" / "cmpl-0-0.safetensors")
    name = expected.pop("path", None)
    with refuses(CheckpointError, **expected) as caught:
        open_dump(tmp_path / "vllm", ids)
    assert name in (None, Path(str(caught.value.path)).name)


def test_layer_ids_are_required_in_the_right_number(own: Dump, tmp_path: Path) -> None:
    ids = save_as_vllm(own, tmp_path / "vllm")
    save_as_sglang(own, tmp_path / "responses.jsonl")
    for path in (tmp_path / "vllm", tmp_path / "responses.jsonl"):
        with refuses(UsageError, "dump-layer-ids-missing", field="--dump-layer-ids", found=MISSING):
            open_dump(path)
    with refuses(CheckpointError, "wrong-shape", field="hidden_states") as caught:
        open_dump(tmp_path / "vllm", ids[1:])
    assert caught.value.found[1:] == [4, 192]
    assert str(caught.value.expected).endswith(", 3, 192]")
    with refuses(CheckpointError, "wrong-width", field=ROWS, found=768):
        open_dump(tmp_path / "responses.jsonl", [0, 1, 2, 3, 4])
    with refuses(UsageError, "dump-layer-ids-stated", field="--dump-layer-ids", found=ids):
        open_dump(own.path, ids)
    (tmp_path / "empty").mkdir()
    with refuses(UnknownFormat, "unknown-dump-format", path=tmp_path / "empty"):
        open_dump(tmp_path / "empty")
    with refuses(CheckpointNotFound, "dump-not-found", path=tmp_path / "absent"):
        open_dump(tmp_path / "absent")


def test_token_ids_outside_the_vocabulary_are_refused(own: Dump, tmp_path: Path) -> None:
    ids = save_as_vllm(own, tmp_path / "vllm", responses=False)
    dump = open_dump(tmp_path / "vllm", ids)
    text = replace(dump.texts[0], token_ids=(*dump.texts[0].token_ids[:-1], 2048))
    with refuses(CheckpointError, "token-outside-vocabulary", field="token_ids", found=2048):
        replayed(request_for(replace(dump, texts=(text,))))
