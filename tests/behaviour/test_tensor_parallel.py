"""Targets split over ranks, here threads: text and acceptance traces equal the ones of one process.

All arithmetic is in float64, so sums over ranks change no choice.
"""

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.drafts.draft import Draft, load_draft
from dflash_runtime.errors import DFlashError, UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.fp8_models import FORMS
from dflash_testing.hosted_models import make_model
from dflash_testing.packed_models import pack_experts
from dflash_testing.pairs import (
    ScriptedDraft,
    bundled_draft,
    bundled_prompts,
    placement,
    random_draft,
    random_llm,
    random_prompts,
)
from dflash_testing.preemption import preempt_youngest
from dflash_testing.quantised_models import quantise
from dflash_testing.rank_threads import RankThreads
from dflash_testing.refusals import refuses

Json = dict[str, Any]
Trace = list[tuple[tuple[int, ...], tuple[Any, ...]]]

DOUBLE = torch.float64
NUM_DRAFTS = 4

FAMILIES: dict[str, tuple[str, Json]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "llama with biases": ("llama", {"mlp_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"intermediate_size": 1}),  # no layer has this width
    "qwen3_moe, some layers dense": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, packed": ("gpt_oss", {"hidden_size": 64, "intermediate_size": 192}),
    "gpt_oss, packed, for one rank": ("gpt_oss", {"hidden_size": 64, "intermediate_size": 32}),
    "gemma4": ("gemma4_text", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    "gemma4 with experts": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 16,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {"tie_word_embeddings": True}),
}  # fmt: skip
"""Name -> model type, and the keys of its config beyond the helper's."""

COVERED = ("qwen2", "qwen3_moe", "gemma4", "qwen3_5")
"""Families without a part of their own. Other families have biases, experts, unlike and recurrent layers too."""


@pytest.fixture(scope="module")
def two() -> Iterator[RankThreads]:
    threads = RankThreads(2)
    yield threads
    threads.close()


def split_llm(target: Target, draft: Draft | None, num_drafts: int, ranks: Ranks, **engine: Any) -> LLM:
    """An engine of one rank."""
    pair = random_llm(target, draft, num_drafts, **engine).pair
    return LLM(replace(pair, placement=replace(pair.placement, ranks=ranks)))


def load_share(source: TargetSource, ranks: Ranks) -> Target:
    return load_target(source, replace(placement(DOUBLE), ranks=ranks))


def trace_of(outputs: Sequence[RequestOutput]) -> Trace:
    """Tokens and steps of every request."""
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [(output.token_ids, output.drafts) for output in outputs]


def write_family(path: Path, name: str) -> TargetSource:
    kind, changes = FAMILIES[name]
    model = make_model(path, kind, **changes)
    if "packed" in name:
        pack_experts(path, model)
    return open_target(path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COVERED else ()) for name in FAMILIES]
)
def test_text_and_traces_equal_those_of_one_process(name: str, tmp_path: Path, two: RankThreads) -> None:
    """A draft that is right twice of three times, over prompts that share a step, then a second run of the prompts."""
    source = write_family(tmp_path, name)
    prompts = random_prompts([5, 20, 3], 97)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    whole = load_share(source, ALONE)
    texts = [output.token_ids for output in random_llm(whole, None, 0, max_num_requests=3).generate(prompts, params)]
    ahead = {(at, text[at]): text for text in map(list, (map_text(*pair) for pair in zip(prompts, texts, strict=True)))
             for at in range(len(text))}  # fmt: skip

    def run(ranks: Ranks) -> tuple[Trace, Trace]:
        target = whole if ranks.size == 1 else load_share(source, ranks)
        draft = AheadDraft(random_draft(target, DOUBLE), ahead)
        llm = split_llm(target, draft, NUM_DRAFTS, ranks, max_num_requests=3)
        first, second = (trace_of(llm.generate(prompts, params)) for _ in range(2))
        return first, second

    expected, found = run(ALONE), two.run(run)
    assert found == [expected, expected]
    assert [token_ids for token_ids, _ in expected[0]] == texts
    accepted = {step.num_accepted for _, steps in expected[0] for step in steps}
    assert len(accepted) > 1, "some drafts are accepted, and some are rejected"


def map_text(prompt: Sequence[int], output: Sequence[int]) -> Sequence[int]:
    return [*prompt, *output]


class AheadDraft(ScriptedDraft):
    """Knows the texts, and is wrong at every third position."""

    def __init__(self, draft: Draft, ahead: dict[tuple[int, int], list[int]]) -> None:
        super().__init__(draft, lambda position: 0)
        self._ahead = ahead

    def logits(self, block_ids: Any, positions: Any, attend: Any, num_drafts: int | None = None) -> torch.Tensor:
        rows = []
        for ids, at in zip(block_ids, positions, strict=True):
            text = self._ahead.get((int(at[0]), int(ids[0])), [])
            drafted = [(text[place] + (place % 3 == 0)) % 97 if place < len(text) else 0 for place in at[1:].tolist()]
            rows.append(drafted)
        return torch.nn.functional.one_hot(torch.tensor(rows), 97).double()[:, :num_drafts]


def test_four_ranks_share_two_kv_heads(tmp_path: Path) -> None:
    source = write_family(tmp_path, "qwen3")
    prompts = random_prompts([7, 12], 97)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)

    def run(ranks: Ranks) -> Trace:
        llm = split_llm(load_share(source, ranks), None, 0, ranks)
        return trace_of(llm.generate(prompts, params))

    threads = RankThreads(4)
    assert threads.run(run) == [run(ALONE)] * 4
    threads.close()


@pytest.mark.parametrize(
    ("engine", "params"),
    [
        ({"scheduling": "async", "max_num_requests": 3}, SamplingParams(max_new_tokens=10)),
        ({"max_num_requests": 2, "max_batched_tokens": 9, "page_size": 4}, SamplingParams(max_new_tokens=10)),
        ({"max_num_requests": 3, "num_pages": 12, "page_size": 8}, SamplingParams(max_new_tokens=12)),
        ({"max_num_requests": 3}, SamplingParams(max_new_tokens=10, temperature=0.9, top_k=12, top_p=0.9, seed=3)),
        ({"max_num_requests": 2, "draft_sampling": "probabilistic", "seed": 4},
         SamplingParams(max_new_tokens=10, temperature=0.8)),
    ],
    ids=["async", "chunks", "few pages", "sampled", "sampled drafts"],
)  # fmt: skip
def test_modes_of_the_engine(engine: Json, params: SamplingParams, two: RankThreads) -> None:
    """The bundled pair. Its draft is right about half of the time."""
    source, draft_source = open_target(tiny_directory() / "target"), bundled_draft().source
    prompts = [list(prompt)[:30] for prompt in bundled_prompts()[:3]]
    prompts.append([*prompts[0], 5, 6])  # finds the first prompt's pages in the prefix cache

    def run(ranks: Ranks) -> tuple[Trace, int]:
        target = load_share(source, ranks)
        draft = load_draft(draft_source, target, placement(DOUBLE))
        llm = split_llm(target, draft, 7, ranks, max_model_len=128, **engine)
        return trace_of(llm.generate(prompts, params)), llm.engine.num_steps

    expected, found = run(ALONE), two.run(run)
    assert found == [expected, expected]
    assert len({step.num_accepted for _, steps in expected[0] for step in steps}) > 1


def test_requests_are_preempted_on_all_ranks(two: RankThreads) -> None:
    source = open_target(tiny_directory() / "target")
    prompts = [list(prompt)[:30] for prompt in bundled_prompts()[:3]]

    def run(ranks: Ranks) -> tuple[Trace, int]:
        llm = split_llm(load_share(source, ranks), None, 0, ranks, max_num_requests=3, scheduling="async")
        found = {}
        for number, delta in enumerate(llm.stream(prompts, SamplingParams(max_new_tokens=12)), start=1):
            if number % 9 == 0:
                preempt_youngest(llm)
            if delta.output is not None:
                found[delta.index] = delta.output
        outputs = [found[index] for index in sorted(found)]
        return trace_of(outputs), sum(output.num_preemptions for output in outputs)

    expected, found = run(ALONE), two.run(run)
    assert found == [expected, expected]
    assert expected[1] > 0


@pytest.mark.parametrize("form", ["blocks", "compressed rows", "compressed tensor", "static"])
def test_weights_in_fp8(form: str, tmp_path: Path, two: RankThreads) -> None:
    """Blocks, one scale per row and one scale per matrix. With scales of whole rows of activations, ranks round apart,
    so texts are compared with each other only.
    """
    kind = FORMS[form]
    quantise(tmp_path, "qwen3", kind.pack, kind.config, intermediate_size=64, num_key_value_heads=4)
    source, prompts = open_target(tmp_path), random_prompts([9, 4], 97)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)

    def run(ranks: Ranks) -> Trace:
        llm = split_llm(load_share(source, ranks), None, 0, ranks)
        return trace_of(llm.generate(prompts, params))

    first, second = two.run(run)
    assert first == second
    if form in ("blocks", "static"):
        assert first == run(ALONE)


def test_a_block_in_fp8_is_not_cut(tmp_path: Path, two: RankThreads) -> None:
    form = FORMS["blocks"]
    quantise(tmp_path, "qwen3", form.pack, form.config, intermediate_size=24)
    with refuses(UnsupportedError, "fp8-block-cut"):
        two.run(lambda ranks: load_share(open_target(tmp_path), ranks))


def test_ranks_with_other_results_are_found(two: RankThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 commits another token in one step: the next comparison ends the run on both ranks."""
    source = open_target(tiny_directory() / "target")
    monkeypatch.setattr("dflash_runtime.ranks.witness.STEPS_PER_LOOK", 4)

    def run(ranks: Ranks) -> tuple[str, int]:
        llm = split_llm(load_share(source, ranks), None, 0, ranks)
        if ranks.rank == 1:
            see, seen = llm.engine.witness.see_tokens, []

            def lie(request: Any, token_ids: list[int]) -> None:
                seen.append(request)
                see(request, [token + (len(seen) == 6) for token in token_ids])

            monkeypatch.setattr(llm.engine.witness, "see_tokens", lie)
        with pytest.raises(DFlashError) as caught:
            llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=40))
        return caught.value.id, llm.engine.num_steps

    assert two.run(run) == [("ranks-diverged", 8)] * 2


def test_equal_ranks_are_compared(two: RankThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard looks every few steps and at the end, and finds nothing."""
    source = open_target(tiny_directory() / "target")
    monkeypatch.setattr("dflash_runtime.ranks.witness.STEPS_PER_LOOK", 4)

    def run(ranks: Ranks) -> int:
        llm = split_llm(load_share(source, ranks), None, 0, ranks)
        compare, looks = llm.engine.witness.compare, []

        def look() -> None:
            looks.append(llm.engine.num_steps)
            compare()

        monkeypatch.setattr(llm.engine.witness, "compare", look)
        llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20, ignore_eos=True))
        return len(looks)

    assert min(two.run(run)) >= 5


def test_a_signal_ends_a_wait_for_a_rank(two: RankThreads) -> None:
    """Here the signal of a timer, which Python handles as it handles Ctrl-C: in the main thread, outside of torch."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    first, second = two.ranks
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            first.total(torch.ones(1, 1, 4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert second.total(torch.ones(1, 1, 4)).sum() == 8, "the exchange was under way"


def test_numbers_and_values_are_agreed_on(two: RankThreads) -> None:
    assert two.run(lambda ranks: ranks.least(7 + ranks.rank)) == [7, 7]
    value = {"times": [1.5, 2], "name": "ä"}
    assert two.run(lambda ranks: ranks.from_first(value if ranks.rank == 0 else None)) == [value, value]
    assert two.run(lambda ranks: ranks.are_equal(bytes([ranks.rank] * 16))) == [False, False]
    assert json.dumps(ALONE.from_first(value)) == json.dumps(value)
