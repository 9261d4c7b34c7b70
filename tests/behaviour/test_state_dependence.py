"""The text of the hybrid pair depends on the state of its target, so tests on the pair notice a forgotten state.

Only states carry the values that its documents repeat (`examples/tiny_pair/language.py`). Each fault is planted between
the steps of a request.
"""

import json
from collections.abc import Iterator

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.paths import ROOT
from dflash_testing.state_faults import FAULTS, planted

PAIR = ROOT / "tests" / "data" / "pairs" / "hybrid"
NEW_TOKENS = 96
Texts = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = EngineConfig(device="cpu", dtype="float32", target_runtime="transformers-cache")
    with LLM(open_target(PAIR / "target"), open_draft(PAIR / "draft"), config) as found:
        yield found


def texts(llm: LLM, num_prompts: int, num_tokens: int, fault: str | None) -> Texts:
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()[:num_prompts]
    prompts = [json.loads(line)["prompt_token_ids"] for line in lines]
    with planted(fault):
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    return [output.token_ids for output in outputs]


def num_changed(llm: LLM, num_prompts: int, num_tokens: int, fault: str) -> int:
    """The number of prompts with another greedy text under a fault."""
    pairs = zip(texts(llm, num_prompts, num_tokens, None), texts(llm, num_prompts, num_tokens, fault), strict=True)
    return sum(right != wrong for right, wrong in pairs)


def test_a_forgotten_state_changes_the_text(llm: LLM) -> None:
    assert num_changed(llm, 3, 32, "zeroed") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_state_change_the_text(fault: str, llm: LLM) -> None:
    assert num_changed(llm, 32, NEW_TOKENS, fault) >= 24
