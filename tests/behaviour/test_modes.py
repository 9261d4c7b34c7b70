"""Texts and acceptance traces are the same in every mode of the engine, tested on combinations of modes in float64.

By default a pairwise selection runs: every pair of values of any two modes occurs, except the values in BETWEEN.
`-m slow` runs all combinations.
"""

from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hybrid_pair import hybrid_llm, hybrid_prompts
from dflash_testing.pairs import bundled_llm, bundled_prompts
from dflash_testing.preemption import preempt_youngest
from dflash_testing.walking_drafts import KINDS, draft_model, sample_of_all

HYBRID = "hybrid"
"""The draft of the hybrid pair, whose target has states."""

MODES: dict[str, tuple[Any, ...]] = {
    "draft": ("tiny", "tiny:reduced", *KINDS, HYBRID),
    "num_draft_tokens": (1, 3, 7),
    "scheduling": ("sync", "async"),
    "prefix_cache": (True, False),
    "max_batched_tokens": (1, 4, 16, 17, 2048),
    "pool": ("roomy", "short", "forced"),  # short: requests wait; forced: preempts the youngest every five steps
    "max_num_requests": (1, 2, 5, 16),
}
BETWEEN: dict[str, tuple[Any, ...]] = {
    "draft": ("tiny:reduced", "dspark"), "max_batched_tokens": (4,), "max_num_requests": (2,),
}  # fmt: skip
"""Values that the selection leaves out, since neighbouring values test the same cases."""

LENGTHS = (1, 15, 16, 17, 31, 33, 40)
FEWER = (1, 16, 33, 40)
"""Prompt lengths of all modes, and of the pairwise selection."""

ONE_BY_ONE = (0, 2, 3)
"""Prompts of FEWER that run where a step has one row, because such steps are many."""

SHORT, LONG = 9, 26
"""New tokens per request: across one page bound, and across two."""

NEW_TOKENS = [SHORT, pytest.param(LONG, marks=pytest.mark.slow)]


def pairwise() -> list[dict[str, Any]]:
    """A greedy selection of combinations in which every pair of values of two modes occurs."""
    combos = [combo for combo in everything() if all(combo[mode] not in values for mode, values in BETWEEN.items())]
    pairs = [pairs_of(combo) for combo in combos]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(combos)), key=lambda index: len(missing & pairs[index]))
        missing -= pairs[best]
        chosen.append(combos[best])
    return chosen


def pairs_of(combo: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {(a, combo[a], b, combo[b]) for a, b in combinations(combo, 2)}


def everything() -> list[dict[str, Any]]:
    return [dict(zip(MODES, values, strict=True)) for values in product(*MODES.values())]


def name_of(combo: dict[str, Any]) -> str:
    return "-".join(str(value) for value in combo.values())


def prompts(lengths: tuple[int, ...] = LENGTHS, draft: str = "tiny") -> list[tuple[int, ...]]:
    """Prompts of these lengths, which are around page bounds. The last two share a prefix."""
    given = hybrid_prompts() if draft == HYBRID else bundled_prompts()
    chosen = [prompt[:length] for prompt, length in zip(given, lengths, strict=False)]
    return [*chosen[:-1], chosen[-2][:32] + chosen[-1][:8]]


def make_llm(draft: str, num_draft_tokens: int, **engine: Any) -> LLM:
    """An engine in float64 with a draft and its target."""
    if draft == HYBRID:
        return hybrid_llm(num_draft_tokens, torch.float64, **engine)
    return bundled_llm(draft_model(draft, torch.float64), num_draft_tokens, dtype=torch.float64, **engine)


@cache
def expected(
    draft: str, num_draft_tokens: int, max_new_tokens: int, lengths: tuple[int, ...] = FEWER
) -> list[RequestOutput]:
    """The outputs of a synchronous engine that runs one request at a time, without prefix cache or chunks."""
    llm = make_llm(draft, num_draft_tokens, prefix_cache=False)
    return llm.generate(prompts(lengths, draft), SamplingParams(max_new_tokens=max_new_tokens))


def check(combo: dict[str, Any], max_new_tokens: int, lengths: tuple[int, ...]) -> None:
    engine = dict(combo)
    name, num_draft_tokens, pool = (engine.pop(key) for key in ("draft", "num_draft_tokens", "pool"))
    num_pages = 12 if pool == "short" else 1000
    llm = make_llm(name, num_draft_tokens, num_pages=num_pages, **engine)
    given, wanted = prompts(lengths, name), expected(name, num_draft_tokens, max_new_tokens, lengths)
    chosen = ONE_BY_ONE if (engine["max_batched_tokens"], lengths) == (1, FEWER) else range(len(lengths))
    requests = [
        Request(index=index, prompt_token_ids=given[index], params=SamplingParams(max_new_tokens=max_new_tokens))
        for index in chosen
    ]
    for request in requests:
        llm.engine.add(request)
    steps = 0
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        steps += 1
        if pool == "forced" and steps % 5 == 0:
            preempt_youngest(llm)
    assert [tuple(request.output_token_ids) for request in requests] == [wanted[index].token_ids for index in chosen]
    assert [tuple(request.steps) for request in requests] == [wanted[index].drafts for index in chosen]
    if pool == "forced":
        assert sum(request.num_preemptions for request in requests) > 0
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.pages.num_available == num_pages - 1


@pytest.mark.parametrize("combo", pairwise(), ids=name_of)
def test_pairwise(combo: dict[str, Any]) -> None:
    check(combo, SHORT, FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("combo", everything(), ids=name_of)
def test_everything(combo: dict[str, Any]) -> None:
    check(combo, LONG, LENGTHS)


def test_all_drafts_give_the_text_of_plain_decoding() -> None:
    params = SamplingParams(max_new_tokens=SHORT)
    plain = bundled_llm(None, 0, dtype=torch.float64).generate(prompts(FEWER), params)
    bundled = [draft for draft in MODES["draft"] if draft not in (*KINDS, HYBRID)]
    for draft, num_draft_tokens in (*product(bundled, MODES["num_draft_tokens"]), *product(KINDS, (7,))):
        texts = [output.token_ids for output in expected(draft, num_draft_tokens, SHORT)]
        assert texts == [output.token_ids for output in plain]


@pytest.mark.parametrize("num_draft_tokens", [1, pytest.param(3, marks=pytest.mark.slow), 7])
def test_a_hybrid_pair_gives_the_text_of_plain_decoding(num_draft_tokens: int) -> None:
    params = SamplingParams(max_new_tokens=SHORT)
    plain = hybrid_llm(0, torch.float64).generate(prompts(FEWER, HYBRID), params)
    outputs = expected(HYBRID, num_draft_tokens, SHORT)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert any(length > 1 for output in outputs for length in output.acceptance_lengths)


@pytest.mark.parametrize("max_new_tokens", NEW_TOKENS)
@pytest.mark.parametrize("name", [*sample_of_all("anchor-first"), HYBRID])
def test_sampled_text_does_not_depend_on_the_mode(name: str, max_new_tokens: int) -> None:
    given = prompts(LENGTHS if max_new_tokens == LONG else FEWER, name)
    params = [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, top_p=0.95, seed=seed)
        for seed in range(len(given))
    ]
    wanted = make_llm(name, 7).generate(given, params)
    modes: list[dict[str, Any]] = [
        {"scheduling": "async", "max_num_requests": 5},
        {"max_batched_tokens": 4, "num_pages": 12, "max_num_requests": 4},
    ]
    for engine in modes:
        outputs = make_llm(name, 7, **engine).generate(given, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
        assert [output.drafts for output in outputs] == [output.drafts for output in wanted]


@pytest.mark.parametrize("max_new_tokens", NEW_TOKENS)
@pytest.mark.parametrize(
    ("name", "draft_sampling"),
    [
        ("tiny", "greedy"),
        (HYBRID, "probabilistic"),
        *(
            pytest.param(*param.values, "probabilistic", marks=param.marks)
            for param in sample_of_all("dflash2", "dspark")
        ),
    ],
)
def test_a_text_does_not_depend_on_its_batch_mates(name: str, draft_sampling: str, max_new_tokens: int) -> None:
    given = prompts(LENGTHS if max_new_tokens == LONG else FEWER, name)
    params = [SamplingParams(max_new_tokens=max_new_tokens, temperature=0.8, seed=seed) for seed in range(len(given))]
    alone = make_llm(name, 7, draft_sampling=draft_sampling).generate(given, params)
    llm = make_llm(name, 7, draft_sampling=draft_sampling, max_num_requests=4, scheduling="async")
    shuffled = llm.generate(given[::-1], params[::-1])[::-1]
    assert [output.token_ids for output in shuffled] == [output.token_ids for output in alone]
    assert [output.drafts for output in shuffled] == [output.drafts for output in alone]
