"""Drafts of every kind on a GPU: captured steps equal launched ones, and no step waits for the device."""

from functools import cache
from typing import Any

import pytest
import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import detecting_syncs
from dflash_testing.pairs import random_prompts
from timing.draft_kinds import KINDS, add_kinds, with_kind
from timing.engine_arms import engine_pair
from timing.pairs import RandomPair, build_pair
from timing.shapes import SHAPES

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts([3, 17, 40, 90], SHAPES["small"].vocab)
WAYS = [(0.0, "greedy"), (0.9, "greedy"), (0.9, "probabilistic")]


@cache
def pair() -> RandomPair:
    return add_kinds(build_pair(SHAPES["small"], 512, torch.device("cuda", 0)), KINDS)


def make_llm(kind: str, **engine: Any) -> LLM:
    return LLM(engine_pair(with_kind(pair(), kind, 8), kind, None, num_pages=200, max_model_len=512, **engine))


@pytest.mark.parametrize(("temperature", "draft_sampling"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_equal_launched_ones(kind: str, temperature: float, draft_sampling: str) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, ignore_eos=True, seed=3)
    found = []
    for graphs in (False, True):
        llm = make_llm(kind, graphs=graphs, max_num_requests=1, draft_sampling=draft_sampling)
        found.append([(output.token_ids, output.drafts) for output in llm.generate(PROMPTS, params)])
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(("temperature", "draft_sampling"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_never_wait_for_the_device(kind: str, temperature: float, draft_sampling: str) -> None:
    llm = make_llm(kind, max_num_requests=4, draft_sampling=draft_sampling)
    params = SamplingParams(max_new_tokens=30, temperature=temperature, ignore_eos=True, seed=3)
    llm.generate(PROMPTS, params)  # compiles and captures
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add(Request(index=index, prompt_token_ids=tuple(prompt), params=params))
    with detecting_syncs():
        while llm.engine.scheduler.has_work:
            llm.engine.step()
    llm.close()
