"""The bundled DFlash 2 and DSpark drafts, and the forward that trained them (`examples/tiny_pair`)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair.bundle import save_native_draft
from tiny_pair.data import Prompt
from tiny_pair.draft import Head
from tiny_pair.evaluate import Judge, write_passages
from tiny_pair.further import Bundle, begin_draft
from tiny_pair.further_report import FURTHER, read_draft
from tiny_pair.settings import Settings

from dflash_cli.checkpoints.references import BUNDLED_DRAFTS, tiny_directory
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import bundled_draft, bundled_draft_model, bundled_llm, bundled_prompts

NEW_TOKENS = 40
MOST_BYTES = 4_000_000
STATED: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 16},
    "dspark": {"markov_rank": 64, "markov_head_type": "vanilla", "sample_from_anchor": True},
}


@cache
def found() -> Bundle:
    return Bundle.read(Path(tiny_directory()), torch.device("cpu"))


@pytest.mark.parametrize("kind", FURTHER)
def test_the_runtime_drafts_what_the_training_drafts(kind: str) -> None:
    """Every step of a text accepts the same number of draft tokens in both."""
    trained, ids = read_draft(kind, tiny_directory() / FURTHER[kind], Settings(), found()), bundled_prompts()[0]
    target = found().target
    passages = write_passages(target, [Prompt("", "", "", "", ids)], NEW_TOKENS, 0.0, -1)
    steps = Judge(trained, Head.full(target.model.embed_tokens.weight), target, Settings()).steps(passages)
    llm = bundled_llm(bundled_draft_model(f"tiny:{kind}"), trained.num_draft_tokens)
    (output,) = llm.generate([list(ids)], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    wanted = [step.accepted + 1 for step in steps]
    assert list(output.token_ids) == list(passages[0].token_ids[passages[0].start :])
    assert list(output.acceptance_lengths[: len(wanted)]) == wanted
    assert sum(wanted) > 1.5 * len(wanted)


def test_a_kind_begins_with_the_drafts_of_the_bundled_draft() -> None:
    ids = torch.tensor([bundled_prompts()[0][:40]])
    anchors, features = torch.tensor([[12, 30]]), torch.randn(1, 40, 4 * Settings().shape.hidden_size)
    embedding = found().target.model.embed_tokens.weight
    with torch.no_grad():
        rows = [
            begin_draft(kind, Settings(), Settings().draft, found())(features, ids, anchors, embedding)
            for kind in ("dflash", "dflash2", "dspark")
        ]
    assert torch.allclose(rows[0], rows[1], atol=1e-5)
    assert torch.allclose(rows[0], rows[2][:, :, 1:], atol=1e-5)


@pytest.mark.parametrize("kind", FURTHER)
def test_the_bundled_file_is_small_and_states_its_kind(kind: str, tmp_path: Path) -> None:
    folder = tiny_directory() / BUNDLED_DRAFTS[f"tiny:{kind}"]
    stated = json.loads((folder / "config.json").read_text())
    assert STATED[kind].items() <= {**stated, **stated["dflash_config"]}.items()
    assert sum(item.stat().st_size for item in folder.iterdir()) < MOST_BYTES
    assert bundled_draft(f"tiny:{kind}").config.family == kind
    # The training writes the config of the bundled file again.
    trained = read_draft(kind, folder, Settings(), found())
    save_native_draft(trained, Settings(), found().special(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == stated
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_report_states_gains_over_the_bundled_draft_and_over_longer_training() -> None:
    report = json.loads((tiny_directory() / "report.json").read_text())["further"]
    for kind in FURTHER:
        for base in ("against_draft", "against_control"):
            assert report[kind][base]["interval_95"][0] > 0
            assert report[kind][base]["p_value"] < 0.05
