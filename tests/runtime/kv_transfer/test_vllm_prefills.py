"""Prefills of vLLM: every file format of its connector, and wrong files. A helper writes files as vLLM's code does."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_runtime.documents import to_json
from dflash_runtime.errors import HandoffMismatch, InvalidHandoff, PeerUnreachable, UnsupportedError, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff, HandoffHeader, find_problems
from dflash_runtime.kv_transfer.handoff_folders import has_vllm_prefills
from dflash_runtime.kv_transfer.vllm_prefills import find_vllm_prefills
from dflash_testing.deadline import deadline
from dflash_testing.engine_kv import layer_name, save_as_vllm
from dflash_testing.irregular_files import IRREGULAR, make_irregular
from dflash_testing.refusals import refuses

PROMPT = tuple(range(100, 141))
"""41 tokens: two blocks of 16 are saved, and 9 tokens are not."""

HEADS, DRAFT_HEADS = [[2, 4], [2, 4], [1, 6]], [[4, 2], [4, 2]]
NUM_LAYERS = len(HEADS) + len(DRAFT_HEADS)


def pair(**changes: object) -> Fingerprint:
    """The fingerprint of a pair with layers of different widths and a page size of 10."""
    fields = {
        "target KV heads": HEADS,
        "target runtime": "pages",
        "draft KV heads": DRAFT_HEADS,
        "dtype": "float32",
        "KV dtype": "float32",
        "page_size": 10,
    }
    return Fingerprint({**fields, **changes})


def layers(*numbers: int) -> dict[str, Tensor]:
    """Random rows of the given layers, by default all layers of the pair."""
    generator = torch.Generator().manual_seed(0)
    shapes = [*HEADS, *DRAFT_HEADS]
    rows = [torch.randn(len(PROMPT), 2, *heads, generator=generator) for heads in shapes]
    return {layer_name(number): rows[number] for number in (numbers or range(NUM_LAYERS))}


def load(folder: Path, here: Fingerprint | None = None) -> Handoff:
    keys, connector = find_vllm_prefills(folder, [PROMPT], here or pair())
    try:
        return connector.load(keys[0]).result()
    finally:
        connector.close()


@pytest.mark.parametrize("release", ["0.33", "0.24"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_of_every_layer_come_in_pages(tmp_path: Path, release: str, layout: str) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path, release=release, layout=layout)
    handoff = load(tmp_path)
    assert handoff.is_beginning
    assert handoff.kv_len == 32
    assert handoff.prompt_token_ids == PROMPT
    shapes = {TARGET_PAGES: (4, 3, 2, 10, 8), DRAFT_PAGES: (4, 2, 2, 10, 8)}
    assert find_problems(handoff, pair(), shapes) == []
    for number, rows in enumerate(layers().values()):
        name, index = (TARGET_PAGES, number) if number < len(HEADS) else (DRAFT_PAGES, number - len(HEADS))
        found = handoff.tensors[name][:, index].transpose(1, 2).flatten(0, 1)
        width = rows.shape[2] * rows.shape[3]
        assert torch.equal(found[:32, :, :width], rows[:32].flatten(2))
        assert not found[32:].any()
        assert not found[:, :, width:].any()


def test_a_pair_without_a_draft_ignores_the_files_of_a_draft(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    here = Fingerprint({name: value for name, value in pair().fields.items() if name != "draft KV heads"})
    assert set(load(tmp_path, here).tensors) == {TARGET_PAGES}


def test_a_prompt_gets_its_longest_stored_prefix(tmp_path: Path) -> None:
    """The prefix may come from another prompt, and from a server with any block size."""
    for num_tokens, block_size in ((17, 16), (38, 7), (41, 16)):
        save_as_vllm(layers(), PROMPT[:num_tokens], tmp_path, block_size=block_size)
    assert load(tmp_path).kv_len == 35


def test_the_last_token_always_runs_here(tmp_path: Path) -> None:
    save_as_vllm({name: rows.repeat(2, 1, 1, 1) for name, rows in layers().items()}, (*PROMPT, 1), tmp_path,
                 block_size=41)  # fmt: skip
    assert load(tmp_path).kv_len == 40


def test_a_loaded_prefix_survives_its_header(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    handoff = load(tmp_path)
    header = to_json(handoff.header.sealed)
    again = HandoffHeader.read(header).handoff
    assert again.is_beginning
    assert again.kv_len == 32
    for wrong, field in (
        ({"target": -1}, "num_rows.target"),
        ({"target": "32"}, "num_rows.target"),
        ([32], "num_rows"),
    ):
        with refuses(InvalidHandoff, "wrong-value", field=field):
            HandoffHeader.read({**header, "num_rows": wrong})


def test_folders_named_by_sha256_are_found(tmp_path: Path) -> None:
    """vLLM uses sha256 where FIPS forbids MD5 (utils/hashing.py)."""
    folder = save_as_vllm(layers(), PROMPT, tmp_path)
    folder.rename(tmp_path / hashlib.sha256(torch.tensor(PROMPT[:32]).numpy().tobytes()).hexdigest())
    assert load(tmp_path).kv_len == 32


def test_unwritten_rows_are_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The draft's rows end early, as when vLLM saves a prompt before the drafter has run."""
    behind = layers()
    for number in (3, 4):
        behind[layer_name(number)][25:] = 0
    folder = save_as_vllm(behind, PROMPT, tmp_path)
    assert load(tmp_path).kv_len == 25
    (record,) = caplog.records
    assert (record.levelname, record.args) == ("WARNING", (folder, 25, 32))


def halve_heads(rows: Tensor) -> Tensor:
    return rows[:, :, : rows.shape[2] // 2]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A change of the layers, and the refusal that it causes: the error's id, found value and part of the hint."""

    change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    id: str
    found: object
    hint: str = ""
    layer: int | None = None  # the error's path is this layer's file, by default the prompt's folder


WRONG = {
    "no draft layers": Wrong(
        change=lambda _: layers(0, 1, 2), id="draft-layers-missing", found=[3, 4], hint="vllm-project/vllm#35158"
    ),
    "one draft layer missing": Wrong(
        change=lambda _: layers(0, 1, 2, 4), id="draft-layers-missing", found=[3], hint="--enforce-eager"
    ),
    "a target layer missing": Wrong(change=lambda _: layers(0, 2, 3, 4), id="target-layers-missing", found=[1]),
    "a draft with more layers": Wrong(
        change=lambda found: found | {layer_name(5): found[layer_name(4)]}, id="layers-of-another-draft", found=[5]
    ),
    "saved before the drafter wrote": Wrong(
        change=lambda found: found | {layer_name(4): torch.zeros_like(found[layer_name(4)])},
        id="no-rows-written", found=0, hint="vllm-project/vllm#35158",
    ),
    "one of two workers": Wrong(
        change=lambda found: {name: halve_heads(rows) if rows.shape[2] > 1 else rows for name, rows in found.items()},
        id="tensor-parallel-kv", found=[32, 1, 8], hint="--tensor-parallel-size 1", layer=0,
    ),
    "another head size": Wrong(
        change=lambda found: {name: rows.repeat(1, 1, 1, 2) for name, rows in found.items()},
        id="shape-differs", found=[32, 2, 16], layer=0,
    ),
    "fp8": Wrong(
        change=lambda found: {name: rows.to(torch.uint8) for name, rows in found.items()},
        id="quantised-kv", found="uint8", hint="--kv-cache-dtype auto", layer=0,
    ),
    "another dtype": Wrong(
        change=lambda found: {name: rows.bfloat16() for name, rows in found.items()},
        id="dtype-differs", found="bfloat16", hint="--dtype bfloat16", layer=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_files_of_another_pair_or_prefill_are_refused(tmp_path: Path, case: str) -> None:
    wrong = WRONG[case]
    folder = save_as_vllm(wrong.change(layers()), PROMPT, tmp_path)
    path = folder if wrong.layer is None else folder / f"{layer_name(wrong.layer)}.safetensors"
    with refuses(HandoffMismatch, wrong.id, path=path, found=wrong.found) as caught:
        load(tmp_path)
    assert wrong.hint in (caught.value.hint or "")


def test_an_error_names_the_numbers_of_layers_and_the_expected_shapes(tmp_path: Path) -> None:
    save_as_vllm(WRONG["one draft layer missing"].change(layers()), PROMPT, tmp_path / "missing")
    with refuses(HandoffMismatch, "draft-layers-missing") as caught:
        load(tmp_path / "missing")
    assert re.findall(r"\d+", caught.value.message.removeprefix(str(caught.value.path))) == ["0", "2", "4", "3"]
    save_as_vllm(WRONG["another head size"].change(layers()), PROMPT, tmp_path / "shape")
    with refuses(HandoffMismatch, "shape-differs", expected="[rows, 2, 8] or [rows, 2, 2, 4]"):
        load(tmp_path / "shape")


def test_missing_layers_are_found_from_headers(tmp_path: Path) -> None:
    """The check comes before any row is read or any token generated."""
    save_as_vllm(layers(0, 1, 2), PROMPT, tmp_path)
    with refuses(HandoffMismatch, "draft-layers-missing", found=[3, 4]):
        find_vllm_prefills(tmp_path, [PROMPT], pair())


def test_a_prompt_that_vllm_ran_in_several_steps_is_refused(tmp_path: Path) -> None:
    """vLLM saves only the rows of the prompt's first step, but names the folder by all its blocks."""
    save_as_vllm(layers(), PROMPT, tmp_path, num_scheduled=10)
    with refuses(HandoffMismatch, "too-few-rows", found=16, expected="32 rows") as caught:
        load(tmp_path)
    assert "--max-num-batched-tokens" in (caught.value.hint or "")


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    """For MLA vLLM saves one vector per row: [rows, C] (extract_kv_from_layer)."""
    folder = save_as_vllm(layers(), PROMPT, tmp_path)
    rewrite(folder, lambda rows: rows.flatten(1))
    with refuses(HandoffMismatch, "latent-attention-kv", found=[32, 16]):
        load(tmp_path)


def rewrite(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    for file in folder.iterdir():
        save_file({"kv_cache": change(load_file(file)["kv_cache"])}, file)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = save_as_vllm(layers(), PROMPT, tmp_path) / f"{layer_name(1)}.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with refuses(InvalidHandoff, "unreadable-tensor", path=file, field="kv_cache"):
        load(tmp_path)
    save_file({"hidden_states": torch.zeros(32, 2, 8)}, file)
    with refuses(InvalidHandoff, "unreadable-tensor", path=file, field="kv_cache"):
        load(tmp_path)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    file = save_as_vllm(layers(), PROMPT, tmp_path) / f"{layer_name(1)}.safetensors"
    make_irregular(file, kind)
    with deadline(10), refuses(InvalidHandoff, "unreadable-tensor", path=file, field="kv_cache"):
        load(tmp_path)


def test_two_files_of_one_layer_are_refused(tmp_path: Path) -> None:
    folder = save_as_vllm(layers(), PROMPT, tmp_path)
    (folder / "draft.layers.1.self_attn.attn.safetensors").write_bytes(b"")
    with refuses(InvalidHandoff, "two-files-of-a-layer", path=folder, found=1):
        load(tmp_path)


def test_prompts_are_known_by_their_hash(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    with refuses(UsageError, "no-prompt-prefilled", path=tmp_path, field="prompts", found=1):
        find_vllm_prefills(tmp_path, [PROMPT[1:]], pair())
    keys, connector = find_vllm_prefills(tmp_path, [PROMPT[1:], PROMPT], pair())
    assert list(connector.prefills) == [keys[1]]
    with refuses(PeerUnreachable, "not-prefilled", found=keys[0]):
        connector.load(keys[0]).result()
    with refuses(UsageError, "vllm-prefills-only-load"):
        connector.save(connector.load(keys[1]).result())
    connector.close()


def test_folders_of_vllm_are_recognised(tmp_path: Path) -> None:
    assert not has_vllm_prefills(tmp_path)
    assert not has_vllm_prefills(tmp_path / "none")
    save_as_vllm(layers(), PROMPT, tmp_path / "there")
    assert has_vllm_prefills(tmp_path / "there")
    assert not has_vllm_prefills(tmp_path)


def test_a_target_with_its_own_cache_is_refused(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    with refuses(UnsupportedError, "own-cache-target", path=tmp_path):
        find_vllm_prefills(tmp_path, [PROMPT], pair(**{"target runtime": "own cache"}))


def test_pages_in_fp8_are_not_filled_from_files(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    with refuses(UnsupportedError, "prefills-into-fp8-pages", path=tmp_path, field="--kv-dtype", found="fp8"):
        find_vllm_prefills(tmp_path, [PROMPT], pair(**{"KV dtype": "float8_e4m3fn"}))
