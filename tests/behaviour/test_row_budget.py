"""A row budget: requests of one step verify different numbers of rows, and their text stays that of plain decoding."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.steps.given_rows import give_rows, give_rows_ref
from dflash_kernels.suite import REFERENCE, Kernels
from dflash_runtime.device import acceptance_model
from dflash_runtime.device.setup.settings import apply_exclusions
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling import row_budget
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.row_budget import BestBudget
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.width import StepTimes
from dflash_testing import pairs
from dflash_testing.gpu import detecting_syncs, gpu_llm
from dflash_testing.hybrid_pair import hybrid_llm, hybrid_prompts
from dflash_testing.pairs import bundled_llm, bundled_prompts, placement
from dflash_testing.tensors import DEVICE
from dflash_testing.walking_drafts import draft_model

K, LENGTH = 7, 16
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3}
HYBRID = "hybrid"


class Budgets:
    """Gives steps the mean widths of a list, again and again. `seen` has the given widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths: Iterator[int] = iter(random.Random(0).choices(widths, k=10_000))
        self.seen: set[int] = set()

    def candidates(self, batch: int, verify_width: int) -> list[int]:
        return [0]

    def choose(self, requests: Sequence[Request], verify_width: int) -> int:
        if not requests or verify_width == 1:
            return 0
        width = min(next(self._widths), verify_width)
        self.seen.add(width)
        return width


def make(name: str, budget: row_budget.RowBudget | None, **engine: Any) -> LLM:
    """An engine in float64 with room for 3 requests, in which the batch shape does not change any token."""
    settings: dict[str, Any] = {"max_num_requests": 3, "row_budget": budget is not None} | engine
    if name == HYBRID:
        llm = hybrid_llm(K, torch.float64, **settings)
    else:
        draft = draft_model(name, torch.float64)
        llm = bundled_llm(draft, draft.config.num_draft_tokens, dtype=torch.float64, **settings)
    llm.engine.scheduler.row_budget = budget
    return llm


def prompts_of(name: str) -> list[tuple[int, ...]]:
    """Four prompts with a common beginning, one of which waits for room."""
    given = hybrid_prompts() if name == HYBRID else bundled_prompts()
    return [given[0][:18] + given[place][: 5 + 3 * place] for place in range(4)]


def traces(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts) for output in outputs]


MODES: list[Any] = [
    pytest.param("tiny", {}, {"scheduling": "async"}, id="greedy"),
    pytest.param("tiny", SAMPLED, {}, id="sampled"),
    pytest.param(HYBRID, {}, {"scheduling": "async"}, id="hybrid"),
    *(
        pytest.param(name, sampling, engine, marks=pytest.mark.slow)
        for name in ("tiny", "dflash2", "dspark", "anchor-first", HYBRID)
        for sampling in ({}, SAMPLED, SAMPLED | {"top_k": 20, "top_p": 0.9})
        for engine in ({}, {"prefix_cache": False, "max_batched_tokens": 16})
    ),
]


@pytest.mark.parametrize(("name", "sampling", "engine"), MODES)
def test_text_does_not_depend_on_the_rows_that_requests_get(
    name: str, sampling: dict[str, Any], engine: dict[str, Any]
) -> None:
    """Drafts are greedy, so sampled text is that of plain decoding too. Requests of one step get different widths."""
    prompts = prompts_of(name)
    params = SamplingParams(max_new_tokens=LENGTH, **sampling)
    plain = make(name, None).generate(prompts, SamplingParams(max_new_tokens=LENGTH, verify_width=1, **sampling))
    budgets = Budgets([2, 3, 5])
    llm = make(name, budgets, **engine)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert budgets.seen == {2, 3, 5}
    widths = {step.verify_width for output in outputs for step in output.drafts}
    assert len(widths) > 3
    assert max(widths) > 5
    for output in outputs:
        assert all(step.num_accepted < step.verify_width for step in output.drafts)


@pytest.mark.parametrize(
    ("name", "way", "sampling"),
    [
        ("tiny", "probabilistic", SAMPLED),
        (HYBRID, "greedy", {}),
        pytest.param("dspark", "probabilistic", SAMPLED, marks=pytest.mark.slow),
        pytest.param("dflash2", "greedy", {}, marks=pytest.mark.slow),
    ],
)
def test_a_budget_of_all_rows_has_the_traces_of_whole_blocks(name: str, way: str, sampling: dict[str, Any]) -> None:
    prompts, params = prompts_of(name), SamplingParams(max_new_tokens=LENGTH, **sampling)
    whole = make(name, None, draft_sampling=way).generate(prompts, params)
    llm = make(name, Budgets([K + 1]), draft_sampling=way)
    assert traces(llm.generate(prompts, params)) == traces(whole)


class Launches(TorchDispatchMode):
    """Counts the calls of kernels, and the torch operations outside of kernels that run on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._is_in_kernel = False

    def kernels(self) -> Kernels:
        """The reference kernels, counted."""
        names = [item.name for item in fields(Kernels) if item.name != "name"]
        counted: dict[str, Any] = {name: partial(self._call, name) for name in names}
        return replace(REFERENCE, **counted)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.counts[name] += 1
        self._is_in_kernel = True
        try:
            return getattr(REFERENCE, name)(*args, **kwargs)
        finally:
            self._is_in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self._is_in_kernel or func.is_view):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def launches_of(monkeypatch: pytest.MonkeyPatch, **engine: Any) -> Counter[str]:
    """The launches of a step that verifies whole blocks of two requests."""
    launches = Launches()
    monkeypatch.setattr(pairs, "resolve_kernels", lambda *_: launches.kernels())
    llm = make("tiny", None, kernels="reference", **engine)
    for index, prompt in enumerate(prompts_of("tiny")[:2]):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=LENGTH)))
    llm.engine.step()
    batch = llm.engine.scheduler.schedule(is_drained=True)
    launches.counts.clear()
    with launches:
        llm.engine.runner.submit(batch)
    assert launches.counts["block_attention"]
    return launches.counts


def test_a_budget_that_verifies_whole_blocks_adds_three_launches_and_no_pass_over_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One launch appends the predictions to the results. The first step is also followed by a refit."""
    whole, budget = launches_of(monkeypatch), launches_of(monkeypatch, row_budget=True)
    assert whole - budget == {"argmax": 1}
    assert budget - whole == {
        "largest_probability": 1, "draft_odds": 1, "add_outcomes": 1, "cat.default": 1, "refit_odds": 1
    }  # fmt: skip


def test_sampled_drafts_are_accepted_within_the_rows_of_each_request() -> None:
    """A request that gets 3 rows has the text and the trace of a request with a verify width of 3."""
    prompt, engine = prompts_of("tiny")[1], {"max_num_requests": 1, "draft_sampling": "probabilistic"}
    narrow, whole = (SamplingParams(max_new_tokens=LENGTH, verify_width=width, **SAMPLED) for width in (3, None))
    found = make("tiny", Budgets([3]), **engine).generate([prompt], whole)
    assert traces(found) == traces(make("tiny", None, **engine).generate([prompt], narrow))


def test_a_request_never_accepts_more_than_its_own_verify_width() -> None:
    prompts = prompts_of("tiny")[:2]
    narrow, wide = SamplingParams(max_new_tokens=LENGTH, verify_width=2), SamplingParams(max_new_tokens=LENGTH)
    outputs = make("tiny", Budgets([2, 5, 8])).generate(prompts, [narrow, wide])
    assert {step.verify_width for step in outputs[0].drafts} == {2}
    assert max(step.verify_width for step in outputs[1].drafts) > 2


def test_predictions_are_refitted_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two refits."""
    monkeypatch.setattr(acceptance_model, "REFIT_STEPS", 4)
    llm = make("tiny", Budgets([4]), max_num_requests=2)
    outputs = llm.generate(prompts_of("tiny")[:2], SamplingParams(max_new_tokens=LENGTH))
    acceptance = llm.engine.runner.acceptance
    assert acceptance is not None
    assert float(acceptance.model.weight) != 1
    assert (acceptance.model.biases[:3] != 0).all()
    for output in outputs:
        for step in output.drafts:
            assert len(step.confidences) == len(step.draft_ids)
            assert all(value is not None and 0 < value < 1 for value in step.confidences)


def test_labels_are_the_verified_drafts_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("tiny", Budgets([2, 3, 5, 8]), max_num_requests=1)
    acceptance = llm.engine.runner.acceptance
    assert acceptance is not None
    observe, seen = acceptance.observe, list[tuple[int, int]]()

    def watched(features: Tensor, num_accepted: Tensor, num_verified: Tensor) -> None:
        seen.append((int(num_accepted), int(num_verified)))
        observe(features, num_accepted, num_verified)

    monkeypatch.setattr(acceptance, "observe", watched)
    (output,) = llm.generate(prompts_of("tiny")[:1], SamplingParams(max_new_tokens=30))
    assert seen == [(step.num_accepted, len(step.draft_ids)) for step in output.drafts]
    assert len({verified for _, verified in seen}) > 2


@pytest.mark.parametrize(
    ("give", "count"),
    [(give_rows_ref, 200), pytest.param(give_rows, 12, marks=pytest.mark.skipif(not HAS_TRITON, reason="no Triton"))],
)
def test_rows_on_the_device_are_given_as_on_the_host(
    give: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]], count: int
) -> None:
    """Batches of up to 5 requests with all numbers of rows. Every third batch has ties."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        likely = torch.rand(1 + number % 5, 1 + number % 4, generator=generator, dtype=torch.float64)
        likely = likely.round() if number % 3 == 0 else likely
        survivals = likely.cumprod(1)
        for num_rows in range(len(likely), likely.numel() + len(likely) + 1):
            widths, places, sources = give(survivals.to(DEVICE), num_rows)
            assert widths.tolist() == row_budget.give_rows(survivals.tolist(), num_rows)
            assert_places(widths, places, sources, likely.shape[1] + 1)


def assert_places(widths: Tensor, places: Tensor, sources: Tensor, block: int) -> None:
    rows = [(request, row) for request, width in enumerate(widths.tolist()) for row in range(width)]
    assert [(place // block, place % block) for place in places.tolist()] == rows
    for place, source in enumerate(sources.tolist()):
        request, row = divmod(place, block)
        assert rows[source] == (request, min(row, int(widths[request]) - 1))


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that choose from the first step on."""
    monkeypatch.setattr(row_budget, "FIRST_STEPS", 0)


def request(likely: tuple[float, ...], **params: Any) -> Request:
    found = Request(index=0, prompt_token_ids=(1,) * 100, params=SamplingParams(**params), output_token_ids=[1])
    found.likely = likely
    return found


def test_the_first_steps_verify_whole_blocks() -> None:
    budget = BestBudget(StepTimes({1: {1: 5, 2: 10, 4: 20, 8: 30}}))
    assert [budget.choose([], 8) for _ in range(2)] == [0, 0]  # steps without drafts teach nothing
    chosen = [budget.choose([request((0.01,) * 7)], 8) for _ in range(row_budget.FIRST_STEPS + 1)]
    assert chosen == [0] * row_budget.FIRST_STEPS + [2]


@pytest.mark.usefixtures("learned")
def test_the_mean_width_has_the_most_expected_tokens_per_millisecond() -> None:
    """Rows of a sure request are worth their time. Rows of a doubtful one are not, and of a new one as the others'."""
    times = StepTimes({1: dict.fromkeys((1, 2, 4, 8), 10.0), 2: {1: 5, 2: 10, 4: 12, 8: 30}})
    sure, doubtful = request((0.99,) * 7), request((0.01,) * 7)
    assert BestBudget(times).candidates(2, 8) == [0, 2, 4]
    for requests, width in (
        ([sure, sure], 4), ([doubtful, doubtful], 2), ([sure, doubtful], 4), ([sure], 0), ([doubtful, request(())], 2),
        ([request((0.99,) * 7, verify_width=2)] * 2, 2),
    ):  # fmt: skip
        assert BestBudget(times).choose(requests, 8) == width
    assert BestBudget(times).choose([sure, sure], 1) == BestBudget(times).choose([], 8) == 0


@pytest.mark.usefixtures("learned")
def test_a_choice_averages_recent_steps() -> None:
    """Drafts are all right or all wrong, in turn. Each choice by the last step alone would be too narrow or too wide.

    When all drafts stay wrong, the choice follows.
    """
    budget = BestBudget(StepTimes({2: {1: 5, 2: 10, 4: 12, 8: 19}}))
    right, wrong = [request((0.999,) * 7)] * 2, [request((0.001,) * 7)] * 2
    chosen = [budget.choose(wrong if step % 2 else right, 8) for step in range(40)]
    assert {*chosen[20:]} == {0}
    chosen = [budget.choose(wrong, 8) for _ in range(3 * row_budget.MEMORY_STEPS)]
    assert (chosen[0], chosen[-1]) == (0, 2)


@pytest.mark.parametrize(
    ("drafting", "ids"), [("model", ["no-row-budget"]), ("ngram", ["no-async-lookup", "no-lookup-budget"])]
)
def test_a_budget_needs_step_times_and_probabilities(drafting: str, ids: list[str]) -> None:
    changed, warnings = apply_exclusions(EngineConfig(row_budget=True, drafting=drafting), placement(), K)
    assert not changed.row_budget
    assert [item.id for item in warnings] == ids


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "dflash2", "dspark"])
def test_captured_steps_with_a_budget_have_the_text_of_plain_decoding(name: str) -> None:
    prompts, params = list(bundled_prompts()[:12]), SamplingParams(max_new_tokens=48)
    llm = gpu_llm(name, "float32", max_num_requests=8, row_budget=True)
    assert isinstance(llm.engine.scheduler.row_budget, BestBudget)
    llm.engine.scheduler.row_budget = Budgets([2, 3, 4])
    outputs = llm.generate(prompts, params)
    plain = gpu_llm(None, "float32", max_num_requests=1).generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert llm.engine.runner.graphs is not None
    assert {2, 3, 4} <= {mode.mean_width for _, mode in llm.engine.runner.graphs.captured}
    assert len({step.verify_width for output in outputs for step in output.drafts}) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "dspark"])
def test_steps_with_a_budget_never_wait_for_the_device(name: str) -> None:
    """With measured step times, and more steps than lie between two refits."""
    llm = gpu_llm(name, "bfloat16", max_num_requests=4, row_budget=True)
    params = SamplingParams(max_new_tokens=150, ignore_eos=True)
    llm.warm_up([params])
    llm.generate(bundled_prompts()[:8], params)
    for index, prompt in enumerate(bundled_prompts()[8:16]):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=params))
    steps = 0
    with detecting_syncs():
        while llm.engine.scheduler.has_work:
            llm.engine.step()
            steps += 1
    assert steps > 2 * acceptance_model.REFIT_STEPS
