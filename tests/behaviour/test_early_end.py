"""Blocks that a target reads token by token end behind the first token that no request accepts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dflash_kernels.steps.step_rows import StepRows
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.blocks import Blocks, Proposal, Sampling
from dflash_runtime.device.early_end import EarlyEnd
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.handoffs import traces
from dflash_testing.hosted_models import KnowingDraft, Known, host_own_cache, make_model
from dflash_testing.pairs import random_draft, random_llm, random_prompts

NUM_DRAFTS = 7
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mamba")
    make_model(path, "mamba")
    return host_own_cache(path)


def run(target: Any, num_right: list[int], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, int]:
    """Run requests with drafts that get these numbers of tokens right -> traces, and forwards of one token."""
    given = random_prompts(range(5, 5 + len(num_right)), target.config.vocab_size)
    params = [replace(PARAMS, seed=seed, **settings) for seed in range(len(given))]
    texts = [output.token_ids for output in random_llm(target, None, 0).generate(given, params)]
    known = [Known([*prompt, *text], right) for prompt, text, right in zip(given, texts, num_right, strict=True)]
    draft = KnowingDraft(random_draft(target, rope=RopeConfig(theta=10_000.0)), known)
    count, forward = [0], target._forward

    def watch(token_ids: Any, *args: Any, **others: Any) -> Any:
        count[0] += token_ids.shape[1] == 1
        return forward(token_ids, *args, **others)

    monkeypatch.setattr(target, "_forward", watch)
    outputs = random_llm(target, draft, NUM_DRAFTS, max_num_requests=len(given)).generate(given, params)
    monkeypatch.setattr(target, "_forward", forward)
    assert [output.token_ids for output in outputs] == texts
    return traces(outputs), count[0]


@pytest.mark.parametrize(("num_right", "temperature", "few", "many"), [([2], 0.8, 12, 32), ([2, 3], 0.0, 15, 32)])
def test_fewer_rows_run_and_the_traces_are_the_same(
    target: Any, num_right: list[int], temperature: float, few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, num_ours = run(target, num_right, monkeypatch, temperature=temperature)
    monkeypatch.setattr(target, "ends_early", False)
    theirs, num_theirs = run(target, num_right, monkeypatch, temperature=temperature)
    assert ours == theirs
    assert (num_ours, num_theirs) == (few, many)


def choose(blocks: Blocks, hidden: Tensor, column: int) -> Tensor:
    return hidden[:, 0].long()


def blocks_of(num_requests: int, distribution: Any = None, masks: Any = None) -> Blocks:
    rows, sampling = torch.arange(num_requests), SimpleNamespace(masks=masks)
    step = StepRows(*[rows] * len(StepRows._fields))._replace(max_accepted=torch.full((num_requests,), 3))
    proposal = Proposal(torch.tensor([[5, 6, 7]] * num_requests), distribution)
    return Blocks(rows, step, rows, cast(Sampling, sampling), proposal, rows, rows)


def test_the_last_request_that_accepts_decides() -> None:
    end = EarlyEnd.of(blocks_of(2), choose)
    assert end is not None
    asked = [end.needs_next(torch.tensor([[first], [second]]), column) for column, (first, second) in enumerate(
        [(5, 5), (0, 6), (7, 0)]
    )]  # fmt: skip
    assert asked == [True, True, False]
    assert end.limited().step.max_accepted.tolist() == [2, 2]


def test_a_request_accepts_no_more_than_its_limit() -> None:
    blocks = blocks_of(1)
    blocks.step.max_accepted[0] = 1
    end = EarlyEnd.of(blocks, choose)
    assert end is not None
    assert end.needs_next(torch.tensor([[5]]), 0)
    assert not end.needs_next(torch.tensor([[6]]), 1)


@pytest.mark.parametrize("given", [{"distribution": 1}, {"masks": 1}, {"num_requests": 5}])
def test_blocks_that_run_whole(given: dict[str, Any]) -> None:
    """Sampled draft tokens, grammars and batches of more than 4 requests rule early ends out."""
    assert EarlyEnd.of(blocks_of(**{"num_requests": 2, **given}), choose) is None
