"""The forward that trains DFlash 2 and DSpark drafts (`examples/tiny_pair`) drafts what the runtime drafts.

The parts that a kind adds to DFlash get random weights, so that a part that one side forgets changes the drafts.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair.data import Prompt
from tiny_pair.draft import Draft as TrainedDraft
from tiny_pair.draft import Head
from tiny_pair.evaluate import Judge, write_passages
from tiny_pair.further import Bundle, begin_draft
from tiny_pair.settings import Settings

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config import ConvolutionConfig, DraftConfig, MarkovConfig, SelectorConfig
from dflash_runtime.drafts.draft import Draft, build_draft
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing.pairs import bundled_draft, bundled_llm, bundled_prompts, bundled_target_model, placement

NEW_TOKENS = 48


@cache
def found() -> Bundle:
    return Bundle.read(Path(tiny_directory()), torch.device("cpu"))


def noisy(kind: str) -> TrainedDraft:
    """A draft of a kind with random weights in the added parts."""
    torch.manual_seed(0)
    draft = begin_draft(kind, Settings(), Settings().draft, found())
    draft.requires_grad_(False)
    for name, item in draft.named_parameters():
        if name not in found().draft:
            item.add_(torch.randn_like(item) * 0.02)
    return draft


def config_of(kind: str) -> DraftConfig:
    config = replace(bundled_draft().config, family=kind)
    if kind == "dflash2":
        shape = Settings().draft.selector
        return replace(
            config,
            convolution=ConvolutionConfig(kernel_size=shape.kernel_size, group_size=shape.group_size),
            selector=SelectorConfig(rank=shape.rank, top_k=shape.top_k),
        )
    markov = MarkovConfig(rank=Settings().draft.markov.rank)
    return replace(config, markov=markov, has_confidence=True, sample_from_anchor=True)


def loaded(kind: str, trained: TrainedDraft) -> Draft:
    """The runtime's draft with the same weights."""
    tensors, config = trained.state_dict(), config_of(kind)
    assert {name: tuple(item.shape) for name, item in tensors.items()} == owned_shapes(config)
    return build_draft(config, stack_projections(tensors.items()), bundled_target_model(), placement())


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_runtime_drafts_the_same_tokens(kind: str) -> None:
    trained, prompts = noisy(kind), bundled_prompts()[:2]
    target = found().target
    head = Head.full(target.model.embed_tokens.weight)
    named = [Prompt(str(index), "", "", "", ids) for index, ids in enumerate(prompts)]
    passages = write_passages(target, named, NEW_TOKENS, 0.0, -1)
    steps = Judge(trained, head, target, Settings()).steps(passages)
    llm = bundled_llm(loaded(kind, trained), trained.num_draft_tokens)
    outputs = llm.generate(list(map(list, prompts)), SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    for passage, output in zip(passages, outputs, strict=True):
        wanted = [step.accepted + 1 for step in steps if step.passage is passage]
        assert list(output.token_ids) == list(passage.token_ids[passage.start :])
        assert list(output.acceptance_lengths[: len(wanted)]) == wanted
        assert max(wanted) > 1


def test_without_effect_of_the_added_parts_it_is_the_bundled_draft() -> None:
    ids = torch.tensor([bundled_prompts()[0][:40]])
    anchors, features = torch.tensor([[12, 30]]), torch.randn(1, 40, 4 * Settings().shape.hidden_size)
    embedding = found().target.model.embed_tokens.weight
    with torch.no_grad():
        rows = [
            begin_draft(kind, Settings(), Settings().draft, found())(features, ids, anchors, embedding)
            for kind in ("dflash", "dflash2", "dspark")
        ]
    assert torch.allclose(rows[0], rows[1], atol=1e-5)
    assert rows[2].shape[2] == rows[0].shape[2] + 1


def test_saved_drafts_state_every_key_of_their_kind(tmp_path: Path) -> None:
    from tiny_pair.bundle import save_native_draft

    wanted: dict[str, Any] = {
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 16},
        "dspark": {"markov_rank": 64, "markov_head_type": "vanilla", "sample_from_anchor": True},
    }
    for kind, keys in wanted.items():
        save_native_draft(noisy(kind), Settings(), found().special(), tmp_path / kind)
        stated = json.loads((tmp_path / kind / "config.json").read_text())
        assert keys.items() <= {**stated, **stated["dflash_config"]}.items()
        assert (tmp_path / kind / "model.safetensors").stat().st_size < 4_000_000
