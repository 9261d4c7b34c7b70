"""DFlash 2: texts and acceptance traces equal z-lab's, step for step, on DFlash drafts with its parts added by a seed.

tests/golden/zlab_dflash2.py recorded the traces. Near the end of the output the reference shortens blocks and this
runtime does not, so only steps with a whole block left are compared. With identities, the trace equals the trace of
DFlash.
"""

import json
from typing import Any

import pytest

from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.lifted_drafts import Lift, cases
from dflash_testing.pairs import bundled_draft_model, bundled_llm
from dflash_testing.paths import GOLDEN
from dflash_testing.reference_traces import num_whole_steps
from dflash_testing.walking_drafts import walking_draft

RECORDED = json.loads((GOLDEN / "zlab_dflash2.json").read_text())
CASES = {case.seed: case for case in cases()[4:]}
SAMPLED = {trace["seed"] for trace in RECORDED["traces"][4::40]}
NUM_TOKENS: int = RECORDED["provenance"]["max_new_tokens"]


def check(trace: dict[str, Any], case: Lift) -> None:
    llm = bundled_llm(walking_draft(case), case.block_size - 1)
    (output,) = llm.generate([trace["prompt_token_ids"]], SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))
    assert list(output.token_ids) == trace["token_ids"]
    count = num_whole_steps(trace["acceptance_lengths"], NUM_TOKENS, case.block_size)
    assert list(output.acceptance_lengths[:count]) == trace["acceptance_lengths"][:count]


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(trace, marks=() if trace["seed"] in SAMPLED else pytest.mark.slow, id=str(trace["seed"]))
        for trace in RECORDED["traces"]
        if trace["noise"]
    ],
)
def test_a_trace_equals_the_reference(trace: dict[str, Any]) -> None:
    check(trace, CASES[trace["seed"]])


def test_at_least_two_hundred_drafts_are_recorded() -> None:
    assert sum(trace["noise"] > 0 for trace in RECORDED["traces"]) >= 200


@pytest.mark.parametrize("index", [1, *(pytest.param(index, marks=pytest.mark.slow) for index in (0, 2, 3))])
def test_with_identities_it_is_dflash(index: int) -> None:
    """The recorded trace of the reference equals the trace of DFlash, too."""
    case = cases()[index]
    draft = bundled_draft_model(block_size=case.block_size)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = RECORDED["traces"][index]["prompt_token_ids"]
    (plain,), (own,) = (
        bundled_llm(model, case.block_size - 1).generate([prompt], params) for model in (draft, walking_draft(case))
    )
    assert (own.token_ids, own.drafts) == (plain.token_ids, plain.drafts)
    check(RECORDED["traces"][index], case)
