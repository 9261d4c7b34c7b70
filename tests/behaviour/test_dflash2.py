"""A DFlash 2 draft in every mode of the engine: the text of plain decoding, and the traces of one request at a time."""

from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE, triton_kernels
from dflash_runtime.draft_config import SelectorConfig
from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import DFLASH2, random_draft, random_llm, random_prompts, random_target
from dflash_testing.refusals import refuses
from dflash_testing.widths import ListedWidths

PROMPTS = random_prompts([1, 9, 17, 30, 40], 97)
MODES: list[dict[str, Any]] = [
    {"scheduling": "async", "max_num_requests": 5},
    {"max_batched_tokens": 5, "max_num_requests": 3, "num_pages": 14, "page_size": 8},
    {"scheduling": "async", "max_batched_tokens": 17, "max_num_requests": 2, "prefix_cache": False},
]


def make_llm(num_draft_tokens: int = 7, dtype: torch.dtype = torch.float64, **engine: Any) -> LLM:
    kernels = triton_kernels() if engine.get("kernels") == "triton" else REFERENCE
    target = random_target(dtype, num_layers=3, max_position_embeddings=96, scale=0.15, kernels=kernels)
    draft = random_draft(target, dtype, target_layer_ids=(0, 1), num_layers=2, kernels=kernels, **DFLASH2)
    return random_llm(target, draft if num_draft_tokens else None, num_draft_tokens, **engine)


def params(temperature: float = 0.0) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=14, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts) for output in outputs]


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
def test_the_text_is_that_of_plain_decoding(num_draft_tokens: int) -> None:
    plain = make_llm(0).generate(PROMPTS, params())
    outputs = make_llm(num_draft_tokens).generate(PROMPTS, params())
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


@pytest.mark.parametrize("engine", MODES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_trace_does_not_depend_on_the_mode(engine: dict[str, Any], temperature: float) -> None:
    engine = engine | {"draft_sampling": "probabilistic"}
    alone = make_llm(draft_sampling="probabilistic").generate(PROMPTS, params(temperature))
    llm = make_llm(**engine)
    assert traces(llm.generate(PROMPTS, params(temperature))) == traces(alone)
    llm.engine.scheduler.check_integrity()


def test_a_narrow_width_verifies_fewer_rows_of_the_same_blocks() -> None:
    wanted = [output.token_ids for output in make_llm(0).generate(PROMPTS, params())]
    llm = make_llm(max_num_requests=5, scheduling="async")
    llm.engine.scheduler.width_policy = ListedWidths((3, 1, 8, 2, 5))
    assert [output.token_ids for output in llm.generate(PROMPTS, params())] == wanted


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_tokens_of_fewer_positions_are_the_first_of_all(draft_sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk goes from left to right, so a narrow width has the first tokens of the whole block."""
    drafted = []
    for width in (8, 4):
        llm = make_llm(draft_sampling=draft_sampling)
        llm.engine.scheduler.width_policy = ListedWidths((width,) * 40)
        seen: list[Any] = []
        propose = llm.engine.runner.drafter.propose

        def watched(*arguments: Any, propose: Any = propose, seen: list[Any] = seen) -> Any:
            seen.append(propose(*arguments))
            return seen[-1]

        monkeypatch.setattr(llm.engine.runner.drafter, "propose", watched)
        llm.generate(PROMPTS[2:3], params(0.9)[2:3])
        drafted.append(seen[0].token_ids[0].tolist())
    assert len(drafted[1]) == 3
    assert drafted[0][:3] == drafted[1]


@pytest.mark.interpreter
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_triton_equals_the_references(temperature: float) -> None:
    found = []
    for kernels in ("reference", "triton"):
        llm = make_llm(3, torch.float32, kernels=kernels, draft_sampling="probabilistic", max_num_requests=2)
        one = [SamplingParams(max_new_tokens=4, temperature=temperature, seed=seed) for seed in range(2)]
        found.append(traces(llm.generate([PROMPTS[0], PROMPTS[1][:5]], one)))
    assert found[0] == found[1]


def test_a_reduced_vocabulary_is_refused() -> None:
    with refuses(UnsupportedError, "selector-vocabulary", field="draft_vocab_size", found=40):
        random_draft(random_target(), draft_vocab_size=40, **DFLASH2)


@pytest.mark.parametrize("top_k", [0, 98])
def test_a_selector_has_candidates_of_the_vocabulary(top_k: int) -> None:
    with refuses(InvalidConfig, field="selector_top_k"):
        random_draft(random_target(), **{**DFLASH2, "selector": SelectorConfig(rank=4, top_k=top_k)})
