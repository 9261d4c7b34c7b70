"""DSpark: drafted tokens, confidences and traces equal z-lab's loop with speculators' heads, in both layouts.

tests/golden/dspark_traces.py recorded the traces. Near the end of the output the reference shortens blocks and this
runtime does not, so only steps with a whole block left are compared.
"""

import json
from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE, triton_kernels
from dflash_runtime.draft_config import MarkovConfig
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.lifted_drafts import sparks
from dflash_testing.pairs import (
    bundled_draft_model,
    bundled_llm,
    random_draft,
    random_llm,
    random_prompts,
    random_target,
)
from dflash_testing.paths import GOLDEN
from dflash_testing.reference_traces import num_whole_steps
from dflash_testing.refusals import refuses
from dflash_testing.walking_drafts import walking_draft
from dflash_testing.widths import ListedWidths

RECORDED = json.loads((GOLDEN / "dspark_traces.json").read_text())
CASES = {case.seed: case for case in sparks()}
SAMPLED = {trace["seed"] for trace in RECORDED["traces"][:: len(RECORDED["traces"]) // 10]}
CLOSE = 2e-5
"""Confidences are recorded with 5 decimals, and two correct float32 programs differ by less."""

NUM_TOKENS: int = RECORDED["provenance"]["max_new_tokens"]
PROMPTS = random_prompts([1, 9, 17, 30, 40], 97)
HEADS = [
    {"head_type": "vanilla", "sample_from_anchor": False, "top_k": 5},
    {"head_type": "gated", "sample_from_anchor": True},
    {"head_type": "rnn", "sample_from_anchor": False, "draft_vocab_size": 40},
]


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(trace, marks=() if trace["seed"] in SAMPLED else pytest.mark.slow, id=str(trace["seed"]))
        for trace in RECORDED["traces"]
    ],
)
def test_every_drafted_token_is_the_references(trace: dict[str, Any]) -> None:
    case = CASES[trace["seed"]]
    llm = bundled_llm(walking_draft(case), case.num_drafts)
    (output,) = llm.generate([trace["prompt_token_ids"]], SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))
    assert list(output.token_ids) == trace["token_ids"]
    count = num_whole_steps(trace["acceptance_lengths"], NUM_TOKENS, case.num_drafts + 1)
    assert list(output.acceptance_lengths[:count]) == trace["acceptance_lengths"][:count]
    assert [list(step.draft_ids) for step in output.drafts[:count]] == trace["drafts"][:count]
    assert [list(step.confidences) for step in output.drafts[:count]] == [
        pytest.approx(values, abs=CLOSE) for values in trace["confidences"][:count]
    ]


def test_a_hundred_heads_are_recorded_of_every_kind() -> None:
    cases = [CASES[trace["seed"]] for trace in RECORDED["traces"]]
    assert len(cases) >= 100
    assert len({(case.head_type, case.samples_from_anchor) for case in cases}) == 6
    assert len({(case.head_type, case.top_k) for case in cases}) == 6


def test_without_a_bias_it_is_dflash() -> None:
    case, prompt = CASES[0], RECORDED["traces"][0]["prompt_token_ids"]
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    (plain,), (own,) = (
        bundled_llm(draft, 7).generate([prompt], params) for draft in (bundled_draft_model(), walking_draft(case))
    )
    assert (own.token_ids, own.drafts) == (plain.token_ids, plain.drafts)


def make_llm(head: dict[str, Any] | None, dtype: torch.dtype = torch.float64, **engine: Any) -> LLM:
    kernels = triton_kernels() if engine.get("kernels") == "triton" else REFERENCE
    target = random_target(dtype, num_layers=3, max_position_embeddings=96, scale=0.15, kernels=kernels)
    if head is None:
        return random_llm(target, None, 0, **engine)
    own = {name: value for name, value in head.items() if name not in ("head_type", "top_k")}
    markov = MarkovConfig(rank=5, head_type=head["head_type"], top_k=head.get("top_k"))
    draft = random_draft(
        target, dtype, target_layer_ids=(0, 1), block_size=6, family="dspark", markov=markov, kernels=kernels, **own
    )
    return random_llm(target, draft, draft.config.num_draft_tokens, **engine)


def params(temperature: float = 0.0) -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=12, temperature=temperature, top_k=30, seed=seed) for seed in range(len(PROMPTS))
    ]


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts) for output in outputs]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_text_is_that_of_plain_decoding(head: dict[str, Any]) -> None:
    plain = make_llm(None).generate(PROMPTS, params())
    llm = make_llm(head, max_num_requests=5, scheduling="async")
    llm.engine.scheduler.width_policy = ListedWidths((3, 1, 6, 2, 5))
    assert [output.token_ids for output in llm.generate(PROMPTS, params())] == [item.token_ids for item in plain]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_trace_does_not_depend_on_the_mode(head: dict[str, Any], temperature: float) -> None:
    alone = make_llm(head, draft_sampling="probabilistic").generate(PROMPTS, params(temperature))
    engine: dict[str, Any] = {"scheduling": "async", "max_batched_tokens": 9, "max_num_requests": 3}
    llm = make_llm(head, draft_sampling="probabilistic", num_pages=16, page_size=8, **engine)
    assert traces(llm.generate(PROMPTS, params(temperature))) == traces(alone)
    llm.engine.scheduler.check_integrity()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("head", "temperature"),
    [
        (HEADS[1], 0.9),
        (HEADS[0], 0.0),
        ({"head_type": "vanilla", "sample_from_anchor": True, "draft_vocab_size": 40}, 0.0),
    ],
    ids=["bias and sample", "few tokens", "bias and best token"],
)
def test_triton_equals_the_references(head: dict[str, Any], temperature: float) -> None:
    found = []
    for kernels in ("reference", "triton"):
        llm = make_llm(head, torch.float32, kernels=kernels, draft_sampling="probabilistic", max_num_requests=2)
        one = [SamplingParams(max_new_tokens=3, temperature=temperature, seed=seed) for seed in range(2)]
        found.append(traces(llm.generate([PROMPTS[0], PROMPTS[1][:5]], one)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("field", "values"),
    [("markov_rank", {"rank": 0}), ("markov_head_type", {"head_type": "other"}), ("dspark_draft_topk", {"top_k": 0})],
)
def test_a_wrong_value_is_refused(field: str, values: dict[str, Any]) -> None:
    with refuses(InvalidConfig, field=field):
        MarkovConfig(**{"rank": 4, **values})
