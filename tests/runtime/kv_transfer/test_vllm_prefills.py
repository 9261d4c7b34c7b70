"""Prefills of vLLM: every form its connector has, and what is refused, on files written as its code writes them."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_runtime.errors import DFlashError, HandoffMismatch, InvalidHandoff, PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff, find_problems
from dflash_runtime.kv_transfer.vllm_prefills import find_vllm_prefills, has_vllm_prefills
from dflash_testing.engine_kv import layer_name, save_as_vllm

PROMPT = tuple(range(100, 141))
"""41 tokens: two blocks of 16, and 9 tokens that are not saved."""

HEADS, DRAFT_HEADS = [[2, 4], [2, 4], [1, 6]], [[4, 2], [4, 2]]
NUM_LAYERS = len(HEADS) + len(DRAFT_HEADS)


def pair(**changes: object) -> Fingerprint:
    """The fingerprint of a pair whose layers differ in width, in pages of 10 rows."""
    fields = {
        "target KV heads": HEADS,
        "target runtime": "pages",
        "draft KV heads": DRAFT_HEADS,
        "dtype": "float32",
        "page_size": 10,
    }
    return Fingerprint({**fields, **changes})


def layers(*numbers: int) -> dict[str, Tensor]:
    """Random rows of all the pair's layers, or of these."""
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


def test_a_pair_without_a_draft_leaves_the_drafts_layers_alone(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    here = Fingerprint({name: value for name, value in pair().fields.items() if name != "draft KV heads"})
    assert set(load(tmp_path, here).tensors) == {TARGET_PAGES}


def test_a_prompt_gets_the_longest_of_its_beginnings(tmp_path: Path) -> None:
    """Another one's beginning with the same tokens too, whatever blocks its server had."""
    for num_tokens, block_size in ((17, 16), (38, 7), (41, 16)):
        save_as_vllm(layers(), PROMPT[:num_tokens], tmp_path, block_size=block_size)
    assert load(tmp_path).kv_len == 35


def test_the_last_token_is_always_left_to_run(tmp_path: Path) -> None:
    save_as_vllm({name: rows.repeat(2, 1, 1, 1) for name, rows in layers().items()}, (*PROMPT, 1), tmp_path,
                 block_size=41)  # fmt: skip
    assert load(tmp_path).kv_len == 40


def test_a_beginning_is_one_after_it_was_sent_on(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    handoff = load(tmp_path)
    header = handoff.to_header()
    again = Handoff.read(header, handoff.tensors)
    assert again.is_beginning
    assert again.kv_len == 32
    for wrong in ({"target": -1}, {"target": "32"}, [32]):
        with pytest.raises(InvalidHandoff, match="num_rows"):
            Handoff.read({**header, "num_rows": wrong}, handoff.tensors)


def test_names_by_sha256_are_known(tmp_path: Path) -> None:
    """utils/hashing.py: what names folders where FIPS forbids MD5."""
    folder = save_as_vllm(layers(), PROMPT, tmp_path)
    folder.rename(tmp_path / hashlib.sha256(torch.tensor(PROMPT[:32]).numpy().tobytes()).hexdigest())
    assert load(tmp_path).kv_len == 32


def test_rows_that_were_not_written_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The draft one step behind, as where a prompt is saved before the drafter has run."""
    behind = layers()
    for number in (3, 4):
        behind[layer_name(number)][25:] = 0
    save_as_vllm(behind, PROMPT, tmp_path)
    assert load(tmp_path).kv_len == 25
    assert "25 of 32 rows are in every layer; the rest is run here" in caplog.text


def halve_heads(rows: Tensor) -> Tensor:
    return rows[:, :, : rows.shape[2] // 2]


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str, str]] = {
    "no draft layers": (
        lambda _: layers(0, 1, 2),
        "there are files of layers 0 to 2; the draft's layers 3 to 4 are missing",
        "vllm-project/vllm#35158",
    ),
    "one draft layer missing": (
        lambda _: layers(0, 1, 2, 4),
        "there are files of layers 0 to 2, 4; the draft's layers 3 are missing",
        "--enforce-eager",
    ),
    "a target's layer missing": (lambda _: layers(0, 2, 3, 4), "the target's layers 1 are missing", ""),
    "a draft with more layers": (
        lambda found: found | {layer_name(5): found[layer_name(4)]},
        "layers 5 are of another draft",
        "",
    ),
    "saved before the drafter wrote": (
        lambda found: found | {layer_name(4): torch.zeros_like(found[layer_name(4)])},
        "no row of the draft's layers was written when vLLM saved them (vllm-project/vllm#35158)",
        "vllm-project/vllm#35158",
    ),
    "a part of two": (
        lambda found: {name: halve_heads(rows) if rows.shape[2] > 1 else rows for name, rows in found.items()},
        "model.layers.0.self_attn.attn.safetensors: kv_cache: shape [32, 1, 8] has 1 of 2 KV heads: with tensor parall",
        "--tensor-parallel-size 1",
    ),
    "another head size": (
        lambda found: {name: rows.repeat(1, 1, 1, 2) for name, rows in found.items()},
        "shape [32, 2, 16], expected [rows, 2, 8] or [rows, 2, 2, 4]",
        "",
    ),
    "fp8": (
        lambda found: {name: rows.to(torch.uint8) for name, rows in found.items()},
        "quantised (uint8), and its scales are not in the files",
        "--kv-cache-dtype auto",
    ),
    "another dtype": (
        lambda found: {name: rows.bfloat16() for name, rows in found.items()},
        "found bfloat16, this engine runs float32",
        "--dtype bfloat16",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_gone_on_from_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message, hint = WRONG[case]
    folder = save_as_vllm(change(layers()), PROMPT, tmp_path)
    with pytest.raises(HandoffMismatch) as raised:
        load(tmp_path)
    assert message in raised.value.message
    assert str(folder) in raised.value.message
    assert hint in (raised.value.hint or "")


def test_what_does_not_fit_is_known_from_headers(tmp_path: Path) -> None:
    """Before a row is read, or anything generated."""
    save_as_vllm(layers(0, 1, 2), PROMPT, tmp_path)
    with pytest.raises(HandoffMismatch, match="the draft's layers 3 to 4 are missing"):
        find_vllm_prefills(tmp_path, [PROMPT], pair())


def test_a_prompt_that_vllm_ran_in_several_steps_is_refused(tmp_path: Path) -> None:
    """The connector saves in the step in which a prompt is scheduled first, under the name of all its blocks."""
    save_as_vllm(layers(), PROMPT, tmp_path, num_scheduled=10)
    with pytest.raises(HandoffMismatch, match="16 rows, of 32 tokens by the folder's name") as raised:
        load(tmp_path)
    assert "--max-num-batched-tokens" in (raised.value.hint or "")


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    """extract_kv_from_layer: [rows, C] for MLA."""
    folder = save_as_vllm(layers(), PROMPT, tmp_path)
    rewrite(folder, lambda rows: rows.flatten(1))
    with pytest.raises(HandoffMismatch, match=r"shape \[32, 16\] is that of latent attention"):
        load(tmp_path)


def rewrite(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    for file in folder.iterdir():
        save_file({"kv_cache": change(load_file(file)["kv_cache"])}, file)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = save_as_vllm(layers(), PROMPT, tmp_path) / f"{layer_name(1)}.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InvalidHandoff, match=r"model\.layers\.1\..*cut short"):
        load(tmp_path)
    save_file({"hidden_states": torch.zeros(32, 2, 8)}, file)
    with pytest.raises(InvalidHandoff, match="does not contain tensor kv_cache"):
        load(tmp_path)


def test_two_files_of_one_layer_are_refused(tmp_path: Path) -> None:
    folder = save_as_vllm(layers(), PROMPT, tmp_path)
    (folder / "draft.layers.1.self_attn.attn.safetensors").write_bytes(b"")
    with pytest.raises(InvalidHandoff, match="are of one layer"):
        load(tmp_path)


def test_prompts_are_known_by_their_hash(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    with pytest.raises(UsageError, match="1 prefills by vLLM, none of them of the 1 prompts given"):
        find_vllm_prefills(tmp_path, [PROMPT[1:]], pair())
    keys, connector = find_vllm_prefills(tmp_path, [PROMPT[1:], PROMPT], pair())
    assert list(connector.prefills) == [keys[1]]
    with pytest.raises(PeerUnreachable):
        connector.load(keys[0]).result()
    with pytest.raises(UsageError, match="only read"):
        connector.save(connector.load(keys[1]).result())
    connector.close()


def test_such_folders_are_recognised(tmp_path: Path) -> None:
    assert not has_vllm_prefills(tmp_path)
    assert not has_vllm_prefills(tmp_path / "none")
    save_as_vllm(layers(), PROMPT, tmp_path / "there")
    assert has_vllm_prefills(tmp_path / "there")
    assert not has_vllm_prefills(tmp_path)


def test_a_target_with_its_own_cache_is_refused(tmp_path: Path) -> None:
    save_as_vllm(layers(), PROMPT, tmp_path)
    with pytest.raises(DFlashError, match="keeps its own cache") as raised:
        find_vllm_prefills(tmp_path, [PROMPT], pair(**{"target runtime": "own cache"}))
    assert raised.value.exit_code == 5
